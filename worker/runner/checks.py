"""Refuses stages that do not fit the worker: the last line before kernels that trust their indices.

A frame that fails here is a bug of the scheduler, never a user's error. Knows nothing of tensors, so the simulated
device checks the same.
"""

from typing import NamedTuple

import numpy as np

from depthbatch.common.frames import (
    ADJUSTMENT_FIELDS,
    FORCED_TOKEN_FIELDS,
    MAX_ADJUSTMENTS,
    ROW_AUX,
    ROW_FIELDS,
    ROW_POSITION,
    ROW_SLOT,
    SLOT_PARAM_WORDS,
    TARGET_FIELDS,
    Int32Array,
    Stage,
    slot_param_rows,
    split_prefill_frame,
)
from depthbatch.common.messages import StageBatch, StageExtra

_STAGES = frozenset(stage.value for stage in Stage)


class StageError(Exception):
    """A stage that cannot be run as sent."""


class StageLimits(NamedTuple):
    """What the worker's static memory was sized for."""

    num_slots: int  # slots 1 .. num_slots
    num_blocks: int  # blocks 1 .. num_blocks - 1
    max_blocks: int  # columns of a block table
    max_positions: int  # positions 0 .. max_positions - 1
    r_max: int
    vocab_size: int
    buckets: tuple[int, ...]


def _require(condition: bool | np.bool_, header: StageBatch, what: str) -> None:
    if not condition:
        raise StageError(f"stage {header.step_id} ({_stage_name(header.stage)}): {what}")


def _stage_name(stage: int) -> str:
    return Stage(stage).label if stage in _STAGES else str(stage)


def _within(values: Int32Array, low: int, high: int) -> bool:
    """Every value in [low, high]; an empty array is fine."""
    return values.size == 0 or (int(values.min()) >= low and int(values.max()) <= high)


def check_stage(header: StageBatch, frame: Int32Array, slot_params: Int32Array | None, limits: StageLimits) -> None:
    """Raises StageError unless header, frame and slot parameters fit each other and ``limits``."""
    _require(header.stage in _STAGES, header, "unknown stage")
    _check_slot_params(header, slot_params, limits)
    if header.stage == Stage.PREFILL:
        _check_prefill(header, frame, limits)
    else:
        known_only = StageExtra(forced_tokens=header.extra.forced_tokens) if header.extra is not None else None
        _require(
            known_only is None or (header.stage == Stage.PRELUDE and header.extra == known_only),
            header,
            "a decode stage with extra inputs",
        )
        _check_decode(header, frame, limits)
    if header.extra is not None:
        _check_extra(header, header.extra, limits)
        slots = frame.reshape(-1)[: header.rows]
        if header.stage == Stage.PREFILL:
            slots = slots[frame[3 * header.rows : 4 * header.rows] == 0]
        _check_known(header, header.extra, slots, limits)


def _check_slot_params(header: StageBatch, slot_params: Int32Array | None, limits: StageLimits) -> None:
    if slot_params is None:
        _require(header.n_slot_params == 0, header, "slot parameter frame missing")
        return
    _require(
        header.n_slot_params > 0 and slot_params.size == header.n_slot_params * SLOT_PARAM_WORDS,
        header,
        f"slot parameter frame has {slot_params.size} int32, not {header.n_slot_params} * {SLOT_PARAM_WORDS}",
    )
    slots = slot_param_rows(slot_params)["slot"]
    _require(_within(slots, 1, limits.num_slots), header, "parameters of a slot that does not exist")


def _check_decode(header: StageBatch, frame: Int32Array, limits: StageLimits) -> None:
    bucket, rows = header.bucket, header.rows
    _require(bucket in limits.buckets, header, f"bucket {bucket} is none of {limits.buckets}")
    _require(1 <= rows <= bucket, header, f"{rows} rows in bucket {bucket}")
    _require(frame.size == ROW_FIELDS * bucket, header, f"frame has {frame.size} int32, not {ROW_FIELDS} * {bucket}")
    table = frame.reshape(ROW_FIELDS, bucket)
    _check_slots(header, table[ROW_SLOT, :rows], limits)
    _require(not table[:, rows:].any(), header, "padding rows are not zero")
    _require(_within(table[ROW_POSITION], 0, limits.max_positions - 1), header, "position out of range")
    if header.stage == Stage.PRELUDE:
        _require(_within(table[ROW_AUX], 0, limits.num_blocks - 1), header, "block out of range")
    else:
        _require(_within(table[ROW_AUX, :rows], 1, limits.r_max), header, "loop out of range")


