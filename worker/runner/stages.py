"""The four stages on the device: gather rows by slot, compute, scatter back.

Device code only: no host synchronisation, no shape that depends on data, nothing allocated that outlives the stage, so
every decode stage can be captured as it stands. Knows nothing of messages, requests or policy.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.common.frames import Int32Array, Stage, logprob_fields
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import PLAIN, Variant
from depthbatch.worker.attention.backend import AttentionBackend, DecodeRows, PrefillRows
from depthbatch.worker.layers.blocks import BlockStack
from depthbatch.worker.layers.rotary import Rotation
from depthbatch.worker.models.interface import LoopedModel, WorkItem
from depthbatch.worker.runner.fused_stages import FusedStages, fuse_stages
from depthbatch.worker.runner.stage_input import StageInput
from depthbatch.worker.runner.stage_tensors import DecodeBuffers, PrefillInput
from depthbatch.worker.sampling.exit_gates import Hazard, gate_step
from depthbatch.worker.sampling.grammar_matchers import Masks
from depthbatch.worker.sampling.logprobs import SLICE_ROWS, logprob_rows, num_likeliest
from depthbatch.worker.sampling.sampler import greedy_tokens, sample_tokens
from depthbatch.worker.slots import SlotState


def planes_of(layout: KVLayout, loops: Tensor, r_max: int, out: Tensor) -> Tensor:
    """Plane that each row writes and reads at its loop; loops, out int32 [N]. Padding rows (loop 0) get plane 0."""
    return torch.sub(loops, 1, out=out).clamp_(0, layout.num_planes(r_max) - 1)


class PlaneFill(NamedTuple):
    """Copies that exits ask for: plane source -> planes first .. end - 1, each int32 [N]; first >= end: none."""

    source: Tensor
    first: Tensor
    end: Tensor


def needs_fill(layout: KVLayout, r_max: int) -> bool:
    """True when a token that exits early leaves planes behind that later tokens read."""
    return any(len(layout.planes_to_fill(loop, r_max)) for loop in range(1, r_max + 1))


def fill_of(layout: KVLayout, exit_loops: Tensor, r_max: int) -> PlaneFill:
    """Planes to fill for tokens that exit after ``exit_loops`` int32 [N]. Padding rows (loop 0) fill nothing.

    ``last_exited`` fills everything above the last plane written; ``first_then_shared`` fills plane 1 after an exit at
    loop 1, which is the same interval: plane(1) + 1 up to the number of planes.
    """
    planes = layout.num_planes(r_max)
    source = (exit_loops - 1).clamp(0, planes - 1)
    return PlaneFill(source, source + 1, torch.where(exit_loops > 0, planes, 0).to(torch.int32))


class StateUpdate(NamedTuple):
    """A change of what is kept of slots, due before a stage runs: ``apply`` takes ``values`` on the device."""

    apply: Callable[..., None]
    values: tuple[Int32Array, ...]


class Sampled(NamedTuple):
    """What rows get."""

    tokens: Tensor  # int32 [N]
    logprobs: Tensor  # int32 [N, 1 + 2 k]; [0, 1 + 2 k] unless wanted


class Prefilled(NamedTuple):
    """What a prefill gives."""

    sampled: Sampled  # of the sequences that end their prompt
    prompt_logprobs: Tensor  # int32 [n_targets, 1 + 2 k]


class DecodeAttention:
    """AttentionContext of one token a row."""

    def __init__(self, backend: AttentionBackend, rows: DecodeRows) -> None:
        self._backend = backend
        self._rows = rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._backend.decode(layer, q, k, v, self._rows)

    def from_qkv(self, layer: int, qkv: Tensor, rotation: Rotation, qk_bias: Tensor | None = None) -> Tensor:
        return self._backend.decode_qkv(layer, qkv, rotation, self._rows, qk_bias)

    def run_stack(self, stack: BlockStack, x: Tensor, rotation: Rotation) -> Tensor | None:
        return self._backend.decode_stack(stack, x, rotation, self._rows)


class PrefillAttention:
    """AttentionContext of packed chunks."""

    def __init__(self, backend: AttentionBackend, rows: PrefillRows) -> None:
        self._backend = backend
        self._rows = rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._backend.prefill(layer, q, k, v, self._rows)

    def from_qkv(self, layer: int, qkv: Tensor, rotation: Rotation, qk_bias: Tensor | None = None) -> Tensor:
        return self._backend.prefill_qkv(layer, qkv, rotation, self._rows, qk_bias)

    def run_stack(self, stack: BlockStack, x: Tensor, rotation: Rotation) -> Tensor | None:
        return self._backend.prefill_stack(stack, x, rotation, self._rows)


PrefillContext = Callable[[AttentionBackend, PrefillRows], PrefillAttention]


class Stages:
    """A model, its KV memory and its slots, and what can be run on them."""

    chooses_alone = True  # tokens are nobody else's business

    def __init__(self, model: LoopedModel, backend: AttentionBackend, slots: SlotState, layout: KVLayout) -> None:
        self.model = model
        self.backend = backend
        self.slots = slots
        self.layout = layout
        self.r_max = model.spec.r_max
        self._fills = needs_fill(layout, self.r_max)
        self.fused = FusedStages()  # stages that are one call
        if self.chooses_alone:
            self.fused = fuse_stages(model, backend, slots, layout.num_planes(self.r_max), self._fills)

    def updates(self, stage: StageInput, masks: Masks | None) -> Iterator[StateUpdate]:
        """What ``stage`` changes before it runs, slot parameters apart: rare, so each with an upload of its own."""
        shaping = self.slots.shaping
        if stage.adjustments.size:
            yield StateUpdate(shaping.set_adjustments, (stage.adjustments,))
        if stage.bad_sequences.size:
            yield StateUpdate(shaping.set_bad_sequences, (stage.bad_sequences,))
        if stage.allow_lists.size:
            yield StateUpdate(shaping.set_allow_lists, (stage.allow_lists,))
        if stage.stage is Stage.PRELUDE and stage.forced.size:
            yield StateUpdate(self.force_tokens, (stage.forced,))
        if masks is not None:
            yield StateUpdate(shaping.set_allowed, masks)

    def decode(self, stage: Stage, buffers: DecodeBuffers, variant: Variant) -> None:
        """Runs a decode stage; ``buffers`` are that stage's."""
        if stage is Stage.PRELUDE:
            self.prelude(buffers, variant)
        elif stage is Stage.CORE:
            self.core(buffers, variant)
        else:
            self.coda(buffers, variant)

    def prelude(self, buffers: DecodeBuffers, variant: Variant = PLAIN) -> None:
        """Starts a token in every row: new block into the table, gate state reset, work item from ``token[slot]``.

        With GATES, which needs a model with a pre-loop head, the values are the depths it predicts.
        """
        if self.fused.prelude is not None and Variant.GATES not in variant:
            self.fused.prelude(buffers.frame)
            return
        slots, positions = buffers.slots.long(), buffers.positions
        columns = torch.div(positions, self.backend.geometry.block_size, rounding_mode="floor").long()
        self.slots.put_blocks(slots, columns, buffers.aux)
        lanes = buffers.lanes.long()
        self.slots.survival.index_fill_(0, lanes, 1.0)
        self.slots.cumulated.index_fill_(0, lanes, 0.0)
        params = self.slots.gather_params(slots)
        token_ids = self.slots.token.index_select(0, lanes)
        item = self.model.prelude(token_ids, positions, params.state_seed, self.attention(buffers))
        self.slots.scatter_item(lanes, item)
        if Variant.GATES in variant:
            buffers.values.copy_(self.model.preloop_depth(item, params.exit_threshold))

    def core(self, buffers: DecodeBuffers, variant: Variant) -> None:
        """One loop of every row, at the loop the row says; with GATES the values say whose gate fired."""
        gates = Variant.GATES in variant
        if self.fused.core is not None and not gates:
            self.fused.core(buffers.frame)
            return
        lanes, loops = buffers.lanes.long(), buffers.aux
        before = self.slots.gather_item(lanes)
        if self.fused.core is not None:
            self.fused.core(buffers.frame)
            after = self.slots.gather_item(lanes)
        else:
            planes_of(self.layout, loops, self.r_max, out=buffers.planes)
            after = self.model.core(before, buffers.positions, loops, self.attention(buffers))
            self.slots.scatter_item(lanes, after)
        if not gates:
            return
        params = self.slots.gather_params(buffers.slots.long())
        survival, cumulated = self.slots.survival, self.slots.cumulated
        hazard = Hazard(survival.index_select(0, lanes), cumulated.index_select(0, lanes))
        step = gate_step(self.model, params.gate, params.exit_threshold, loops, hazard, before, after)
        survival.index_copy_(0, lanes, step.hazard.survival)
        cumulated.index_copy_(0, lanes, step.hazard.cumulated)
        buffers.values.copy_(step.fired)

    def coda(self, buffers: DecodeBuffers, variant: Variant) -> None:
        """Ends the token of every row: fills the planes it did not reach, samples its successor into ``token[slot]``."""
        if self.fused.coda is not None and variant in (PLAIN, Variant.SAMPLE):
            hidden = None
            if not self.fused.coda.gathers:
                item = self.slots.gather_item(buffers.lanes)
                hidden = self.model.coda(item, buffers.positions, self.attention(buffers))
            self.fused.coda(buffers.frame, hidden, buffers.values, Variant.SAMPLE in variant)
            return
        slots, lanes, positions = buffers.slots.long(), buffers.lanes.long(), buffers.positions
        if self._fills:
            fill = fill_of(self.layout, buffers.aux, self.r_max)
            table = self.slots.block_table
            self.backend.copy_planes(buffers.slots, positions, fill.source, fill.first, fill.end, table)
        if Variant.FORBID in variant:
            self.slots.shaping.note_recent(slots, positions, self.slots.token.index_select(0, lanes), positions + 1)
        item = self.slots.gather_item(lanes)
        hidden = self.model.coda(item, positions, self.attention(buffers))
        sampled = self._next_tokens(hidden, slots, self.slots.next_lanes(lanes), positions + 1, variant)
        buffers.values.copy_(sampled.tokens)
        if Variant.LOGPROBS in variant:
            buffers.logprobs.copy_(sampled.logprobs)

    def attention(self, buffers: DecodeBuffers) -> DecodeAttention:
        """The attention context of the rows in ``buffers``."""
        # Layers outside the core have one plane, and the backend then takes plane 0 whatever the rows say.
        rows = DecodeRows(buffers.slots, buffers.positions, buffers.planes, self.slots.block_table)
        return DecodeAttention(self.backend, rows)

    def prefill(self, chunks: PrefillInput, variant: Variant, context: PrefillContext = PrefillAttention) -> Prefilled:
        """Runs packed chunks through every plane, each token as deep as the chunks say (r_max by default); tokens for
        those that end here."""
        self.slots.put_blocks(chunks.updates[:, 0].long(), chunks.updates[:, 1].long(), chunks.updates[:, 2])
        rows = chunks.rows(self.slots.block_table)
        token_slots = rows.token_slots.long()
        params = self.slots.gather_params(token_slots)
        seeds = params.state_seed
        if Variant.LOGITS in variant:
            is_output = rows.positions >= params.first_output
            self.slots.shaping.note_prompt(chunks.slots.long(), chunks.starts, token_slots, chunks.token_ids, is_output)
        if Variant.FORBID in variant:
            ends = (chunks.starts + chunks.lengths).repeat_interleave(chunks.lengths, output_size=len(token_slots))
            self.slots.shaping.note_recent(token_slots, rows.positions, chunks.token_ids, ends)
        if chunks.forced is not None:
            slots = chunks.forced[:, 0].long()
            ends = torch.zeros_like(self.slots.params[:, 0])
            ends.index_copy_(0, chunks.slots.long(), chunks.starts + chunks.lengths)
            lanes = self.slots.lanes_at(slots, ends.index_select(0, slots))
            self._take_forced(chunks.forced, lanes, Variant.LOGITS in variant)
        if chunks.depths is not None:  # tokens at depth 0 run along, too, but their K/V stay what they are
            rows = rows._replace(token_slots=rows.token_slots.masked_fill(chunks.depths == 0, 0))
        item = self.model.prelude(chunks.token_ids, rows.positions, seeds, context(self.backend, rows))
        for loop in range(1, self.r_max + 1):
            rows_of_loop = rows._replace(plane=self.layout.plane(loop))
            if chunks.depths is None:
                item = self._prefill_loop(item, rows_of_loop, loop, context)
            else:
                item = self._prefill_loop_by_depth(item, rows_of_loop, loop, chunks.depths, context)
        hidden = self.model.coda(item, rows.positions, context(self.backend, rows))
        return Prefilled(self._first_tokens(chunks, hidden, variant), self._prompt_logprobs(chunks, hidden))

    def _prefill_loop(self, item: WorkItem, rows: PrefillRows, loop: int, context: PrefillContext) -> WorkItem:
        return self.model.core(item, rows.positions, torch.full_like(rows.positions, loop), context(self.backend, rows))

    def _prefill_loop_by_depth(
        self, item: WorkItem, rows: PrefillRows, loop: int, depths: Tensor, context: PrefillContext
    ) -> WorkItem:
        """A loop of tokens of which those with depths int32 [N] below it have left: these keep their work item, and
        their K/V of all later loops are those of their last one, which is put there before anything reads them.

        They run along, since attention takes whole chunks, but as the dummy slot's, whose K/V nobody reads.
        """
        left = depths < loop
        after = self._prefill_loop(
            item, rows._replace(token_slots=rows.token_slots.masked_fill(left, 0)), loop, context
        )
        if self._fills and loop < self.r_max:
            fill = fill_of(self.layout, torch.where(depths == loop, depths, 0), self.r_max)
            table = self.slots.block_table
            self.backend.copy_planes(rows.token_slots, rows.positions, fill.source, fill.first, fill.end, table)
        return tuple(torch.where(left.unsqueeze(1), old, new) for old, new in zip(item, after, strict=True))

    def force_tokens(self, forced: Tensor) -> None:
        """Slots go on with forced tokens instead of those they were given: int32 [n, 2] (common.frames).

        Only layouts whose loops share a plane need this (scheduler/rebuild.py), and these have one lane a slot.
        """
        slots = forced[:, 0].long()
        self.slots.shaping.note_output(slots, self.slots.token.index_select(0, slots), -1)
        self._take_forced(forced, slots, True)

    def _take_forced(self, forced: Tensor, lanes: Tensor, counted: bool) -> None:
        slots, tokens = forced[:, 0].long(), forced[:, 1]
        if counted:
            self.slots.shaping.note_output(slots, tokens)
        self.slots.token.index_copy_(0, lanes, tokens)

    def _first_tokens(self, chunks: PrefillInput, hidden: Tensor, variant: Variant) -> Sampled:
        """Tokens after the chunks that end their prompts, from hidden [N, D]: logits at those last positions only."""
        if not len(chunks.sampled):
            return Sampled(chunks.sampled, self._no_logprobs(hidden))
        sampled = chunks.sampled.long()
        last = chunks.lengths.cumsum(0)[sampled] - 1
        slots, positions = chunks.slots[sampled].long(), (chunks.starts + chunks.lengths)[sampled]
        lanes = self.slots.lanes_at(slots, positions)
        return self._next_tokens(hidden.index_select(0, last), slots, lanes, positions, variant)

    def _next_tokens(
        self, hidden: Tensor, slots: Tensor, lanes: Tensor, positions: Tensor, variant: Variant
    ) -> Sampled:
        """Chooses the tokens of ``positions`` int32 [N] from hidden [N, D] and puts them into ``token[lane]``, where the
        preludes of those positions find them."""
        logits = self.model.logits(hidden)
        params, shaping = self.slots.gather_params(slots), self.slots.shaping
        shaped = shaping.apply(logits, slots, params, positions) if Variant.LOGITS in variant else logits
        if Variant.FORBID in variant:
            shaped = shaping.forbid(shaped, slots, params, positions)
        if Variant.CONSTRAIN in variant:
            shaped = shaping.constrain(shaped, slots, params)
        if Variant.SAMPLE in variant:
            tokens = sample_tokens(shaped, params, positions, Variant.FILTER in variant)
        else:
            tokens = greedy_tokens(shaped)
        if Variant.LOGITS in variant:
            shaping.note_output(slots, tokens)
        self.slots.token.index_copy_(0, lanes, tokens)
        return Sampled(
            tokens, logprob_rows(logits, tokens) if Variant.LOGPROBS in variant else self._no_logprobs(hidden)
        )

    def _prompt_logprobs(self, chunks: PrefillInput, hidden: Tensor) -> Tensor:
        """Scores of the targets, a slice at a time: a whole prompt's logits may not fit."""
        slices = [
            logprob_rows(self.model.logits(hidden.index_select(0, targets[:, 0].long())), targets[:, 1])
            for targets in torch.split(chunks.targets, SLICE_ROWS)
            if len(targets)
        ]
        return torch.cat(slices) if slices else self._no_logprobs(hidden)

    def _no_logprobs(self, like: Tensor) -> Tensor:
        columns = logprob_fields(num_likeliest(self.model.spec.vocab_size))
        return torch.empty(0, columns, dtype=torch.int32, device=like.device)
