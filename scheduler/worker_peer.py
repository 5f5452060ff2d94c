"""The worker as the scheduler process sees it: at most one at a time, known by its routing id."""

from depthbatch.common.messages import Shutdown, WorkerHeartbeat
from depthbatch.common.transport import Router
from depthbatch.scheduler.assembly import ScheduledStage


class WorkerPeer:
    """The current worker and what it says of itself."""

    def __init__(self, link: Router) -> None:
        self.link = link
        self.peer: bytes | None = None
        self.pid = 0
        self.steps = 0
        self.stale_results = 0  # answers of workers that were replaced
        self._last: WorkerHeartbeat | None = None

    @property
    def present(self) -> bool:
        return self.peer is not None

    def take(self, peer: bytes, pid: int) -> None:
        """A worker is ready; any former one is gone."""
        self.peer, self.pid, self.steps, self._last = peer, pid, 0, None

    def lose(self) -> None:
        """The worker said that it cannot go on."""
        self.peer = None

    def take_heartbeat(self, peer: bytes, heartbeat: WorkerHeartbeat) -> None:
        if peer == self.peer:
            self.steps, self._last = heartbeat.steps, heartbeat

    def send(self, stage: ScheduledStage) -> None:
        """Header and frames as they lie in memory; a worker that cannot be reached is lost."""
        if self.peer is None:
            return
        frames = (stage.frame,) if stage.slot_params is None else (stage.frame, stage.slot_params)
        if not self.link.send(self.peer, stage.header, *frames):
            self.peer = None

    def send_shutdown(self) -> None:
        if self.peer is not None:
            self.link.send(self.peer, Shutdown())

    def stats(self) -> dict[str, float]:
        """Busy and idle seconds on the worker's own clock."""
        values: dict[str, float] = {"stale_worker_results_total": self.stale_results}
        if self._last is not None:
            values["worker_busy_seconds_total"] = self._last.busy_s
            values['worker_idle_seconds_total{cause="scheduler"}'] = self._last.idle_scheduler_s
            values['worker_idle_seconds_total{cause="no_work"}'] = self._last.idle_no_work_s
        return values
