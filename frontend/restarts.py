"""Which deaths of processes are made good by a restart, and which end the engine. Knows nothing of requests or sockets."""

import time
from collections import deque
from typing import NamedTuple

from depthbatch.common.errors import USER_ERROR, ConfigError, DepthbatchError, EngineDeadError
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import EngineInfo, Fatal
from depthbatch.frontend.processes import Process, Processes

FATAL_GRACE_S = 0.3  # a dying worker's last words come through the scheduler
LAST_WORDS_S = 10.0  # those of a user's mistake are sure to come, however busy the machine is
MAX_RESTARTS = 5  # within RESTART_WINDOW_S; more means that restarting does not help
RESTART_WINDOW_S = 60.0

log = get_logger("frontend")


class RestartBudget:
    """How often something may be started again."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque()  # monotonic

    @property
    def spent(self) -> int:
        """Restarts within the last RESTART_WINDOW_S."""
        while self._times_s and self._times_s[0] < time.monotonic() - RESTART_WINDOW_S:
            self._times_s.popleft()
        return len(self._times_s)

    def spend(self) -> bool:
        """Books a restart; False when it is one too many."""
        self._times_s.append(time.monotonic())
        return self.spent <= MAX_RESTARTS


class Loss(NamedTuple):
    """Processes that have died, and the error with which the engine ends; None: they can be replaced."""

    dead: tuple[Process, ...]
    failure: DepthbatchError | None = None

    @property
    def of_scheduler(self) -> bool:
        return any(process.name == "scheduler" for process in self.dead)


class Restarts:
    """Watches the processes of one engine."""

    def __init__(self, processes: Processes) -> None:
        self.last_words: Fatal | None = None  # of a process that gives up; whoever hears them sets them
        self._processes = processes
        self._budget = RestartBudget()
        self._served = processes.served

    def start(self) -> None:
        self._processes.start("scheduler")
        self._processes.start("worker")

    def ready(self, info: EngineInfo) -> None:
        """The engine has just become ready: from here on a death is worth a restart."""
        self._processes.pin_kv_blocks(info.num_blocks - 1)
        self._served = True
        self.last_words = None

    def descriptors(self) -> set[int]:
        """File descriptors whose readability means that ``look`` has something to tell."""
        return {process.fd for process in self._processes.children.values() if not process.death_noticed}

    def look(self) -> Loss | None:
        """What has died, once it is known what that means."""
        dead = tuple(process for process in self._processes.children.values() if not process.alive)
        if not dead:
            return None
        if not self._served:
            return self._look_at_start(dead)
        if self._processes.backs_off or self._may_return(dead):
            return Loss(dead)
        reason = self.last_words.message if self.last_words is not None else dead[0].epitaph()
        return Loss(dead, EngineDeadError(f"restarting does not help: {reason}"))

    def _look_at_start(self, dead: tuple[Process, ...]) -> Loss | None:
        """A death before the engine was ever ready ends it, with the best reason to be had."""
        words, first = self.last_words, dead[0]
        if words is not None:
            failure = (
                ConfigError(words.message) if words.user_error else EngineDeadError(f"{first.name}: {words.message}")
            )
            return Loss(dead, failure)
        if all(process.dead_for_s < FATAL_GRACE_S for process in dead):
            return None
        if first.will_return() and self._may_return(dead):
            return Loss(dead)
        if first.exit_code == USER_ERROR:
            reason = first.last_line()
            if not reason and first.dead_for_s < LAST_WORDS_S:
                return None
            return Loss(dead, ConfigError(reason or first.epitaph()))
        return Loss(dead, EngineDeadError(first.epitaph()))

    def _may_return(self, dead: tuple[Process, ...]) -> bool:
        """What has ended with 0 was asked to: no fault, and not counted as one."""
        return all(process.exit_code == 0 for process in dead) or self._budget.spend()

    def replace(self, loss: Loss) -> None:
        """Starts again what has died. A scheduler gets a fresh worker: the old one's K/V means nothing to it."""
        for process in loss.dead:
            log.warning("%s; starting it again", process.epitaph())
        if loss.of_scheduler:
            self._processes.kill("worker")
            self.start()
        else:
            self._processes.start("worker")
