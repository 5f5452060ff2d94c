"""The frontends of a scheduler process: who is there, which request belongs to whom."""

from collections.abc import Iterable

from depthbatch.common.messages import (
    EngineReady,
    Fatal,
    Message,
    SchedulerHeartbeat,
    TokenEvent,
    Tokens,
)
from depthbatch.common.transport import Router
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.worker_peer import WorkerPeer


class Frontends:
    """Routes by request. A peer that cannot be reached is forgotten, and its requests are named to the caller."""

    def __init__(self, link: Router) -> None:
        self.link = link
        self.ready: EngineReady | None = None
        self.last_words: Fatal | None = None  # of a worker that has not been replaced
        self._peers: set[bytes] = set()
        self._owner: dict[int, bytes] = {}

    def join(self, peer: bytes) -> None:
        """A frontend says hello: it gets heartbeats from now on, and what it has missed."""
        self._peers.add(peer)
        for message in (self.ready, self.last_words):
            if message is not None:
                self.send(peer, message)

    def adopt(self, peer: bytes, request_id: int) -> None:
        """The request's tokens go to this frontend."""
        self._peers.add(peer)
        self._owner[request_id] = peer

    def owns(self, peer: bytes, request_id: int) -> bool:
        return self._owner.get(request_id) == peer

    def send(self, peer: bytes, message: Message) -> bool:
        return self.link.send(peer, message)

    def tell_all(self, message: Message) -> None:
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

    def heartbeat(self, core: Scheduler | None, worker: WorkerPeer, oldest_work_age_s: float) -> None:
        """Progress, pushed to everyone."""
        steps, running, waiting = 0, 0, 0
        if core is not None:
            steps, running, waiting = core.counters.steps, core.num_running, core.num_waiting
        self.tell_all(
            SchedulerHeartbeat(steps, oldest_work_age_s, worker.pid, worker.steps, running, waiting),
        )

    def _forget(self, peer: bytes) -> Iterable[int]:
        orphans = [request_id for request_id, owner in self._owner.items() if owner == peer]
        for request_id in orphans:
            del self._owner[request_id]
        return orphans
