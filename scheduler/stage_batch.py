"""Turns rows and prompts into what the worker copies: header, int32 frame, slot parameters, and the rarer inputs.

common/frames.py gives the layouts.
"""

from typing import NamedTuple

import numpy as np

from depthbatch.common.frames import (
    ADJUSTMENT_FIELDS,
    BAD_SEQUENCE_TOKENS,
    ROW_AUX,
    ROW_FIELDS,
    ROW_LANE,
    ROW_POSITION,
    ROW_SLOT,
    SLOT_PARAMS,
    TARGET_FIELDS,
    Int32Array,
    slot_param_words,
)
from depthbatch.common.messages import PLAIN, GrammarStart, RequestParams, StageBatch, StageExtra, Variant
from depthbatch.scheduler.rebuild import chunk_depths, forced_token
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.rows import RowState, SlotArray

MINUS_INFINITY = int(np.float32(-np.inf).view(np.int32))


class ScheduledStage(NamedTuple):
    """One stage, ready to be sent."""

    header: StageBatch
    frame: Int32Array  # flat for prefill, [3, bucket] for decode stages
    slot_params: Int32Array | None  # [n, SLOT_PARAM_WORDS]


class PrefillChunk(NamedTuple):
    """The part of one prompt that a prefill batch runs."""

    request: Request
    start: int
    length: int
    is_last: bool
    new_blocks: Int32Array  # blocks the slot gets with this chunk, from table index 0 on

    @property
    def samples(self) -> bool:
        """The prefill yields the request's first token: it ends here, and no token is known."""
        return self.is_last and not self.request.output


def decode_frame(
    slots: SlotArray, positions: Int32Array, aux: Int32Array | None, lanes: SlotArray, bucket: int
) -> Int32Array:
    """[4, bucket]; rows beyond the real ones stay zero, the dummies."""
    rows = slots.size
    frame = np.zeros((ROW_FIELDS, bucket), np.int32)
    frame[ROW_SLOT, :rows] = slots
    frame[ROW_POSITION, :rows] = positions
    frame[ROW_LANE, :rows] = lanes
    if aux is not None:
        frame[ROW_AUX, :rows] = aux
    return frame


def prefill_frame(chunks: list[PrefillChunk]) -> Int32Array:
    """slot | start | length | sample | token ids | updates."""
    heads = np.array(
        [(c.request.slot, c.start, c.length, c.samples) for c in chunks],
        dtype=np.int32,
    ).T
    parts = [heads.ravel()]
    for chunk in chunks:
        tokens = chunk.request.prefill_tokens
        assert tokens is not None
        parts.append(tokens[chunk.start : chunk.start + chunk.length])
    for chunk in chunks:
        count = chunk.new_blocks.size
        if count:
            updates = np.empty((count, 3), np.int32)
            updates[:, 0] = chunk.request.slot
            updates[:, 1] = np.arange(count)
            updates[:, 2] = chunk.new_blocks
            parts.append(updates.ravel())
    return np.concatenate(parts)


