"""Requests from submit to their terminal event: where each one is, and every way from there to elsewhere. ::

    submit -> WAITING -> ACTIVE -> DRAINING -> DONE
                 ^          |
                 +----------+   preempted, or its worker lost

A request may end from any state.
"""

from collections.abc import Iterable

from depthbatch.common.messages import FinishReason, TokenEvent
from depthbatch.scheduler.admission import Admission
from depthbatch.scheduler.counters import Counters
from depthbatch.scheduler.inflight import InFlight
from depthbatch.scheduler.quarantine import Quarantine
from depthbatch.scheduler.requests import Request, State
from depthbatch.scheduler.selfcheck import check_ownership


class Lifecycle:
    """All unanswered requests, and the events of those that end."""

    def __init__(self, admission: Admission, counters: Counters, draft_lanes: int) -> None:
        self.quarantine = Quarantine(admission.waiting, draft_lanes)
        self._admission = admission
        self._counters = counters
        self._live: dict[int, Request] = {}
        self._unsettled: dict[int, Request] = {}  # preempted while tokens were in flight
        self.events: list[TokenEvent] = []  # to be published

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    def get(self, request_id: int) -> Request | None:
        """The request while it is unanswered."""
        return self._live.get(request_id)

    @property
    def unsettled(self) -> bool:
        """True when the prompt of some preempted request includes tokens that are not known yet."""
        return bool(self._unsettled)

    def add(self, request: Request) -> None:
        """A new request waits; one that was submitted with all its tokens ends at once."""
        self._live[request.request_id] = request
        self._admission.waiting.push(request)
        reason = finish_reason(request)
        if reason is not None:
            self.end(request, reason)

    def end(
        self,
        request: Request,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        depths: tuple[int, ...] = (),
        logprobs: bytes = b"",
        failure: str = "",
        kills_worker: bool = False,
    ) -> None:
        """Takes a request out of wherever it is, with its one last event; it is forgotten. ``failure``: why it ends with ERROR,
        and ``kills_worker`` whether that is why."""
        if request.state is State.ACTIVE:
            self._admission.release(request)
        elif request.state is State.WAITING:
            self._admission.waiting.remove(request)
            self._drop_host_blocks(request)
        self._unsettled.pop(request.request_id, None)
        self.quarantine.forget(request)
        request.state = State.DONE
        del self._live[request.request_id]
        self._counters.finished(reason)
        stop_reason = request.output[-1] if reason is FinishReason.STOP else None
        event = TokenEvent(
            request.request_id,
            tokens,
            depths,
            reason,
            stop_reason,
            logprobs,
            failure=failure,
            kills_worker=kills_worker,
            cached_tokens=request.cached_tokens if tokens and len(request.output) == 1 else 0,
        )
        self.events.append(event)

    def drain(self, request: Request) -> None:
        """Its last token is dispatched: slot and blocks are free for stages that come later in the stream."""
        self._admission.release(request)
        request.state = State.DRAINING

    def preempt(self, request: Request, may_offload: bool = False) -> None:
        """Slot and blocks are needed by others; it waits to be rebuilt, or for its K/V to come back from the host.
        ``may_offload``: what has been dispatched of it is to be kept."""
        self._counters.preemptions += 1
        admission = self._admission
        if may_offload and admission.offload is not None and admission.partial is not request:
            admission.offload.take_out(request, admission.rows)
        admission.release(request)
        self._wait_again(request)
        if request.pending:
            self._unsettled[request.request_id] = request

    def settle(self, requests: Iterable[Request | None]) -> None:
        """Tokens of these requests have come."""
        for request in requests:
            if request is not None and request.pending == 0:
                self._unsettled.pop(request.request_id, None)

    def lose_worker(self, in_flight: InFlight) -> None:
        """Every request that held a slot, or had its last token in flight, waits to be rebuilt; but for the one that has
        killed the worker, which ends. ``in_flight``: what the worker had not answered."""
        killer = self.quarantine.worker_died(self._live.values(), in_flight)
        self._unsettled.clear()
        lost = [r for r in self._live.values() if r.state in (State.ACTIVE, State.DRAINING)]
        for request in sorted(lost, key=lambda r: r.order, reverse=True):
            if request.state is State.ACTIVE:
                self._admission.release(request)
            self._wait_again(request)
        for request in self._live.values():
            self._drop_host_blocks(request)
            request.dispatched = len(request.output)
            request.targets_sent = request.targets_known
        if killer is not None:
            times = "twice" if killer.deaths == 2 else f"{killer.deaths} times"
            failure = f"the worker died {times} while running this request"
            self.end(killer, FinishReason.ERROR, failure=failure, kills_worker=True)

    def clear_proven(self) -> None:
        """Tokens have come: suspects among their requests may be none any more."""
        displaced = self.quarantine.clear_proven()
        if displaced is not None:
            self.preempt(displaced)

    def verify(self) -> None:
        """Full self-check: raises InvariantError unless every block, slot and row has exactly one owner."""
        check_ownership(self._admission, self._live.values())

    def _drop_host_blocks(self, request: Request) -> None:
        if self._admission.offload is not None:
            self._admission.offload.drop(request)

    def _wait_again(self, request: Request) -> None:
        request.state = State.WAITING
        request.preemptions += 1
        if self._admission.waiting.alone is request:
            self._admission.waiting.alone = None
        self._admission.waiting.push_front(request)


def finish_reason(request: Request) -> FinishReason | None:
    """Why the request ends with its last known token; None when it does not."""
    output = request.output
    if output and output[-1] in request.stop_ids and len(output) > request.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(output) >= request.limit else None
