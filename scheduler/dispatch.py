"""Stages from the rows and prompts they run: the header, frame and parameters to send, and the record of what is in flight.

Row state advances here, when a stage is dispatched.
"""

import numpy as np

from depthbatch.common.frames import FORCED_TOKEN_FIELDS, Int32Array, Stage
from depthbatch.common.messages import PLAIN, StageBatch, StageExtra, Variant
from depthbatch.scheduler.admission import Admission
from depthbatch.scheduler.config import DraftLimit, SchedulerConfig, bucket_table
from depthbatch.scheduler.counters import Counters
from depthbatch.scheduler.inflight import InFlight, InFlightStep
from depthbatch.scheduler.lanes import Chains
from depthbatch.scheduler.lifecycle import Lifecycle
from depthbatch.scheduler.offload import with_moves
from depthbatch.scheduler.rebuild import feed_forced_tokens, start_decode
from depthbatch.scheduler.requests import PrefillLimit, Request
from depthbatch.scheduler.rows import BLOCKED, DECODE, EXITED, READY, SlotArray
from depthbatch.scheduler.stage_batch import (
    ScheduledStage,
    coda_variant,
    decode_frame,
    prefill_frame,
    prefill_variant,
    slot_param_frame,
    stage_extra,
    take_targets,
)
from depthbatch.scheduler.verdicts import Verdicts