def _check_prefill(header: StageBatch, frame: Int32Array, limits: StageLimits) -> None:
    _require(header.rows >= 1 and header.n_tokens >= 1, header, "nothing in it")
    try:
        parts = split_prefill_frame(frame, header.rows, header.n_tokens, header.n_updates)
    except ValueError as error:
        raise StageError(f"stage {header.step_id} (prefill): {error}") from None
    _check_slots(header, parts.slots, limits)
    _require(_within(parts.lengths, 1, limits.max_positions), header, "chunk without tokens")
    _require(int(parts.lengths.sum()) == header.n_tokens, header, "lengths do not add up to the tokens")
    _require(_within(parts.starts, 0, limits.max_positions), header, "start out of range")
    _require(_within(parts.starts + parts.lengths, 1, limits.max_positions), header, "position out of range")
    _require(_within(parts.sample, 0, 1), header, "sample is neither 0 nor 1")
    _require(_within(parts.token_ids, 0, limits.vocab_size - 1), header, "token id out of range")
    _require(_within(parts.updates[:, 0], 1, limits.num_slots), header, "update of a slot that does not exist")
    _require(_within(parts.updates[:, 1], 0, limits.max_blocks - 1), header, "update outside the block table")
    _require(_within(parts.updates[:, 2], 1, limits.num_blocks - 1), header, "block out of range")


def _check_known(header: StageBatch, extra: StageExtra, slots: Int32Array, limits: StageLimits) -> None:
    """What is known of sequences that are rebuilt; ``slots``: those that get no sampled token."""
    depths = np.frombuffer(extra.depths, np.uint8)
    _require(depths.size in (0, header.n_tokens), header, f"{depths.size} depths for {header.n_tokens} tokens")
    _require(
        depths.size == 0 or (int(depths.min()) >= 1 and int(depths.max()) <= limits.r_max), header, "depth out of range"
    )
    known = known_tokens_of(extra)
    _require(bool(np.isin(known[:, 0], slots).all()), header, "known token of a slot that is not in it, or is sampled")
    _require(np.unique(known[:, 0]).size == len(known), header, "two known tokens of a slot")
    _require(_within(known[:, 1], 0, limits.vocab_size - 1), header, "known token out of range")


def _check_extra(header: StageBatch, extra: StageExtra, limits: StageLimits) -> None:
    parts = (
        (extra.adjustments, ADJUSTMENT_FIELDS),
        (extra.targets, TARGET_FIELDS),
        (extra.forced_tokens, FORCED_TOKEN_FIELDS),
    )
    for data, fields in parts:
        _require(len(data) % (4 * fields) == 0, header, f"{len(data)} bytes are not rows of {fields} int32")
    adjustments, targets = adjustments_of(extra), targets_of(extra)
    _require(_within(adjustments[:, 0], 1, limits.num_slots), header, "adjustment of a slot that does not exist")
    _require(_within(adjustments[:, 1], 0, MAX_ADJUSTMENTS - 1), header, "adjustment outside the slot's table")
    _require(_within(adjustments[:, 2], 0, limits.vocab_size - 1), header, "adjusted token out of range")
    _require(_within(targets[:, 0], 0, header.n_tokens - 1), header, "target outside the prompt tokens")
    _require(_within(targets[:, 1], 0, limits.vocab_size - 1), header, "target token out of range")
    _require(
        all(1 <= g.slot <= limits.num_slots for g in extra.grammars), header, "grammar of a slot that does not exist"
    )


def adjustments_of(extra: StageExtra) -> Int32Array:
    """[n, 4]"""
    return np.frombuffer(extra.adjustments, "<i4").reshape(-1, ADJUSTMENT_FIELDS)


def targets_of(extra: StageExtra) -> Int32Array:
    """[n, 2]"""
    return np.frombuffer(extra.targets, "<i4").reshape(-1, TARGET_FIELDS)


def known_tokens_of(extra: StageExtra) -> Int32Array:
    """[n, 2]"""
    return np.frombuffer(extra.forced_tokens, "<i4").reshape(-1, FORCED_TOKEN_FIELDS)


def rare_inputs(header: StageBatch) -> dict[str, Int32Array]:
    """What few prefills have, under the names of PrefillInput; only what this one has."""
    extra = header.extra
    if extra is None:
        return {}
    parts = {
        "targets": targets_of(extra),
        "depths": np.frombuffer(extra.depths, np.uint8).astype(np.int32),
        "known": known_tokens_of(extra),
    }
    return {name: values for name, values in parts.items() if len(values)}


def _check_slots(header: StageBatch, slots: Int32Array, limits: StageLimits) -> None:
    _require(_within(slots, 1, limits.num_slots), header, "slot out of range")
    _require(np.unique(slots).size == slots.size, header, "a slot is there twice")
