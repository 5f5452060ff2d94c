"""Finds the request that kills workers, so that it fails alone and whatever ran beside it goes on.

Every request with a stage in flight when a worker dies is implicated. It is cleared as soon as it has got past what was in
flight then. Implicated a second time without having been cleared, it is a suspect: suspects run one at a time, with
nothing beside them, before anything else does. A worker that dies while one request alone was in flight, which had been
implicated before, was killed by that one.

So a killer costs two deaths where it runs alone, and three where others run beside it. An innocent request fails only if
so many workers die of something else before it has got past what it ran at the first death, and the last one while it
runs alone. Where a rebuild decodes all of an output again (KV layouts whose loops share a plane) that may take a while.
"""

from collections.abc import Iterable

from depthbatch.common.frames import lanes_of_a_slot
from depthbatch.scheduler.inflight import InFlight
from depthbatch.scheduler.requests import Request, State, WaitingQueue


class Quarantine:
    """Requests that were implicated in a death and not cleared."""

    def __init__(self, waiting: WaitingQueue, draft_lanes: int) -> None:
        self._waiting = waiting
        self._ahead = lanes_of_a_slot(draft_lanes)  # tokens that may be on their way behind those that are dispatched
        self._implicated: dict[int, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._implicated)

    @property
    def wants_silence(self) -> bool:
        """A suspect is next, which must have nothing beside it, be it only in flight."""
        return self._waiting.alone is None and self._waiting.has_suspects

    def worker_died(self, live: Iterable[Request], in_flight: InFlight) -> Request | None:
        """Implicates; returns the request that has killed it, if that is known. To be called while stages and states
        are those of the death."""
        orders = in_flight.orders()
        running = [request for request in live if request.order in orders]
        for request in running:
            waits = request.state is State.WAITING  # it was preempted since
            if waits:
                self._waiting.remove(request)
            request.deaths += 1
            request.proof = max(request.proof, request.dispatched + self._ahead)
            self._implicated[request.request_id] = request
            if waits:
                self._waiting.push_front(request)
        if len(running) == len(orders) == 1 and running[0].is_suspect:
            return running[0]
        return None

    def clear_proven(self) -> Request | None:
        """To be called when tokens have come. Returns a suspect that is cleared and has to make room for the next one."""
        past = [request for request in self._implicated.values() if len(request.output) >= request.proof]
        for request in past:
            del self._implicated[request.request_id]
            request.deaths = 0
        alone = self._waiting.alone
        if alone is None or alone.is_suspect or alone.state is not State.ACTIVE:
            return None
        self._waiting.alone = None
        return alone if self._waiting.has_suspects else None

    def forget(self, request: Request) -> None:
        """It is answered."""
        self._implicated.pop(request.request_id, None)
        if self._waiting.alone is request:
            self._waiting.alone = None
