"""The scheduler core: a pure state machine. No I/O, no clock, no thread (architecture, section 2).

submit, abort, next_stage and complete are all there is. Row state advances when a stage is dispatched; results bring
tokens and what gates said. It composes: queues, pools, rows, policy, dispatch, request lifecycle and counters each live in
their own module.
"""

from collections.abc import Iterable
from itertools import islice, repeat

import msgspec
import numpy as np

from depthbatch.common.errors import RequestError
from depthbatch.common.frames import Stage
from depthbatch.common.messages import FinishReason, Rejected, StageResult, Submit, TokenEvent
from depthbatch.common.stats import CoreStats, PrefixCacheStats
from depthbatch.scheduler.admission import Admission
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.counters import Counters
from depthbatch.scheduler.dispatch import Dispatch
from depthbatch.scheduler.inflight import InFlight, InFlightStep
from depthbatch.scheduler.kv_events import Event as KvEvent
from depthbatch.scheduler.lanes import CodaRows
from depthbatch.scheduler.lifecycle import Lifecycle, finish_reason
from depthbatch.scheduler.policy.make import make_policy
from depthbatch.scheduler.policy.view import Decision, Policy, QueueView, RetiredStage
from depthbatch.scheduler.rebuild import cuts_to_remember
from depthbatch.scheduler.requests import Request, State
from depthbatch.scheduler.selfcheck import check_idle
from depthbatch.scheduler.stage_batch import PromptTargets, ScheduledStage, split_rows
from depthbatch.scheduler.validation import make_request


