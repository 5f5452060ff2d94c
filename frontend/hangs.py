"""Ends a process that hangs, so that its death can be made good; before, it is asked for its stacks."""

import signal
import time
from typing import NamedTuple

from depthbatch.common.logging import get_logger
from depthbatch.common.os_process import STACKS_SIGNAL, state_of
from depthbatch.frontend.processes import Processes

STACKS_S = 1.0  # from the question for stacks to SIGKILL

log = get_logger("frontend")


class _Asked(NamedTuple):
    pid: int
    at_s: float  # monotonic


class HangWatch:
    """Over the processes of one engine."""

    def __init__(self, processes: Processes, limit_s: float) -> None:
        self.limit_s = limit_s
        self._processes = processes
        self._asked: _Asked | None = None

    def look(self, hung: str | None) -> None:
        """``hung``: the process that is said to hang now. Asked for its stacks at the first look; killed if it still
        hangs STACKS_S later."""
        process = None if hung is None else self._processes.children.get(hung)
        if hung is None or process is None or not process.alive or not process.pid:
            self._asked = None
            return
        now_s = time.monotonic()
        if self._asked is None or self._asked.pid != process.pid:
            self._asked = _Asked(process.pid, now_s)
            state = state_of(process.pid)
            log.error(
                "%s %d hangs: nothing from it for %g s; the kernel says %s", hung, process.pid, self.limit_s, state
            )
            if state.startswith(("T", "t")):
                log.error(
                    "%s %d is stopped by a signal or a debugger, so it cannot write its stacks", hung, process.pid
                )
            else:
                signal.pidfd_send_signal(process.fd, STACKS_SIGNAL)
        elif now_s - self._asked.at_s >= STACKS_S:
            log.error("%s %d is killed: it still hangs", hung, process.pid)
            self._asked = None
            self._processes.kill(hung)
