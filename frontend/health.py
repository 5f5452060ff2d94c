"""Health as progress: what the scheduler pushes, how old it is, and which processes live. Never asks anybody."""

import os
import time
from dataclasses import dataclass, field

from depthbatch.common.messages import SchedulerHeartbeat
from depthbatch.frontend.attach import AttachedProcesses
from depthbatch.frontend.processes import Launcher

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
    """Remembers the last heartbeat."""

    def __init__(self) -> None:
        self._last: SchedulerHeartbeat | None = None
        self._heard_s = 0.0

    def start(self) -> None:
        """The engine has just become ready: silence counts from here."""
        self._heard_s = time.monotonic()

    def heartbeat(self, heartbeat: SchedulerHeartbeat) -> None:
        self._last = heartbeat
        self._heard_s = time.monotonic()

    def health(
        self,
        launcher: Launcher | AttachedProcesses,
        ready: bool,
        worker_ready: bool,
        failure: Exception | None,
        stall_s: float,
    ) -> EngineHealth:
        last = self._last
        silence_s = time.monotonic() - self._heard_s
        age_s = last.oldest_work_age_s if last is not None else 0.0
        processes = {"frontend": ProcessHealth(os.getpid(), "running", 0, 0.0, launcher.restarts("frontend"))}
        for name, is_ready in (("scheduler", ready), ("worker", worker_ready)):
            child = launcher.children.get(name)
            state = "dead" if child is None or not child.alive else "running" if is_ready else "starting"
            if state == "running" and (age_s > stall_s if name == "worker" else silence_s > SILENCE_S):
                state = "stalled"
            steps = 0 if last is None else last.worker_steps if name == "worker" else last.steps
            processes[name] = ProcessHealth(child.pid if child else 0, state, steps, age_s, launcher.restarts(name))
        states = [process.state for process in processes.values()]
        status = next((state for state in ("dead", "stalled", "starting") if state in states), "ok")
        if failure is not None:
            status = "dead"
        return EngineHealth(
            status, processes, last.num_running if last is not None else 0, last.num_waiting if last is not None else 0
        )