class Dispatch:
    """One method a stage; the caller has checked that it can run."""

    def __init__(
        self,
        config: SchedulerConfig,
        admission: Admission,
        requests: Lifecycle,
        in_flight: InFlight,
        counters: Counters,
        learns: bool,
    ) -> None:
        """``learns``: the policy observes stages, so context tokens are counted."""
        self._r_max = config.r_max
        self._admission = admission
        self._requests = requests
        self._in_flight = in_flight
        self._counters = counters
        self._learns = learns
        self._rows = admission.rows
        self._chains = admission.chains
        self._bucket_of = bucket_table(config.buckets, config.buckets[-1])
        self.next_step_id = 1
        self.nothing_ran = True  # the worker stands still because nothing was runnable
        self.verdicts = Verdicts(admission.chains)

    def core(self, now: float) -> ScheduledStage:
        """One loop of every row of Q_R."""
        rows = self._rows
        lanes = rows.in_phase(READY)
        loops = rows.begin_loop(lanes)
        if self._chains is not None and self._chains.chained:
            self._counters.draft_rows += int(np.count_nonzero(self._chains.guess[lanes]))
            self._chains.hold(lanes[rows.phase[lanes] == EXITED])
            self._chains.block()
        gated = rows.any_of("gated", lanes)
        step, frame = self._decode(Stage.CORE, lanes, now, loops, Variant.GATES if gated else PLAIN)
        if gated:
            step.loops, step.epochs = loops, rows.epoch.take(lanes)
            step.blocks_next = rows.awaits_own(lanes, loops)
        if self._learns:
            step.tokens = int(rows.position.take(lanes).sum()) + lanes.size
        return self._send(step, frame)

    def coda(self, now: float, drafts: DraftLimit | None) -> ScheduledStage:
        """A token of every row of Q_C, and drafts up to the limit."""
        if self._chains is not None and (drafts is not None or self._chains.chained):
            return self._chained_coda(self._chains, now, drafts)
        rows = self._rows
        slots = rows.in_phase(EXITED)
        depths = rows.loop.take(slots)
        variant = coda_variant(rows, slots)
        step, frame = self._decode(Stage.CODA, slots, now, depths, variant)
        by_slot = rows.request
        requests = tuple([by_slot[slot] for slot in rows.slots_of(slots).tolist()])
        if rows.any_of("forced", slots):
            forced = rows.forced[slots].tolist()
            requests = tuple([None if known else request for request, known in zip(requests, forced, strict=True)])
        step.requests = requests
        step.depths = tuple(depths.tolist())
        if self._chains is not None:
            self._chains.go_on(slots)
        last = rows.begin_coda(slots)
        for request in requests:
            if request is not None:
                request.dispatched += 1
        for lane in last.tolist():
            self._requests.drain(self._request_at(int(rows.slot[lane])))
        return self._send(step, frame)

    def _chained_coda(self, chains: Chains, now: float, limit: DraftLimit | None) -> ScheduledStage:
        """Rows of Q_C, HELD rows whose planes are to be filled, and tails that are read for a draft."""
        rows, admission = self._rows, self._admission
        finals, extra, unfilled = rows.in_phase(EXITED), admission.tails(limit), chains.unfilled()
        extra = np.union1d(extra, unfilled) if unfilled.size else np.sort(extra)
        lanes = np.concatenate([finals, extra])
        loops = rows.loop.take(lanes)
        phase = rows.phase.take(lanes)
        aux = np.where((phase == READY) | (phase == BLOCKED), -loops, loops)
        step, frame = self._decode(Stage.CODA, lanes, now, aux, coda_variant(rows, lanes))
        plain, record = chains.begin_coda(finals, extra)
        requests: list[Request | None] = [None] * lanes.size
        last: SlotArray = plain
        if plain.size:
            row_of = np.searchsorted(finals, plain)  # Q_C is in the order of lanes
            for row, slot in zip(row_of.tolist(), rows.slot.take(plain).tolist(), strict=True):
                request = self._request_at(slot)
                requests[row] = request
                request.dispatched += 1
            last = rows.begin_coda(plain)
        step.requests, step.depths, step.chained = tuple(requests), tuple(loops.tolist()), record
        if record.final.any():  # are the lanes behind a final readout right?
            heads = int(np.count_nonzero(~chains.guess[record.lanes[record.final]]))
            step.blocks_next = self.verdicts.awaited(heads, rows.sequences)
            step.verdict_s, step.blocks_after_core = self.verdicts.loss_s, self.verdicts.due_behind_a_core_step
        for slot in rows.slot.take(last).tolist():
            self._requests.drain(self._request_at(slot))
        return self._send(step, frame)

    def prelude(self, now: float) -> ScheduledStage | None:
        """The next token of every row of Q_D; None when preemption has left nothing to run."""
        rows, admission = self._rows, self._admission
        if self._chains is not None and self._chains.chained and admission.blocks_missing():
            self._chains.drop_unfed()
        while admission.blocks_missing():
            self._requests.preempt(self._request_at(rows.youngest()), may_offload=True)
        slots = rows.in_phase(DECODE)
        if not slots.size:
            return None
        new_blocks = admission.grow(slots)
        rows.start_token(slots)
        extra = None
        if rows.any_of("forced", slots):
            extra = feed_forced_tokens(rows, slots)
            self._counters.recomputed_tokens += len(extra.forced_tokens) // (4 * FORCED_TOKEN_FIELDS)
        moved, extra = self._take_moves(extra)
        waits = rows.any_of("preloop", slots)
        gated = waits or rows.any_of("first_exit", slots)
        step, frame = self._decode(Stage.PRELUDE, slots, now, new_blocks, Variant.GATES if gated else PLAIN, extra)
        step.moved_blocks = moved
        if gated:
            step.epochs, step.blocks_next, step.blocks_after_core = rows.epoch.take(slots), waits, True
        return self._send(step, frame)

    def prefill(self, now: float, limit: PrefillLimit | None) -> ScheduledStage:
        """Prompt tokens in arrival order, up to the limit."""
        chunks = self._admission.pack(limit)
        params = slot_param_frame([chunk.request for chunk in chunks if chunk.new_blocks.size])
        n_tokens = sum(chunk.length for chunk in chunks)
        moved, extra = self._take_moves(stage_extra(chunks, self._r_max))
        header = StageBatch(
            self._take_step_id(),
            Stage.PREFILL,
            bucket=0,
            rows=len(chunks),
            n_tokens=n_tokens,
            n_updates=sum(chunk.new_blocks.size for chunk in chunks),
            variant=prefill_variant(chunks),
            n_slot_params=0 if params is None else len(params),
            after_no_work=self.nothing_ran,
            extra=extra,
        )
        slots = np.array([chunk.request.slot for chunk in chunks], dtype=np.intp)
        step = InFlightStep(header, Stage.PREFILL, slots, now, slots, self._rows.order.take(slots))
        step.requests = tuple([chunk.request for chunk in chunks if chunk.samples])
        step.depths = (self._r_max,) * len(step.requests)
        step.tokens, step.moved_blocks = n_tokens, moved
        step.targets = take_targets(chunks)
        frame = prefill_frame(chunks)
        self._counters.prompt_tokens += n_tokens
        self._counters.recomputed_tokens += sum(
            chunk.length for chunk in chunks if chunk.request.output and not chunk.request.restored
        )
        self._counters.waited((chunk.request for chunk in chunks), now)
        for request in [chunk.request for chunk in chunks if chunk.is_last]:
            request.dispatched += not request.output
            start_decode(self._rows, request)
            if self._chains is not None:
                self._chains.begin(request)
            if request.dispatched >= request.limit:
                self._requests.drain(request)
        return self._send(step, frame, params)

    def _take_moves(self, extra: StageExtra | None) -> tuple[int, StageExtra | None]:
        """Blocks to be copied before this stage, and its extra inputs with these copies."""
        offload = self._admission.offload
        if offload is None:
            return 0, extra
        offloads, restores, moved = offload.take_moves()
        return moved, with_moves(extra, offloads, restores)

    def _decode(
        self,
        stage: Stage,
        lanes: SlotArray,
        now: float,
        aux: Int32Array | None,
        variant: Variant,
        extra: StageExtra | None = None,
    ) -> tuple[InFlightStep, Int32Array]:
        """Record and frame of a decode stage, of rows at their present positions."""
        bucket = self._bucket_of[lanes.size]
        slots = self._rows.slots_of(lanes)
        frame = decode_frame(slots, self._rows.position.take(lanes), aux, lanes, bucket)
        step_id, no_work = self._take_step_id(), self.nothing_ran
        header = StageBatch(step_id, stage, bucket, lanes.size, variant=variant, after_no_work=no_work, extra=extra)
        return InFlightStep(header, stage, slots, now, lanes, self._rows.order.take(lanes)), frame

    def _send(self, step: InFlightStep, frame: Int32Array, params: Int32Array | None = None) -> ScheduledStage:
        """Books the stage as in flight."""
        header = step.header
        self._in_flight.push(step)
        self._counters.dispatched(step.stage, header.rows, header.bucket)
        self.nothing_ran = False
        return ScheduledStage(header, frame, params)

    def _take_step_id(self) -> int:
        step_id = self.next_step_id
        self.next_step_id += 1
        return step_id

    def _request_at(self, slot: int) -> Request:
        request = self._rows.request[slot]
        assert request is not None
        return request
