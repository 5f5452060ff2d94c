"""Health as progress: what the scheduler pushes, how old it is, and which processes live. Never asks anybody."""

import os
import time
from dataclasses import dataclass, field

import msgspec

from depthbatch.common.messages import SchedulerHeartbeat
from depthbatch.frontend.processes import Processes

SILENCE_S = 5.0  # a living scheduler without a heartbeat for this long is stuck


@dataclass
class ProcessHealth:
    """One process."""

    pid: int
    state: str  # "running", "starting", "stalled", "dead"
    steps: int  # stages completed
    last_step_age_s: float  # age of the oldest work that waits for a step; 0 when there is none
    restarts: int


@dataclass
class EngineHealth:
    """``status`` is "ok" exactly when requests make progress or none is there; else "starting", "stalled", "dead"."""

    status: str
    processes: dict[str, ProcessHealth] = field(default_factory=dict)
    num_running: int = 0
    num_waiting: int = 0


class HealthMonitor:
    """Remembers the last heartbeat, and whether a worker serves."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._worker_ready = False  # False again while a worker that died is started anew
        self._last: SchedulerHeartbeat | None = None
        self._heard_s = 0.0

    def ready(self) -> None:
        """The engine has just become ready: silence counts from here."""
        self._worker_ready = True
        self._heard_s = time.monotonic()
        if self._last is not None:  # work that waited for a worker is not this one's hang
            self._last = msgspec.structs.replace(self._last, oldest_work_age_s=0.0)

    def worker_lost(self) -> None:
        self._worker_ready = False

    def heartbeat(self, heartbeat: SchedulerHeartbeat) -> None:
        self._last = heartbeat
        self._heard_s = time.monotonic()

    def health(self, scheduler_ready: bool, failure: Exception | None, stall_s: float) -> EngineHealth:
        """``failure``: why the engine is lost for good. ``stall_s``: work may wait that long for a step."""
        last, restarts = self._last, self._processes.restarts
        processes = {"frontend": ProcessHealth(os.getpid(), "running", 0, 0.0, restarts("frontend"))}
        for name, ready in (("scheduler", scheduler_ready), ("worker", self._worker_ready)):
            process = self._processes.children.get(name)
            state = "dead" if process is None or not process.alive else "running" if ready else "starting"
            if state == "running" and self._is_stalled(name, stall_s):
                state = "stalled"
            steps = 0 if last is None else last.worker_steps if name == "worker" else last.steps
            processes[name] = ProcessHealth(process.pid if process else 0, state, steps, self._age_s, restarts(name))
        states = [process.state for process in processes.values()]
        status = next((state for state in ("dead", "stalled", "starting") if state in states), "ok")
        if failure is not None:
            status = "dead"
        return EngineHealth(
            status, processes, last.num_running if last is not None else 0, last.num_waiting if last is not None else 0
        )

    def hung(self, scheduler_ready: bool, limit_s: float) -> str | None:
        """The process that serves and has not moved for ``limit_s`` although it should have, if there is one."""
        if not scheduler_ready:
            return None
        if time.monotonic() - self._heard_s > max(limit_s, SILENCE_S):
            return "scheduler"
        return "worker" if self._worker_ready and self._age_s > limit_s else None

    @property
    def _age_s(self) -> float:
        return self._last.oldest_work_age_s if self._last is not None else 0.0

    def _is_stalled(self, name: str, stall_s: float) -> bool:
        """The worker by its work, the scheduler by its silence."""
        return self._age_s > stall_s if name == "worker" else time.monotonic() - self._heard_s > SILENCE_S
