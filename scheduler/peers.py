"""The peers of a scheduler process: its frontends, with the requests of each, and the one worker."""

from collections.abc import Iterable

from depthbatch.common.messages import (
    EngineReady,
    Fatal,
    Message,
    PrepareGrammar,
    Shutdown,
    Submit,
    TokenEvent,
    Tokens,
    WorkerHeartbeat,
)
from depthbatch.common.stats import WorkerStats
from depthbatch.common.transport import Router
from depthbatch.scheduler.stage_batch import ScheduledStage


class Frontends:
    """Routes by request. A peer that cannot be reached is forgotten, and its requests are named to the caller."""

    def __init__(self, link: Router) -> None:
        self.link = link
        self.ready: EngineReady | None = None
        self.worker_failure: Fatal | None = None  # of a worker that has not been replaced
        self._peers: set[bytes] = set()
        self._owner: dict[int, bytes] = {}

    @property
    def present(self) -> bool:
        """Some have said hello, or sent requests."""
        return bool(self._peers)

    def join(self, peer: bytes) -> None:
        """A frontend says hello: it gets heartbeats from now on, and what it has missed."""
        self._peers.add(peer)
        for message in (self.ready, self.worker_failure):
            if message is not None:
                self.send(peer, message)

    def assign(self, peer: bytes, request_id: int) -> None:
        """The request's tokens go to this frontend."""
        self._peers.add(peer)
        self._owner[request_id] = peer

    def owns(self, peer: bytes, request_id: int) -> bool:
        return self._owner.get(request_id) == peer

    def send(self, peer: bytes, message: Message) -> bool:
        return self.link.send(peer, message)

    def broadcast(self, message: Message) -> None:
        """To everyone; who has gone is forgotten (its requests, with their next token)."""
        self._peers = {peer for peer in self._peers if self.send(peer, message)}

    def publish(self, events: list[TokenEvent]) -> list[int]:
        """One message a frontend. Returns the requests of frontends that have gone: nobody wants them any more."""
        by_peer: dict[bytes, list[TokenEvent]] = {}
        for event in events:
            peer = self._owner.get(event.request_id)
            if peer is None:
                continue  # its frontend has gone
            by_peer.setdefault(peer, []).append(event)
            if event.finish_reason is not None:
                del self._owner[event.request_id]
        orphans: list[int] = []
        for peer, news in by_peer.items():
            if not self.send(peer, Tokens(tuple(news))):
                self._peers.discard(peer)
                orphans += self._forget(peer)
        return orphans

    def _forget(self, peer: bytes) -> Iterable[int]:
        orphans = [request_id for request_id, owner in self._owner.items() if owner == peer]
        for request_id in orphans:
            del self._owner[request_id]
        return orphans


class WorkerPeer:
    """The worker: at most one at a time, known by its routing id, and what it says of itself."""

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

    def prepare(self, submit: Submit) -> None:
        """Has the request's grammar compiled; a worker that cannot be reached is lost, and the next one is asked."""
        if self.peer is not None and not self.link.send(
            self.peer, PrepareGrammar(submit.request_id, submit.params.grammar)
        ):
            self.peer = None

    def send_shutdown(self) -> None:
        if self.peer is not None:
            self.link.send(self.peer, Shutdown())

    def stats(self) -> WorkerStats | None:
        """None until it has told."""
        last = self._last
        return None if last is None else WorkerStats(last.busy_s, last.idle_scheduler_s, last.idle_no_work_s)
