"""The scheduler core: a pure state machine. No I/O, no clock, no thread (architecture, section 2).

submit, abort, next_stage and complete are all there is. Row state advances when a stage is dispatched; results bring
tokens and gate flags. It composes: queues, pools, rows, policy, frames and counters each live in their own module.
"""

from collections.abc import Iterable
from itertools import islice, repeat

import numpy as np

from depthbatch.common.errors import RequestError
from depthbatch.common.frames import Int32Array, Stage
from depthbatch.common.messages import (
    PLAIN,
    FinishReason,
    Rejected,
    StageBatch,
    StageExtra,
    StageResult,
    Submit,
    TokenEvent,
    Variant,
)
from depthbatch.scheduler.admission import Admission
from depthbatch.scheduler.config import SchedulerConfig, bucket_table
from depthbatch.scheduler.counters import Counters
from depthbatch.scheduler.inflight import InFlight, InFlightStep
from depthbatch.scheduler.policy.fixed import Move, Policy
from depthbatch.scheduler.policy.make import make_policy
from depthbatch.scheduler.policy.view import LiveView
from depthbatch.scheduler.rebuild import cuts_to_remember, feed_forced_tokens, start_decode
from depthbatch.scheduler.requests import Request, State
from depthbatch.scheduler.rows import DECODE, EXITED, READY, SlotArray
from depthbatch.scheduler.selfcheck import check_idle, check_ownership
from depthbatch.scheduler.stage_batch import (
    PromptTargets,
    ScheduledStage,
    coda_variant,
    decode_frame,
    prefill_frame,
    prefill_variant,
    slot_param_frame,
    split_rows,
    stage_extra,
    take_targets,
)
from depthbatch.scheduler.validation import make_request


