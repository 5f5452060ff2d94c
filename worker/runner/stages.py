"""The four stages on the device: gather rows by slot, compute, scatter back.

Device code only: no host synchronisation, no shape that depends on data, nothing allocated that outlives the stage, so
every decode stage can be captured as it stands. Knows nothing of messages, requests or policy.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.common.frames import logprob_fields
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.attention.interface import AttentionBackend, DecodeRows, PrefillRows
from depthbatch.worker.layers.blocks import BlockStack
from depthbatch.worker.layers.rotary import Rotation
from depthbatch.worker.models.interface import LoopedModel, WorkItem
from depthbatch.worker.runner.buffers import DecodeBuffers
from depthbatch.worker.runner.planes import fill_of, needs_fill, planes_of
from depthbatch.worker.runner.prefill_input import PrefillInput
from depthbatch.worker.sampling.exit_gates import Hazard, gate_step
from depthbatch.worker.sampling.logprobs import SLICE_ROWS, num_likeliest, score_rows
from depthbatch.worker.sampling.sampler import greedy_tokens, sample_tokens
from depthbatch.worker.sampling.slot_params import SlotParams
from depthbatch.worker.slots import SlotState


class Sampler(NamedTuple):
    """Which of the cheaper forms of sampling a batch can do with."""

    sample: bool  # some row has temperature > 0
    filtered: bool  # some row uses top-k, top-p or min-p
    shaped: bool = False  # some row has penalties, a bias or min_tokens
    constrained: bool = False  # some row has a grammar
    scored: bool = False  # some row wants logprobs

    def __call__(self, logits: Tensor, params: SlotParams, positions: Tensor) -> Tensor:
        """Tokens of ``positions`` int32 [N]; logits fp32 [N, V] -> int32 [N]."""
        if not self.sample:
            return greedy_tokens(logits)
        return sample_tokens(logits, params, positions, self.filtered)


class Sampled(NamedTuple):
    """What rows get."""

    tokens: Tensor  # int32 [N]
    scores: Tensor  # int32 [N, 1 + 2 k]; [0, 1 + 2 k] unless scored


class Prefilled(NamedTuple):
    """What a prefill gives."""

    sampled: Sampled  # of the sequences that end their prompt
    prompt_scores: Tensor  # int32 [n_targets, 1 + 2 k]


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

    def __init__(self, model: LoopedModel, backend: AttentionBackend, slots: SlotState, layout: KVLayout) -> None:
        self.model = model
        self.backend = backend
        self.slots = slots
        self.layout = layout
        self.r_max = model.spec.r_max
        self._fills = needs_fill(layout, self.r_max)

    def prelude(self, buffers: DecodeBuffers, gates: bool = False) -> None:
        """Starts a token in every row: new block into the table, gate state reset, work item from ``token[slot]``.

        With ``gates``, which needs a model with a pre-loop head, the flags are the depths it predicts.
        """
        slots, positions = buffers.slots.long(), buffers.positions
        columns = torch.div(positions, self.backend.geometry.block_size, rounding_mode="floor").long()
        self.slots.put_blocks(slots, columns, buffers.aux)
        self.slots.survival.index_fill_(0, slots, 1.0)
        self.slots.cumulated.index_fill_(0, slots, 0.0)
        params = self.slots.gather_params(slots)
        token_ids = self.slots.token.index_select(0, slots)
        item = self.model.prelude(token_ids, positions, params.state_seed, self.attention(buffers))
        self.slots.scatter_item(slots, item)
        if gates:
            buffers.flags.copy_(self.model.preloop_depth(item, params.exit_threshold))

    def core(self, buffers: DecodeBuffers, gates: bool) -> None:
        """One loop of every row, at the loop the row says; with ``gates`` also the flags."""
        slots, loops = buffers.slots.long(), buffers.aux
        planes_of(self.layout, loops, self.r_max, out=buffers.planes)
        before = self.slots.gather_item(slots)
        after = self.model.core(before, buffers.positions, loops, self.attention(buffers))
        self.slots.scatter_item(slots, after)
        if not gates:
            return
        params = self.slots.gather_params(slots)
        survival, cumulated = self.slots.survival, self.slots.cumulated
        hazard = Hazard(survival.index_select(0, slots), cumulated.index_select(0, slots))
        step = gate_step(self.model, params.gate, params.exit_threshold, loops, hazard, before, after)
        survival.index_copy_(0, slots, step.hazard.survival)
        cumulated.index_copy_(0, slots, step.hazard.cumulated)
        buffers.flags.copy_(step.flags)

    def coda(self, buffers: DecodeBuffers, sampler: Sampler) -> None:
        """Ends the token of every row: fills the planes it did not reach, samples its successor into ``token[slot]``."""
        slots, positions = buffers.slots.long(), buffers.positions
        if self._fills:
            fill = fill_of(self.layout, buffers.aux, self.r_max)
            table = self.slots.block_table
            self.backend.copy_planes(buffers.slots, positions, fill.source, fill.first, fill.end, table)
        item = self.slots.gather_item(slots)
        hidden = self.model.coda(item, positions, self.attention(buffers))
        sampled = self._next_tokens(hidden, slots, positions + 1, sampler)
        buffers.tokens.copy_(sampled.tokens)
        if sampler.scored:
            buffers.scores.copy_(sampled.scores)

    def attention(self, buffers: DecodeBuffers) -> DecodeAttention:
        """The attention context of the rows in ``buffers``."""
        # Layers outside the core have one plane, and the backend then takes plane 0 whatever the rows say.
        rows = DecodeRows(buffers.slots, buffers.positions, buffers.planes, self.slots.block_table)
        return DecodeAttention(self.backend, rows)

    def prefill(self, chunks: PrefillInput, sampler: Sampler, context: PrefillContext = PrefillAttention) -> Prefilled:
        """Runs packed chunks through every plane, each token as deep as the chunks say (r_max by default); tokens for
        those that end here."""
        self.slots.put_blocks(chunks.updates[:, 0].long(), chunks.updates[:, 1].long(), chunks.updates[:, 2])
        rows = chunks.rows(self.slots.block_table)
        token_slots = rows.token_slots.long()
        params = self.slots.gather_params(token_slots)
        seeds = params.state_seed
        if sampler.shaped:
            is_output = rows.positions >= params.first_output
            self.slots.shaping.note_prompt(chunks.slots.long(), chunks.starts, token_slots, chunks.token_ids, is_output)
        if chunks.known is not None:
            self._go_on_with(chunks.known, sampler.shaped)
        item = self.model.prelude(chunks.token_ids, rows.positions, seeds, context(self.backend, rows))
        for loop in range(1, self.r_max + 1):
            rows_of_loop = rows._replace(plane=self.layout.plane(loop))
            if chunks.depths is None:
                item = self._prefill_loop(item, rows_of_loop, loop, context)
            else:
                item = self._prefill_loop_by_depth(item, rows_of_loop, loop, chunks.depths, context)
        hidden = self.model.coda(item, rows.positions, context(self.backend, rows))
        return Prefilled(self._first_tokens(chunks, hidden, sampler), self._prompt_scores(chunks, hidden))

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

    def replace_tokens(self, known: Tensor) -> None:
        """Slots go on with known tokens instead of those they were given: int32 [n, 2] (common.frames)."""
        slots = known[:, 0].long()
        self.slots.shaping.note_output(slots, self.slots.token.index_select(0, slots), -1)
        self._go_on_with(known, True)

    def _go_on_with(self, known: Tensor, counted: bool) -> None:
        slots, tokens = known[:, 0].long(), known[:, 1]
        if counted:
            self.slots.shaping.note_output(slots, tokens)
        self.slots.token.index_copy_(0, slots, tokens)

    def _first_tokens(self, chunks: PrefillInput, hidden: Tensor, sampler: Sampler) -> Sampled:
        """Tokens after the chunks that end their prompts, from hidden [N, D]: logits at those last positions only."""
        if not len(chunks.sampled):
            return Sampled(chunks.sampled, self._no_scores(hidden))
        sampled = chunks.sampled.long()
        last = chunks.lengths.cumsum(0)[sampled] - 1
        slots, positions = chunks.slots[sampled].long(), (chunks.starts + chunks.lengths)[sampled]
        return self._next_tokens(hidden.index_select(0, last), slots, positions, sampler)

    def _next_tokens(self, hidden: Tensor, slots: Tensor, positions: Tensor, sampler: Sampler) -> Sampled:
        """Chooses the tokens of ``positions`` int32 [N] from hidden [N, D] and puts them into ``token[slot]``."""
        logits = self.model.logits(hidden)
        params, shaping = self.slots.gather_params(slots), self.slots.shaping
        shaped = shaping.apply(logits, slots, params, positions) if sampler.shaped else logits
        if sampler.constrained:
            shaped = shaping.constrain(shaped, slots, params)
        tokens = sampler(shaped, params, positions)
        if sampler.shaped:
            shaping.note_output(slots, tokens)
        self.slots.token.index_copy_(0, slots, tokens)
        return Sampled(tokens, score_rows(logits, tokens) if sampler.scored else self._no_scores(hidden))

    def _prompt_scores(self, chunks: PrefillInput, hidden: Tensor) -> Tensor:
        """Scores of the targets, a slice at a time: a whole prompt's logits may not fit."""
        slices = [
            score_rows(self.model.logits(hidden.index_select(0, targets[:, 0].long())), targets[:, 1])
            for targets in torch.split(chunks.targets, SLICE_ROWS)
            if len(targets)
        ]
        return torch.cat(slices) if slices else self._no_scores(hidden)

    def _no_scores(self, like: Tensor) -> Tensor:
        columns = logprob_fields(num_likeliest(self.model.spec.vocab_size))
        return torch.empty(0, columns, dtype=torch.int32, device=like.device)