class Scheduler:
    """Request state, queues, KV accounting, stage selection and batch assembly for one worker."""

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None) -> None:
        self.config = config
        self.counters = Counters(max(config.max_num_seqs, config.buckets[-1]), config.r_max)
        self.policy = policy or make_policy(config)
        self.admission = Admission(config)
        self._requests = Lifecycle(self.admission, self.counters, config.draft_lanes)
        self._in_flight = InFlight(config)
        self._dispatch = Dispatch(
            config, self.admission, self._requests, self._in_flight, self.counters, self.policy.learns
        )
        self.view = QueueView(self.admission, self._in_flight, config.r_max)
        self._arrivals = 0

    # --- the four verbs

    def submit(self, submit: Submit, now: float | None = None) -> Rejected | None:
        """Queues a request, or says why it can never be served. ``now``: seconds; without it its wait is not counted."""
        try:
            if submit.request_id in self._requests:
                raise RequestError(f"request id {submit.request_id} is in use", "request_id")
            request = make_request(submit, self.config, self.policy.full_depth, self._arrivals)
        except RequestError as error:
            self.counters.rejected(error.param or "other")
            return Rejected(submit.request_id, str(error), error.param)
        self._arrivals += 1
        request.arrived_s = now
        self._requests.add(request)
        return None

    def abort(self, request_id: int) -> bool:
        """Ends a request in any state; its terminal event comes with drain_events or the next complete. False when
        the id is unknown or already answered."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._requests.end(request, FinishReason.ABORT)
        self._check_when_idle()
        return True

    def next_stage(self, now: float) -> ScheduledStage | None:
        """The next stage to send, None when nothing can run or a result must come first. ``now`` in seconds."""
        if self._in_flight.full():
            return None
        while (decision := self.policy.choose(self.view, now)) is not None:
            if decision.stage is Stage.PREFILL and self._requests.unsettled:
                return None  # its prompt includes tokens that are not known yet
            if decision.stage is Stage.PREFILL and self._requests.quarantine.wants_silence and len(self._in_flight):
                return None
            stage = self._apply(decision, now)
            if stage is not None:
                return stage
        self._dispatch.nothing_ran = True
        return None

    def complete(self, result: StageResult, now: float) -> list[TokenEvent]:
        """Takes a stage's result; returns what there is to publish. Results of steps that are not in flight are
        counted and dropped. Raises ValueError on a result that does not fit its step."""
        step = self._in_flight.pop(result.step_id)
        if step is None:
            self.counters.stale_results += 1
            return self.drain_events()
        self.counters.retired(step.stage, result)
        self._dispatch.verdicts.observe(step, result)
        if self.admission.offload is not None:
            self.admission.offload.costs.observe(step, result)
        if self.policy.learns:
            self.policy.observe(_retired(step, result))
        if step.decides:
            self._apply_gates(step, result)
        if step.targets is not None:
            self._deliver_prompt(step.targets, result.prompt_logprobs)
        if step.requests:
            self._deliver(step, result)
            if self._requests.quarantine:
                self._requests.clear_proven()
        self._check_when_idle()
        return self.drain_events()

    # --- around them

    def drain_events(self) -> list[TokenEvent]:
        """Events that no result has carried yet."""
        events, self._requests.events = self._requests.events, []
        return events

    def drain_kv_events(self) -> tuple[KvEvent, ...]:
        """What has happened to cached prefixes; nothing where it is not collected."""
        return self.admission.kv_events.take() if self.admission.kv_events is not None else ()

    def recover(self) -> None:
        """The worker is gone: everything in flight is lost, every request it worked on waits to be rebuilt, but for one
        that is found to have killed it."""
        self._requests.lose_worker(self._in_flight)
        self.admission.forget_memory()  # and with it what those that have left their slots published
        self._in_flight.clear()
        self._dispatch.nothing_ran = True  # what passed until the next worker was there is no stage's cost
        self._check_when_idle()

    @property
    def num_running(self) -> int:
        return self.admission.num_active

    @property
    def num_waiting(self) -> int:
        return len(self.admission.waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def preemptions_of(self, request_id: int) -> int:
        """Times that an unanswered request lost its slot; 0 of any other."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.preemptions

    def oldest_dispatch_s(self) -> float | None:
        """When the oldest unanswered stage was dispatched."""
        return self._in_flight.oldest_dispatch_s()

    def stats(self) -> CoreStats:
        """Counters and gauges."""
        view, prefixes, offload = self.view, self.admission.prefixes, self.admission.offload
        block_bytes = self.config.block_bytes
        return msgspec.structs.replace(
            self.counters.stats(),
            running=self.num_running,
            waiting=self.num_waiting,
            waiting_tokens=sum(request.num_tokens for request in self.admission.waiting),
            kv_usage=1.0 - self.admission.blocks.free / self.config.usable_blocks,
            queue_lengths={name: int(getattr(view, name)) for name in ("q_p", "q_d", "q_r", "q_c")},
            prefix_cache=None if prefixes is None else PrefixCacheStats(prefixes.queries, prefixes.hits),
            offloaded_bytes=0 if offload is None else offload.offloaded_blocks * block_bytes,
            restored_bytes=0 if offload is None else offload.restored_blocks * block_bytes,
            drafts={} if self.admission.chains is None else self.admission.chains.draft_stats(),
        )

    def verify(self) -> None:
        """Full self-check: raises InvariantError unless every block, slot and row has exactly one owner."""
        self._requests.verify()

    # --- decisions

    def _apply(self, decision: Decision, now: float) -> ScheduledStage | None:
        """Does what the policy has decided; None when no stage has come of it and it is to be asked again."""
        match decision.stage:
            case Stage.CORE:
                return self._dispatch.core(now)
            case Stage.CODA:
                return self._dispatch.coda(now, decision.drafts)
            case Stage.PRELUDE:
                return self._dispatch.prelude(now)
            case Stage.PREFILL:
                return self._dispatch.prefill(now, decision.prefill_limit)
        assert decision.set_back is not None
        request = self._requests.get(decision.set_back)
        assert request is not None and request.state is State.WAITING
        self.admission.waiting.set_overdue(request)
        return None

    # --- results

    def _apply_gates(self, step: InFlightStep, result: StageResult) -> None:
        """What gates have said becomes exits."""
        predicts = step.stage is Stage.PRELUDE
        said = np.frombuffer(result.predicted_depths if predicts else result.fired, np.uint8)
        if said.size != step.slots.size:
            raise ValueError(f"step {step.step_id} has {step.slots.size} rows, gates of its result {said.size}")
        assert step.epochs is not None
        rows = self.admission.rows
        if predicts:
            rows.set_predicted_depths(step.lanes, step.epochs, said)
            exited = rows.fire_first(step.lanes, step.epochs, said)
        else:
            assert step.loops is not None
            exited = rows.fire(step.lanes, step.epochs, step.loops, said)
        if self.admission.chains is not None:
            self.admission.chains.hold(exited)

    def _deliver_prompt(self, targets: PromptTargets, logprobs: bytes) -> None:
        """Logprobs of prompt tokens become events without tokens."""
        rows = iter(split_rows(logprobs, sum(targets.counts)))
        for request, count in zip(*targets, strict=True):
            data = b"".join(islice(rows, count))
            if request.state is not State.DONE:
                request.targets_known += count
                self._requests.events.append(TokenEvent(request.request_id, (), (), prompt_logprobs=data))

    def _deliver(self, step: InFlightStep, result: StageResult) -> None:
        """Sampled tokens become events; a stop token ends its request one result late (architecture, section 3)."""
        tokens = np.frombuffer(result.token_ids, "<i4").tolist()
        if len(tokens) != len(step.requests):
            raise ValueError(f"step {step.step_id} samples {len(step.requests)} tokens, its result has {len(tokens)}")
        events, dropped = self._requests.events, 0
        logprobs: Iterable[bytes] = repeat(b"")
        if step.brings_logprobs:
            rows = split_rows(result.logprobs, len(tokens))
            logprobs = [row if r and r.params.logprobs else b"" for r, row in zip(step.requests, rows, strict=True)]
        for failure in result.failed:
            failed = step.requests[failure.row]
            if failed is not None and failed.state is not State.DONE:
                self._requests.end(failed, FinishReason.ERROR, failure=failure.reason)
        for request, token, depth, token_logprobs in zip(step.requests, tokens, step.depths, logprobs, strict=False):
            if request is None or request.state is State.DONE:
                dropped += 1
                continue
            output = request.output
            output.append(token)
            request.depths.append(depth)
            if token in request.stop_ids or len(output) >= request.limit:
                reason = finish_reason(request)
                if reason is not None:
                    self._finish(request, token, depth, reason, token_logprobs)
                    continue
            first = len(output) == 1
            cuts, cached = (cuts_to_remember(request), request.cached_tokens) if first else (b"", 0)
            event = TokenEvent(
                request.request_id, (token,), (depth,), logprobs=token_logprobs, cuts=cuts, cached_tokens=cached
            )
            events.append(event)
        if self._requests.unsettled:
            self._requests.settle(step.requests)
        pairs = zip(step.requests, step.depths, strict=True)
        depths = step.depths if None not in step.requests else tuple([d for r, d in pairs if r])
        delivered = len(tokens) - dropped
        if step.chained is not None:
            dropped -= step.chained.lanes.size
            committed = self._deliver_chained(step.chained, result)
            delivered, depths = delivered + len(committed), depths + committed
        self.counters.dropped_tokens += dropped
        self.counters.generation_tokens += delivered
        self.counters.depths(depths)

    def _deliver_chained(self, rows: CodaRows, result: StageResult) -> tuple[int, ...]:
        """Tokens of chains that are certain with this result; returns their depths."""
        chains, tokens = self.admission.chains, np.frombuffer(result.token_ids, "<i4")
        assert chains is not None
        committed = chains.take(rows, tokens, split_rows(result.logprobs, tokens.size) if result.logprobs else [])
        events = self._requests.events
        for request, token, depth, token_logprobs, accepted, rejected in zip(*committed, strict=True):
            output = request.output
            output.append(token)
            request.depths.append(depth)
            if token_logprobs and not request.params.logprobs:
                token_logprobs = b""
            if token in request.stop_ids or len(output) >= request.limit:
                reason = finish_reason(request)
                if reason is not None:
                    self._finish(request, token, depth, reason, token_logprobs)
                    continue
            event = TokenEvent(
                request.request_id,
                (token,),
                (depth,),
                logprobs=token_logprobs,
                accepted_drafts=accepted,
                rejected_drafts=rejected,
            )
            events.append(event)
        return tuple(committed.depths)

    def _finish(self, request: Request, token: int, depth: int, reason: FinishReason, logprobs: bytes) -> None:
        if request.state is State.ACTIVE:  # a stop token: what was dispatched since is wasted
            self.counters.lookahead_wasted_steps += self._in_flight.steps_with(request.slot)
        self._requests.end(request, reason, (token,), (depth,), logprobs)

    def _check_when_idle(self) -> None:
        if not len(self._requests) and not len(self._in_flight):
            check_idle(self.admission)


def _retired(step: InFlightStep, result: StageResult) -> RetiredStage:
    first_tokens: tuple[tuple[int, int], ...] = ()
    if step.stage is Stage.PREFILL:
        first_tokens = tuple([(r.slot, r.order) for r in step.requests if r is not None and r.slot])
    slots, depths = step.slots, step.depths
    if step.chained is not None:
        drafts = step.chained.index[~step.chained.final]
        slots, depths = np.delete(slots, drafts), tuple(np.delete(depths, drafts).tolist())
    return RetiredStage(
        step.stage,
        step.header.rows,
        slots,
        depths,
        step.tokens,
        first_tokens,
        step.header.after_no_work,
        result.start_s,
        result.end_s,
        awaited=step.stage is Stage.CODA and step.blocks_next,
        verdict_s=step.verdict_s,
        moved_s=result.moved_s,
    )