class Scheduler:
    """Request state, queues, KV accounting, stage selection and batch assembly for one worker."""

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None) -> None:
        self.config = config
        self.counters = Counters(config.max_num_seqs, config.r_max)
        self.policy = policy or make_policy(config)
        self.admission = Admission(config)
        self.rows = self.admission.rows
        self._requests: dict[int, Request] = {}
        self._in_flight = InFlight(config)
        self._view = LiveView(self.admission, self._in_flight, config.r_max)
        self._events: list[TokenEvent] = []  # terminal events that no result brings
        self._unsettled: dict[int, Request] = {}  # preempted while tokens were in flight
        self._bucket_of = bucket_table(config.buckets, config.max_num_seqs)
        self._next_step_id = 1
        self._arrivals = 0
        self._nothing_ran = True

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
        self._requests[request.request_id] = request
        reason = self._finish_reason(request)  # a resubmitted request may have all its tokens
        if reason is not None:
            self._events.append(self._terminal(request, (), (), reason))
            return None
        self.admission.waiting.push(request)
        return None

    def abort(self, request_id: int) -> bool:
        """Ends a request in any state; its terminal event comes with drain_events or the next complete. False when
        the id is unknown or already answered."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._detach(request)
        self._events.append(self._terminal(request, (), (), FinishReason.ABORT))
        self._check_when_idle()
        return True

    def next_stage(self, now: float) -> ScheduledStage | None:
        """The next stage to send, None when nothing can run or a result must come first. ``now`` in seconds."""
        if self._in_flight.full():
            return None
        self._view.now_s = now
        while (move := self.policy.choose(self._view)) is not None:
            if move is Move.PREFILL and self._unsettled:
                return None  # its prompt includes tokens that are not known yet
            stage = self._dispatch(move, now)
            if stage is not None:
                self._nothing_ran = False
                return stage
        self._nothing_ran = True
        return None

    def complete(self, result: StageResult, now: float) -> list[TokenEvent]:
        """Takes a stage's result; returns what there is to publish. Results of steps that are not in flight are
        counted and dropped. Raises ValueError on a result that does not fit its step."""
        step = self._in_flight.pop(result.step_id)
        if step is None:
            self.counters.stale_results += 1
            return self.drain_events()
        self.counters.retired(step.stage, result)
        if self.policy.learns:
            self.policy.observe(step, result.start_s, result.end_s)
        if step.decides:
            self._apply_flags(step, result.flags)
        if step.targets is not None:
            self._deliver_prompt(step, step.targets, result.prompt_logprobs)
        if step.requests:
            self._deliver(step, result)
        self._check_when_idle()
        return self.drain_events()

    # --- around them

    def drain_events(self) -> list[TokenEvent]:
        """Events that no result has carried yet."""
        events, self._events = self._events, []
        return events

    def recover(self) -> None:
        """The worker is gone: everything in flight is lost, every request it worked on waits to be rebuilt."""
        self._in_flight.clear()
        self._unsettled.clear()
        self.admission.forget_prefixes()
        lost = [r for r in self._requests.values() if r.state in (State.ACTIVE, State.DRAINING)]
        for request in sorted(lost, key=lambda r: r.order, reverse=True):
            if request.state is State.ACTIVE:
                self.admission.release(request)
            self._wait_again(request)
        for request in self._requests.values():
            request.dispatched = len(request.output)
            request.targets_sent = request.targets_known

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

    @property
    def view(self) -> LiveView:
        """Queue sizes."""
        return self._view

    def oldest_dispatch_s(self) -> float | None:
        """When the oldest unanswered stage was dispatched."""
        return self._in_flight.oldest_dispatch_s()

    def stats(self) -> dict[str, float]:
        """Counters and gauges under the names of interfaces.md."""
        view, values = self._view, self.counters.values()
        values["num_requests_running"] = self.num_running
        values["num_requests_waiting"] = self.num_waiting
        values["kv_cache_usage_perc"] = 1.0 - self.admission.blocks.free / self.config.usable_blocks
        if (prefixes := self.admission.prefixes) is not None:
            values |= {"prefix_cache_queries_total": prefixes.queries, "prefix_cache_hits_total": prefixes.hits}
        for name in ("q_p", "q_d", "q_r", "q_c"):
            values[f'queue_length{{queue="{name}"}}'] = getattr(view, name)
        return values

    def verify(self) -> None:
        """Full self-check: raises InvariantError unless every block, slot and row has exactly one owner."""
        check_ownership(self.admission, self._requests.values())

    # --- dispatch

    def _dispatch(self, move: Move, now: float) -> ScheduledStage | None:
        match move:
            case Move.CORE:
                return self._core(now)
            case Move.CODA:
                return self._coda(now)
            case Move.PRELUDE:
                return self._prelude(now)
            case Move.PREFILL:
                return self._prefill(now)

    def _core(self, now: float) -> ScheduledStage:
        rows = self.rows
        slots = rows.in_phase(READY)
        loops = rows.loop.take(slots)
        loops += 1
        rows.loop[slots] = loops
        leaving = slots[loops >= rows.exit_loop.take(slots)]
        if leaving.size:
            rows.move(leaving, READY, EXITED)
        gated = rows.any_of("gated", slots)
        step = InFlightStep(self._take_step_id(), Stage.CORE, slots, now, decides=gated)
        if gated:
            step.loops, step.epochs = loops, rows.epoch.take(slots)
            step.blocks_next = rows.any_of("own", slots) and self._awaits_own(slots, loops)
        positions = rows.position.take(slots)
        if self.policy.learns:
            step.tokens = int(positions.sum()) + slots.size
        frame = decode_frame(slots, positions, loops, self._bucket_of[slots.size])
        return self._send(step, frame, Variant.GATES if gated else PLAIN)

    def _awaits_own(self, slots: SlotArray, loops: Int32Array) -> bool:
        rows = self.rows
        undecided = rows.own[slots] & (loops >= rows.first_flag_loop[slots]) & (loops < rows.max_loops[slots])
        return bool(undecided.any())

    def _coda(self, now: float) -> ScheduledStage:
        rows = self.rows
        slots = rows.in_phase(EXITED)
        depths = rows.loop.take(slots)
        positions = rows.position.take(slots)
        frame = decode_frame(slots, positions, depths, self._bucket_of[slots.size])
        variant = coda_variant(rows, slots)  # while the slots still know their requests
        last = slots[positions >= rows.last_position.take(slots)]
        by_slot = rows.request
        requests = tuple([by_slot[slot] for slot in slots.tolist()])
        if rows.any_of("forced", slots):
            known = rows.forced[slots].tolist()
            requests = tuple([None if old else request for request, old in zip(requests, known, strict=True)])
        step = InFlightStep(self._take_step_id(), Stage.CODA, slots, now, scored=bool(variant & Variant.LOGPROBS))
        step.requests = requests
        step.depths = tuple(depths.tolist())
        positions += 1
        rows.position[slots] = positions
        rows.move(slots, EXITED, DECODE)
        for request in requests:
            if request is not None:
                request.dispatched += 1
        for slot in last.tolist():
            self._drain(slot)
        return self._send(step, frame, variant)

    def _prelude(self, now: float) -> ScheduledStage | None:
        """None when preemption has left nothing to run."""
        rows = self.rows
        while self.admission.blocks_missing():
            self._preempt(rows.youngest())
        slots = rows.in_phase(DECODE)
        if not slots.size:
            return None
        new_blocks = self.admission.grow(slots)
        rows.start_token(slots)
        extra = feed_forced_tokens(rows, slots) if rows.any_of("forced", slots) else None
        step = InFlightStep(self._take_step_id(), Stage.PRELUDE, slots, now)
        step.decides = step.blocks_next = rows.any_of("preloop", slots)
        if step.decides:
            step.epochs = rows.epoch.take(slots)
        frame = decode_frame(slots, rows.position.take(slots), new_blocks, self._bucket_of[slots.size])
        return self._send(step, frame, Variant.GATES if step.decides else PLAIN, extra)

    def _prefill(self, now: float) -> ScheduledStage:
        chunks = self.admission.pack(self.policy.prefill_limit)
        frame = prefill_frame(chunks)
        params = slot_param_frame([chunk.request for chunk in chunks if chunk.new_blocks.size])
        slots = np.array([chunk.request.slot for chunk in chunks], dtype=np.intp)
        sampled = [chunk.request for chunk in chunks if chunk.samples]
        step = InFlightStep(self._take_step_id(), Stage.PREFILL, slots, now)
        step.requests = tuple(sampled)
        step.depths = (self.config.r_max,) * len(sampled)
        step.tokens = n_tokens = sum(chunk.length for chunk in chunks)
        self.counters.prompt_tokens += n_tokens
        self.counters.waited((chunk.request for chunk in chunks), now)
        header = StageBatch(
            step.step_id,
            Stage.PREFILL,
            bucket=0,
            rows=len(chunks),
            n_tokens=n_tokens,
            n_updates=sum(chunk.new_blocks.size for chunk in chunks),
            variant=prefill_variant(chunks),
            n_slot_params=0 if params is None else len(params),
            after_no_work=self._nothing_ran,
            extra=stage_extra(chunks, self.config.r_max),
        )
        step.scored = bool(header.variant & Variant.LOGPROBS)
        step.targets = take_targets(chunks)
        for request in [chunk.request for chunk in chunks if chunk.is_last]:
            request.dispatched += not request.output
            start_decode(self.rows, request)
            if request.dispatched >= request.limit:
                self._drain(request.slot)
        step.after_no_work = self._nothing_ran
        self._in_flight.push(step)
        self.counters.dispatched(Stage.PREFILL, len(chunks), 0)
        return ScheduledStage(header, frame, params)

    def _send(
        self, step: InFlightStep, frame: Int32Array, variant: Variant, extra: StageExtra | None = None
    ) -> ScheduledStage:
        """Books a decode stage."""
        rows, bucket = step.slots.size, frame.shape[1]
        step.after_no_work = self._nothing_ran
        self._in_flight.push(step)
        self.counters.dispatched(step.stage, rows, bucket)
        header = StageBatch(
            step.step_id, step.stage, bucket, rows, variant=variant, after_no_work=self._nothing_ran, extra=extra
        )
        return ScheduledStage(header, frame, None)

    def _take_step_id(self) -> int:
        step_id = self._next_step_id
        self._next_step_id += 1
        return step_id

    # --- results

    def _apply_flags(self, step: InFlightStep, data: bytes) -> None:
        """Gate flags become exits; rows that have since left or carry another token are not touched."""
        rows, slots = self.rows, step.slots
        flags = np.frombuffer(data, np.uint8)
        if flags.size != slots.size or step.epochs is None:
            raise ValueError(f"step {step.step_id} has {slots.size} rows, its result {flags.size} flags")
        current = rows.epoch[slots] == step.epochs
        if rows.active_with["forced"]:
            current &= ~rows.forced[slots]  # their depths are known
        if step.stage is Stage.PRELUDE:
            fired = slots[current & rows.preloop[slots]]
            depth = flags[current & rows.preloop[slots]].astype(np.int32)
            low = rows.first_flag_loop[fired] + rows.delay[fired]
            rows.exit_loop[fired] = np.clip(depth, low, rows.max_loops[fired])
            return
        assert step.loops is not None
        counts = current & (flags != 0) & rows.gated[slots] & (step.loops >= rows.first_flag_loop[slots])
        fired = slots[counts]
        exits = np.minimum(step.loops[counts] + rows.delay[fired], rows.exit_loop[fired])
        rows.exit_loop[fired] = exits
        leaving = fired[(rows.loop[fired] >= exits) & (rows.phase[fired] == READY)]
        if leaving.size:
            rows.move(leaving, READY, EXITED)

    def _deliver_prompt(self, step: InFlightStep, targets: PromptTargets, logprobs: bytes) -> None:
        """Logprobs of prompt tokens become events without tokens."""
        rows = iter(split_rows(logprobs, sum(targets.counts)))
        for request, count in zip(*targets, strict=True):
            data = b"".join(islice(rows, count))
            if request.state is not State.DONE:
                request.targets_known += count
                self._events.append(TokenEvent(request.request_id, (), (), prompt_logprobs=data))

    def _deliver(self, step: InFlightStep, result: StageResult) -> None:
        """Sampled tokens become events; a stop token ends its request one result late (architecture, section 3)."""
        tokens = np.frombuffer(result.token_ids, "<i4").tolist()
        if len(tokens) != len(step.requests):
            raise ValueError(f"step {step.step_id} samples {len(step.requests)} tokens, its result has {len(tokens)}")
        events, dropped = self._events, 0
        logprobs: Iterable[bytes] = repeat(b"")
        if step.scored:
            rows = split_rows(result.logprobs, len(tokens))
            logprobs = [row if r and r.params.logprobs else b"" for r, row in zip(step.requests, rows, strict=True)]
        failed = {failure.row: failure.reason for failure in result.failed}
        for row, (request, token, depth, logprobs_row) in enumerate(
            zip(step.requests, tokens, step.depths, logprobs, strict=False)
        ):
            if request is None or request.state is State.DONE:
                dropped += 1
                continue
            if row in failed:
                dropped += 1
                self._detach(request)
                self._events.append(self._terminal(request, (), (), FinishReason.ERROR, failure=failed[row]))
                continue
            output = request.output
            output.append(token)
            request.depths.append(depth)
            if token in request.stop_ids or len(output) >= request.limit:
                reason = self._finish_reason(request)
                if reason is not None:
                    self._finish(request, token, depth, reason, logprobs_row)
                    continue
            cuts = cuts_to_remember(request) if len(output) == 1 else b""
            events.append(TokenEvent(request.request_id, (token,), (depth,), logprobs=logprobs_row, cuts=cuts))
            if self._unsettled and request.pending == 0:
                self._unsettled.pop(request.request_id, None)
        self.counters.dropped_tokens += dropped
        self.counters.generation_tokens += len(tokens) - dropped
        pairs = zip(step.requests, step.depths, strict=True)
        self.counters.depths(step.depths if None not in step.requests else tuple([d for r, d in pairs if r]))

    def _finish(self, request: Request, token: int, depth: int, reason: FinishReason, logprobs_row: bytes) -> None:
        if request.state is State.ACTIVE:  # a stop token: what was dispatched since is wasted
            self.counters.lookahead_wasted_steps += self._in_flight.steps_with(request.slot)
        self._detach(request)
        self._events.append(self._terminal(request, (token,), (depth,), reason, logprobs_row))

    def _finish_reason(self, request: Request) -> FinishReason | None:
        """Why the request ends with its last known token."""
        output = request.output
        if output and output[-1] in request.stop_ids and len(output) > request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) >= request.limit else None

    def _terminal(
        self,
        request: Request,
        tokens: tuple[int, ...],
        depths: tuple[int, ...],
        reason: FinishReason,
        logprobs_row: bytes = b"",
        failure: str = "",
    ) -> TokenEvent:
        """The one last event of a request; the request is forgotten."""
        request.state = State.DONE
        del self._requests[request.request_id]
        self.counters.finished(reason)
        stop_reason = request.output[-1] if reason is FinishReason.STOP else None
        return TokenEvent(request.request_id, tokens, depths, reason, stop_reason, logprobs_row, failure=failure)

    # --- requests that leave their slot

    def _drain(self, slot: int) -> None:
        """The last token is dispatched: slot and blocks are free for stages that come later in the stream."""
        request = self.rows.request[slot]
        assert request is not None
        self.admission.release(request)
        request.state = State.DRAINING

    def _detach(self, request: Request) -> None:
        """Takes a request out of wherever it is."""
        if request.state is State.ACTIVE:
            self.admission.release(request)
        elif request.state is State.WAITING:
            self.admission.waiting.remove(request)
        self._unsettled.pop(request.request_id, None)

    def _preempt(self, slot: int) -> None:
        request = self.rows.request[slot]
        assert request is not None
        self.counters.preemptions += 1
        self.admission.release(request)
        self._wait_again(request)
        if request.pending:
            self._unsettled[request.request_id] = request

    def _wait_again(self, request: Request) -> None:
        request.state = State.WAITING
        request.epoch += 1
        request.preempted = True
        self.admission.waiting.push_front(request)

    def _check_when_idle(self) -> None:
        if not self._requests and not len(self._in_flight):
            check_idle(self.admission)