def slot_param_frame(requests: list[Request]) -> Int32Array | None:
    """One row of SLOT_PARAMS a request; None without requests."""
    if not requests:
        return None
    rows, params = np.zeros(len(requests), SLOT_PARAMS), [request.params for request in requests]
    for name in _OF_PARAMS:
        rows[name] = [getattr(each, name) for each in params]
    rows["slot"] = [request.slot for request in requests]
    rows["gate"] = [request.gate for request in requests]
    rows["seed_low"] = [_as_int32(each.seed & 0xFFFFFFFF) for each in params]
    rows["seed_high"] = [_as_int32(each.seed >> 32 & 0xFFFFFFFF) for each in params]
    rows["state_seed"] = rows["seed_low"] ^ rows["seed_high"]
    rows["first_output"] = [request.prompt.size for request in requests]
    rows["min_until"] = [request.prompt.size + request.params.min_tokens for request in requests]
    rows["adjustments"] = [num_adjustments(each) for each in params]
    rows["num_bad_sequences"] = [len(each.bad_sequences) // (4 * BAD_SEQUENCE_TOKENS) for each in params]
    rows["allow_listed"] = [bool(each.allow_list) for each in params]
    rows["constrained"] = [bool(each.grammar) for each in params]
    return slot_param_words(rows)


_OF_PARAMS = tuple(name for name in SLOT_PARAMS.names or () if name in RequestParams.__struct_fields__)


def _as_int32(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - (1 << 32) if bits & 0x80000000 else bits


class PromptTargets(NamedTuple):
    """The prompt tokens whose logprobs a prefill brings: how many of each request, in batch order."""

    requests: tuple[Request, ...]
    counts: tuple[int, ...]


def num_adjustments(params: RequestParams) -> int:
    """Entries of a request's adjustment table."""
    return len(params.logit_bias) // 8 + (len(params.stop_token_ids) if params.min_tokens else 0)


def stage_extra(chunks: list[PrefillChunk], r_max: int) -> StageExtra | None:
    """What few prompts have: adjustments, forbidden tokens and a grammar with their first chunk, targets with every one; and what is known
    of sequences that are rebuilt."""
    fresh = [chunk.request for chunk in chunks if chunk.new_blocks.size]
    adjusted = [_adjustments(request) for request in fresh if num_adjustments(request.params)]
    grammars = tuple([GrammarStart(r.slot, r.prompt.size, r.params.grammar) for r in fresh if r.params.grammar])
    targets, offset = [], 0
    for chunk in chunks:
        if chunk.request.params.prompt_logprobs:
            targets.append(_targets(chunk, offset))
        offset += chunk.length
    rebuilt = any(chunk.request.output for chunk in chunks)
    bad = [_bad_sequences(request) for request in fresh if request.params.bad_sequences]
    allowed = [_allow_list(request) for request in fresh if request.params.allow_list]
    if not (adjusted or grammars or targets or rebuilt or bad or allowed):
        return None
    depths, tokens = (_depths(chunks, r_max), _forced_tokens(chunks)) if rebuilt else (b"", b"")
    return StageExtra(
        _bytes_of(adjusted), _bytes_of(targets), grammars, depths, tokens, _bytes_of(bad), _bytes_of(allowed)
    )


def _depths(chunks: list[PrefillChunk], r_max: int) -> bytes:
    """uint8 a token; none when all run r_max."""
    depths = b"".join([chunk_depths(chunk.request, chunk.start, chunk.length, r_max) for chunk in chunks])
    return depths if depths.strip(bytes([r_max])) else b""


def _forced_tokens(chunks: list[PrefillChunk]) -> bytes:
    """int32 [n, 2]: what the slots whose prefill ends here go on with."""
    ended = [chunk.request for chunk in chunks if chunk.is_last and chunk.request.output]
    return np.array([(request.slot, forced_token(request)) for request in ended], np.int32).tobytes()


def _adjustments(request: Request) -> Int32Array:
    """int32 [n, 4]: the bias, then the stop tokens, which are held off until min_tokens are there."""
    params = request.params
    bias = np.frombuffer(params.logit_bias, "<i4").reshape(-1, 2)
    rows = np.empty((num_adjustments(params), ADJUSTMENT_FIELDS), np.int32)
    rows[:, 0] = request.slot
    rows[:, 1] = np.arange(len(rows))
    rows[: len(bias), 2:] = bias
    if params.min_tokens:
        rows[len(bias) :, 2] = params.stop_token_ids
        rows[len(bias) :, 3] = MINUS_INFINITY
    return rows


def _bad_sequences(request: Request) -> Int32Array:
    """int32 [n, 2 + BAD_SEQUENCE_TOKENS]"""
    tokens = np.frombuffer(request.params.bad_sequences, "<i4").reshape(-1, BAD_SEQUENCE_TOKENS)
    heads = np.full((len(tokens), 2), request.slot, np.int32)
    heads[:, 1] = np.arange(len(tokens))
    return np.concatenate([heads, tokens], axis=1)


def _allow_list(request: Request) -> Int32Array:
    """int32 [1 + mask_words(vocab_size)]"""
    return np.concatenate([np.array([request.slot], np.int32), np.frombuffer(request.params.allow_list, "<i4")])


def _targets(chunk: PrefillChunk, offset: int) -> Int32Array:
    """int32 [n, 2]: at each position the prompt token after it, from the first one that is still to be sent."""
    request = chunk.request
    first = max(chunk.start, request.targets_sent)
    end = max(first, min(chunk.start + chunk.length, request.prompt.size - 1))
    rows = np.empty((end - first, TARGET_FIELDS), np.int32)
    rows[:, 0] = np.arange(first, end) - chunk.start + offset
    rows[:, 1] = request.prompt[first + 1 : end + 1]
    return rows


def take_targets(chunks: list[PrefillChunk]) -> PromptTargets | None:
    """Books the targets of these chunks as sent; None without any."""
    requests, counts = [], []
    for chunk in chunks:
        request = chunk.request
        if request.params.prompt_logprobs:
            end = min(chunk.start + chunk.length, request.prompt.size - 1)
            count = end - max(chunk.start, request.targets_sent)
            if count > 0:
                request.targets_sent = end
                requests.append(request)
                counts.append(count)
    return PromptTargets(tuple(requests), tuple(counts)) if requests else None


def _bytes_of(parts: list[Int32Array]) -> bytes:
    return np.concatenate(parts).tobytes() if parts else b""


def prefill_variant(chunks: list[PrefillChunk]) -> Variant:
    """Penalties count the tokens of every chunk; the other flags concern those that yield a token."""
    variant = PLAIN
    for chunk in chunks:
        params = chunk.request.params
        if params.changes_logits:
            variant |= Variant.LOGITS
        if params.forbids_tokens:
            variant |= Variant.FORBID
        if params.grammar:
            variant |= Variant.CONSTRAIN
        if chunk.samples and params.temperature > 0:
            variant |= Variant.SAMPLE
        if chunk.samples and params.filters:
            variant |= Variant.FILTER
        if chunk.samples and params.logprobs:
            variant |= Variant.LOGPROBS
    return variant


_CODA_VARIANTS = {
    "sampled": Variant.SAMPLE,
    "filtered": Variant.FILTER,
    "changes_logits": Variant.LOGITS,
    "forbids_tokens": Variant.FORBID,
    "constrained": Variant.CONSTRAIN,
    "logprobs": Variant.LOGPROBS,
}


def coda_variant(rows: RowState, slots: SlotArray) -> Variant:
    """What a coda of these rows must do."""
    variant = PLAIN
    for kind, flag in _CODA_VARIANTS.items():
        if rows.any_of(kind, slots):
            variant |= flag
    return variant


def split_rows(data: bytes, count: int) -> list[bytes]:
    """``count`` rows of equal length. Raises ValueError when they do not come out even."""
    size, rest = divmod(len(data), count)
    if rest or not size:
        raise ValueError(f"{len(data)} bytes of logprobs are not {count} rows")
    return [data[start : start + size] for start in range(0, len(data), size)]
