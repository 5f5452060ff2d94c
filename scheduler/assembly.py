"""Turns rows into what the worker copies: header, int32 frame, slot parameters (common/frames.py gives the layout)."""

from typing import NamedTuple

import numpy as np
from depthbatch.common.frames import (
    ROW_AUX,
    ROW_FIELDS,
    ROW_POSITION,
    ROW_SLOT,
    Int32Array,
    SlotParam,
)
from depthbatch.common.messages import StageBatch
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.rows import SlotArray


class ScheduledStage(NamedTuple):
    """One stage, ready to be sent."""

    header: StageBatch
    frame: Int32Array  # flat for prefill, [3, bucket] for decode stages
    slot_params: Int32Array | None  # [n, SLOT_PARAM_FIELDS]


class PrefillChunk(NamedTuple):
    """The part of one prompt that a prefill batch runs."""

    request: Request
    start: int
    length: int
    is_last: bool
    new_blocks: Int32Array  # blocks the slot gets with this chunk, from table index 0 on


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
        [(c.request.slot, c.start, c.length, c.is_last) for c in chunks],
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
    frame = np.array([_slot_param_row(request) for request in requests], dtype=np.int32)
    floats = frame.view(np.float32)
    for column, name in _FLOAT_COLUMNS:
        floats[:, column] = [getattr(request.params, name) for request in requests]
    return frame


_FLOAT_COLUMNS = (
    (SlotParam.EXIT_THRESHOLD, "exit_threshold"),
    (SlotParam.TEMPERATURE, "temperature"),
    (SlotParam.TOP_P, "top_p"),
    (SlotParam.MIN_P, "min_p"),
)


def _slot_param_row(request: Request) -> tuple[int, ...]:
    """The integer columns in the order of SlotParam; float columns are 0 here."""
    seed = request.params.seed & 0xFFFFFFFFFFFFFFFF
    low, high = seed & 0xFFFFFFFF, seed >> 32
    state_seed = _as_int32(low ^ high)
    top_k, prompt = request.params.top_k, request.prompt.size
    return (request.slot, request.gate, 0, 0, top_k, 0, 0, _as_int32(low), _as_int32(high), prompt, state_seed)


def _as_int32(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - (1 << 32) if bits & 0x80000000 else bits
