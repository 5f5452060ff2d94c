"""Turns rows into what the worker copies: header, int32 frame, slot parameters (common/frames.py gives the layout)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from depthbatch.common.frames import (
    ROW_AUX,
    ROW_FIELDS,
    ROW_POSITION,
    ROW_SLOT,
    SLOT_PARAM_FIELDS,
    Int32Array,
    SlotParam,
)
from depthbatch.common.messages import StageBatch
from depthbatch.scheduler.extras import PrefillChunk, num_adjustments
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.rows import SlotArray


class ScheduledStage(NamedTuple):
    """One stage, ready to be sent."""

    header: StageBatch
    frame: Int32Array  # flat for prefill, [3, bucket] for decode stages
    slot_params: Int32Array | None  # [n, SLOT_PARAM_FIELDS]


def decode_frame(slots: SlotArray, positions: Int32Array, aux: Int32Array | None, bucket: int) -> Int32Array:
    """[3, bucket]; rows beyond the real ones stay zero, the dummies."""
    rows = slots.size
    frame = np.zeros((ROW_FIELDS, bucket), np.int32)
    frame[ROW_SLOT, :rows] = slots
    frame[ROW_POSITION, :rows] = positions
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
    """One row a request, None without requests."""
    if not requests:
        return None
    frame = np.zeros((len(requests), SLOT_PARAM_FIELDS), np.int32)
    floats = frame.view(np.float32)
    for column, value_of in _INT_COLUMNS.items():
        frame[:, column] = [value_of(request) for request in requests]
    for column, name in _FLOAT_COLUMNS.items():
        floats[:, column] = [getattr(request.params, name) for request in requests]
    return frame


_FLOAT_COLUMNS = {
    SlotParam.EXIT_THRESHOLD: "exit_threshold",
    SlotParam.TEMPERATURE: "temperature",
    SlotParam.TOP_P: "top_p",
    SlotParam.MIN_P: "min_p",
    SlotParam.PRESENCE: "presence_penalty",
    SlotParam.FREQUENCY: "frequency_penalty",
    SlotParam.REPETITION: "repetition_penalty",
}
_INT_COLUMNS: dict[SlotParam, Callable[[Request], int]] = {
    SlotParam.SLOT: lambda request: request.slot,
    SlotParam.GATE: lambda request: request.gate,
    SlotParam.TOP_K: lambda request: request.params.top_k,
    SlotParam.SEED_LOW: lambda request: _as_int32(request.params.seed & 0xFFFFFFFF),
    SlotParam.SEED_HIGH: lambda request: _as_int32(request.params.seed >> 32 & 0xFFFFFFFF),
    SlotParam.FIRST_OUTPUT: lambda request: request.prompt.size,
    SlotParam.MIN_UNTIL: lambda request: request.prompt.size + request.params.min_tokens,
    SlotParam.ADJUSTMENTS: lambda request: num_adjustments(request.params),
    SlotParam.CONSTRAINED: lambda request: bool(request.params.grammar),
    SlotParam.STATE_SEED: lambda request: _as_int32((request.params.seed ^ request.params.seed >> 32) & 0xFFFFFFFF),
}


def _as_int32(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - (1 << 32) if bits & 0x80000000 else bits
