"""What few prompts bring along: adjustments of logits, grammars, and prompt tokens to be scored (common/frames.py)."""

from typing import NamedTuple

import numpy as np

from depthbatch.common.frames import ADJUSTMENT_FIELDS, TARGET_FIELDS, Int32Array
from depthbatch.common.messages import PLAIN, GrammarStart, RequestParams, StageExtra, Variant
from depthbatch.scheduler.rebuild import chunk_depths, token_after_prefill
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.rows import RowState, SlotArray

MINUS_INFINITY = int(np.float32(-np.inf).view(np.int32))


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


class Targets(NamedTuple):
    """The prompt tokens that a prefill scores: how many of each request, in batch order."""

    requests: tuple[Request, ...]
    counts: tuple[int, ...]


def num_adjustments(params: RequestParams) -> int:
    """Entries of a request's adjustment table."""
    return len(params.logit_bias) // 8 + (len(params.stop_token_ids) if params.min_tokens else 0)


def stage_extra(chunks: list[PrefillChunk], r_max: int) -> StageExtra | None:
    """What few prompts have: adjustments and a grammar with their first chunk, targets with every one; and what is known
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
    if not (adjusted or grammars or targets or rebuilt):
        return None
    depths, tokens = (_depths(chunks, r_max), _known_tokens(chunks)) if rebuilt else (b"", b"")
    return StageExtra(_bytes_of(adjusted), _bytes_of(targets), grammars, depths, tokens)


def _depths(chunks: list[PrefillChunk], r_max: int) -> bytes:
    """uint8 a token; none when all run r_max."""
    depths = b"".join([chunk_depths(chunk.request, chunk.start, chunk.length, r_max) for chunk in chunks])
    return depths if depths.strip(bytes([r_max])) else b""


def _known_tokens(chunks: list[PrefillChunk]) -> bytes:
    """int32 [n, 2]: what the slots whose prefill ends here go on with."""
    ended = [chunk.request for chunk in chunks if chunk.is_last and chunk.request.output]
    return np.array([(request.slot, token_after_prefill(request)) for request in ended], np.int32).tobytes()


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


def _targets(chunk: PrefillChunk, offset: int) -> Int32Array:
    """int32 [n, 2]: at each position the prompt token after it, from the first one that is still to be scored."""
    request = chunk.request
    first = max(chunk.start, request.targets_sent)
    end = max(first, min(chunk.start + chunk.length, request.prompt.size - 1))
    rows = np.empty((end - first, TARGET_FIELDS), np.int32)
    rows[:, 0] = np.arange(first, end) - chunk.start + offset
    rows[:, 1] = request.prompt[first + 1 : end + 1]
    return rows


def take_targets(chunks: list[PrefillChunk]) -> Targets | None:
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
    return Targets(tuple(requests), tuple(counts)) if requests else None


def _bytes_of(parts: list[Int32Array]) -> bytes:
    return np.concatenate(parts).tobytes() if parts else b""


def prefill_variant(chunks: list[PrefillChunk]) -> Variant:
    """Penalties count the tokens of every chunk; the other flags concern those that yield a token."""
    variant = PLAIN
    for chunk in chunks:
        params = chunk.request.params
        if params.shapes_logits:
            variant |= Variant.SHAPE
        if params.grammar:
            variant |= Variant.CONSTRAIN
        if chunk.samples and params.temperature > 0:
            variant |= Variant.SAMPLE
        if chunk.samples and params.filters:
            variant |= Variant.FILTER
        if chunk.samples and params.logprobs:
            variant |= Variant.SCORE
    return variant


_CODA_VARIANTS = {
    "sampled": Variant.SAMPLE,
    "filtered": Variant.FILTER,
    "shaped": Variant.SHAPE,
    "constrained": Variant.CONSTRAIN,
    "scored": Variant.SCORE,
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
        raise ValueError(f"{len(data)} bytes of scores are not {count} rows")
    return [data[start : start + size] for start in range(0, len(data), size)]
