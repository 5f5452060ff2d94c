"""A stage as the worker takes it: header and frames become one checked StageInput, or are refused.

The last line before kernels that trust their indices. What fails here is a bug of the scheduler, never a user's error.
Imports no torch, so the simulated device checks the same.
"""

from typing import NamedTuple

import numpy as np

from depthbatch.common.frames import (
    ADJUSTMENT_FIELDS,
    BAD_SEQUENCE_TOKENS,
    FORCED_TOKEN_FIELDS,
    MAX_ADJUSTMENTS,
    MAX_BAD_SEQUENCES,
    MOVE_FIELDS,
    ROW_AUX,
    ROW_FIELDS,
    ROW_LANE,
    ROW_POSITION,
    ROW_SLOT,
    SLOT_PARAM_WORDS,
    SLOT_PARAMS,
    TARGET_FIELDS,
    Int32Array,
    PrefillFrame,
    SlotParamRows,
    Stage,
    lane_of,
    mask_words,
    slot_param_rows,
    split_prefill_frame,
)
from depthbatch.common.messages import GrammarStart, StageBatch, StageExtra, Variant

_STAGES = frozenset(stage.value for stage in Stage)
_VARIANTS = sum(Variant)
_NONE = np.empty(0, np.int32)
_NO_MOVES = np.empty((0, MOVE_FIELDS), np.int32)
_NO_SLOT_PARAMS = np.empty(0, SLOT_PARAMS)
FEW = 32  # numbers that Python compares sooner than numpy
MOST_DRAFT_ROWS = 512  # of one decode stage, drafts included, unless there are more slots
EXACT_ROWS = 128  # beyond, a step of 8 is at most 6 % of padding


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Row counts of captured decode stages: few enough to capture each, close enough to waste little padding.

    1, 2, 4, then steps of 8 up to ``max_rows``, which is always the last; ascending.
    """
    small = [size for size in (1, 2, 4) if size < max_rows]
    return (*small, *range(8, max_rows, 8), max_rows)


def uncaptured_sizes(max_rows: int) -> tuple[int, ...]:
    """Every size up to EXACT_ROWS, then steps of 8: nothing is captured on the CPU, where arithmetic bounds a step from
    about 10 rows on and a padded row costs what a real one does."""
    return (*range(1, min(max_rows, EXACT_ROWS + 1)), *range(EXACT_ROWS + 8, max_rows, 8), max_rows)


def most_rows(width: int, lanes: int) -> int:
    """Rows of the largest decode batch: every lane of ``width`` slots, as far as captured stages stay few."""
    return min(lanes * width, max(width, MOST_DRAFT_ROWS))


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
    buckets: tuple[int, ...]  # ascending row counts of decode stages
    lanes: int = 1  # of each slot
    host_blocks: int = 0  # blocks 0 .. host_blocks - 1 of host memory


class StageInput(NamedTuple):
    """A stage that fits the worker. Arrays are int32, most of them views of what was received; none is written."""

    step_id: int
    stage: Stage
    variant: Variant
    bucket: int  # rows of a decode stage's frame; prefill: 0
    frame: Int32Array  # flat, as it travels (common.frames)
    slots: Int32Array  # [rows]
    positions: Int32Array  # [rows] of the token that a row carries; prefill: of the last one of each chunk
    given: Int32Array  # [n] slots that get a token, in batch order
    slot_params: SlotParamRows  # [n]
    chunks: PrefillFrame | None = None  # the frame of a prefill, cut
    adjustments: Int32Array = _NONE  # [n, 4]
    bad_sequences: Int32Array = _NONE  # [n, 2 + BAD_SEQUENCE_TOKENS]
    allow_lists: Int32Array = _NONE  # [n, 1 + mask_words(vocab_size)]
    targets: Int32Array = _NONE  # [n, 2]
    depths: Int32Array = _NONE  # [n_tokens], or none: r_max everywhere
    forced: Int32Array = _NONE  # [n, 2]: slot, token that it goes on with in place of a sampled one
    grammars: tuple[GrammarStart, ...] = ()
    offloads: Int32Array = _NO_MOVES  # [n, 2]: KV block, block of host memory
    restores: Int32Array = _NO_MOVES  # [n, 2]: block of host memory, KV block

    @property
    def rows(self) -> int:
        """Real rows; prefill: sequences."""
        return self.slots.size

    @property
    def num_values(self) -> int:
        """Rows of which the host gets a value: their token, or what their gate says."""
        if self.stage is Stage.PREFILL or self.stage is Stage.CODA:
            return self.given.size
        return self.slots.size if Variant.GATES in self.variant else 0

    def rare_prefill_inputs(self) -> dict[str, Int32Array]:
        """What few prefills have, under the names of PrefillInput; only what this one has."""
        rare = {"targets": self.targets, "depths": self.depths, "forced": self.forced}
        return {name: values for name, values in rare.items() if values.size}


def parse_stage(
    header: StageBatch, frame: Int32Array, slot_params: Int32Array | None, limits: StageLimits
) -> StageInput:
    """Raises StageError unless header, frame and slot parameters fit each other and ``limits``."""
    _require(header.stage in _STAGES, header, "unknown stage")
    _require(not header.variant & ~_VARIANTS, header, "unknown variant")
    _require(Variant.SAMPLE in header.variant or Variant.FILTER not in header.variant, header, "filters greedy rows")
    params = _slot_params(header, slot_params, limits)
    parse = _prefill if header.stage == Stage.PREFILL else _decode
    stage = parse(header, frame.reshape(-1), params, limits)
    return stage if header.extra is None else _with_extra(stage, header, header.extra, limits)


def _require(condition: bool | np.bool_, header: StageBatch, what: str) -> None:
    if not condition:
        raise StageError(f"stage {header.step_id} ({_stage_name(header.stage)}): {what}")


def _stage_name(stage: int) -> str:
    return Stage(stage).label if stage in _STAGES else str(stage)


def _within(values: Int32Array, low: int, high: int) -> bool:
    """Every value in [low, high]; an empty array is fine. Of many in one comparison: below ``low`` one wraps to more than
    any."""
    if values.size <= FEW:
        few = values.ravel().tolist()
        return not few or (low <= min(few) and max(few) <= high)
    return bool(((values - np.int32(low)).view(np.uint32) <= high - low).all())


def _slot_params(header: StageBatch, slot_params: Int32Array | None, limits: StageLimits) -> SlotParamRows:
    if slot_params is None:
        _require(header.n_slot_params == 0, header, "slot parameter frame missing")
        return _NO_SLOT_PARAMS
    _require(
        header.n_slot_params > 0 and slot_params.size == header.n_slot_params * SLOT_PARAM_WORDS,
        header,
        f"slot parameter frame has {slot_params.size} int32, not {header.n_slot_params} * {SLOT_PARAM_WORDS}",
    )
    params = slot_param_rows(slot_params)
    _require(_within(params["slot"], 1, limits.num_slots), header, "parameters of a slot that does not exist")
    return params


def _decode(header: StageBatch, frame: Int32Array, params: SlotParamRows, limits: StageLimits) -> StageInput:
    bucket, rows, stage = header.bucket, header.rows, Stage(header.stage)
    if bucket not in limits.buckets:  # of which there may be too many to write down for every stage
        _require(False, header, f"bucket {bucket} is none of {limits.buckets}")
    _require(1 <= rows <= bucket, header, f"{rows} rows in bucket {bucket}")
    _require(frame.size == ROW_FIELDS * bucket, header, f"frame has {frame.size} int32, not {ROW_FIELDS} * {bucket}")
    table = frame.reshape(ROW_FIELDS, bucket)
    slots, positions = table[ROW_SLOT, :rows], table[ROW_POSITION, :rows]
    _require(_within(slots, 1, limits.num_slots), header, "slot out of range")
    _require(rows == bucket or not table[:, rows:].any(), header, "padding rows are not zero")
    _require(_within(positions, 0, limits.max_positions - 1), header, "position out of range")
    lanes = slots if limits.lanes == 1 else lane_of(slots, positions, limits.num_slots, limits.lanes)
    _require(
        rows == 1 or len(set(lanes.tolist())) == rows,
        header,
        "a slot is there twice" if limits.lanes == 1 else "a lane is there twice",
    )
    _require(bool((table[ROW_LANE, :rows] == lanes).all()), header, "a lane is not that of its slot and position")
    if stage is Stage.PRELUDE:
        _require(_within(table[ROW_AUX], 0, limits.num_blocks - 1), header, "block out of range")
    else:
        fewest = -limits.r_max if stage is Stage.CODA and limits.lanes > 1 else 1
        loops = table[ROW_AUX, :rows]
        _require(_within(loops, fewest, limits.r_max) and bool(loops.all()), header, "loop out of range")
    if limits.lanes > 1 and rows > 1 and stage is not Stage.CODA:
        ahead = _loops_ahead(slots, positions, table[ROW_AUX, :rows])
        if stage is Stage.PRELUDE:
            _require(ahead is None, header, "a slot begins two tokens")
        else:
            _require(ahead is None or bool((ahead > 0).all()), header, "a token is as deep as one before it")
    given = slots if stage is Stage.CODA else _NONE
    return StageInput(header.step_id, stage, Variant(header.variant), bucket, frame, slots, positions, given, params)


def _loops_ahead(slots: Int32Array, positions: Int32Array, loops: Int32Array) -> Int32Array | None:
    """How much deeper each row is than its slot's next later one; None when no slot has two rows.

    Kernels append and attend row by row: what a row writes must not be what another of its stage reads. Every loop has
    a plane of its own where slots have several lanes, so rows of a slot must be at different loops, later ones behind.
    """
    order = np.lexsort((positions, slots))
    same = slots[order[1:]] == slots[order[:-1]]
    if not same.any():
        return None
    ahead: Int32Array = (loops[order[:-1]] - loops[order[1:]])[same]
    return ahead


def _prefill(header: StageBatch, frame: Int32Array, params: SlotParamRows, limits: StageLimits) -> StageInput:
    _require(header.rows >= 1 and header.n_tokens >= 1, header, "nothing in it")
    _require(header.n_updates >= 0, header, "a negative number of updates")
    try:
        chunks = split_prefill_frame(frame, header.rows, header.n_tokens, header.n_updates)
    except ValueError as error:
        raise StageError(f"stage {header.step_id} (prefill): {error}") from None
    ends = chunks.starts + chunks.lengths
    _require(_within(chunks.slots, 1, limits.num_slots), header, "slot out of range")
    _require(np.unique(chunks.slots).size == chunks.slots.size, header, "a slot is there twice")
    _require(_within(chunks.lengths, 1, limits.max_positions), header, "chunk without tokens")
    _require(int(chunks.lengths.sum()) == header.n_tokens, header, "lengths do not add up to the tokens")
    _require(_within(chunks.starts, 0, limits.max_positions), header, "start out of range")
    _require(_within(ends, 1, limits.max_positions), header, "position out of range")
    _require(_within(chunks.sample, 0, 1), header, "sample is neither 0 nor 1")
    _require(_within(chunks.token_ids, 0, limits.vocab_size - 1), header, "token id out of range")
    slots, columns, blocks = chunks.updates.T
    _require(_within(slots, 1, limits.num_slots), header, "update of a slot that does not exist")
    _require(_within(columns, 0, limits.max_blocks - 1), header, "update outside the block table")
    _require(_within(blocks, 1, limits.num_blocks - 1), header, "block out of range")
    given = chunks.slots[chunks.sample == 1]
    variant = Variant(header.variant)
    return StageInput(
        header.step_id, Stage.PREFILL, variant, 0, frame, chunks.slots, ends - 1, given, params, chunks=chunks
    )


def _with_extra(stage: StageInput, header: StageBatch, extra: StageExtra, limits: StageLimits) -> StageInput:
    """The stage with what few have."""
    decodes = stage.stage is not Stage.PREFILL
    of_prelude = StageExtra(forced_tokens=extra.forced_tokens, offloads=extra.offloads)
    may = stage.stage is Stage.PRELUDE and extra == of_prelude
    _require(not decodes or may, header, "a decode stage with extra inputs")
    whole = stage._replace(
        adjustments=_rows(header, "adjustments", extra.adjustments, ADJUSTMENT_FIELDS),
        bad_sequences=_rows(header, "bad sequences", extra.bad_sequences, 2 + BAD_SEQUENCE_TOKENS),
        allow_lists=_rows(header, "allow lists", extra.allow_lists, 1 + mask_words(limits.vocab_size)),
        targets=_rows(header, "targets", extra.targets, TARGET_FIELDS),
        depths=np.frombuffer(extra.depths, np.uint8).astype(np.int32),
        forced=_rows(header, "forced tokens", extra.forced_tokens, FORCED_TOKEN_FIELDS),
        grammars=extra.grammars,
        offloads=_rows(header, "offloads", extra.offloads, MOVE_FIELDS),
        restores=_rows(header, "restores", extra.restores, MOVE_FIELDS),
    )
    _check_extra(whole, header, limits)
    return whole


def _rows(header: StageBatch, what: str, data: bytes, fields: int) -> Int32Array:
    """[n, fields]"""
    _require(len(data) % (4 * fields) == 0, header, f"{what} of {len(data)} bytes are not rows of {fields} int32")
    return np.frombuffer(data, "<i4").reshape(-1, fields)


def _check_extra(stage: StageInput, header: StageBatch, limits: StageLimits) -> None:
    slots, entries, tokens, _ = stage.adjustments.T
    _require(_within(slots, 1, limits.num_slots), header, "adjustment of a slot that does not exist")
    _require(_within(entries, 0, MAX_ADJUSTMENTS - 1), header, "adjustment outside the slot's table")
    _require(_within(tokens, 0, limits.vocab_size - 1), header, "adjusted token out of range")
    slots, entries, last = stage.bad_sequences.T[[0, 1, -1]]
    _require(_within(slots, 1, limits.num_slots), header, "bad sequence of a slot that does not exist")
    _require(_within(entries, 0, MAX_BAD_SEQUENCES - 1), header, "bad sequence outside the slot's table")
    _require(_within(stage.bad_sequences[:, 2:], -1, limits.vocab_size - 1), header, "bad token out of range")
    _require(_within(last, 0, limits.vocab_size - 1), header, "bad sequence without a last token")
    slots = stage.allow_lists[:, 0]
    _require(_within(slots, 1, limits.num_slots), header, "allow list of a slot that does not exist")
    _require(bool(stage.allow_lists[:, 1:].any(1).all()), header, "allow list that allows nothing")
    index, tokens = stage.targets.T
    _require(_within(index, 0, header.n_tokens - 1), header, "target outside the prompt tokens")
    _require(_within(tokens, 0, limits.vocab_size - 1), header, "target token out of range")
    known = all(1 <= start.slot <= limits.num_slots for start in stage.grammars)
    _require(known, header, "grammar of a slot that does not exist")
    depths = stage.depths
    _require(depths.size in (0, header.n_tokens), header, f"{depths.size} depths for {header.n_tokens} tokens")
    _require(_within(depths, 0, limits.r_max), header, "depth out of range")
    for blocks, host in (stage.offloads.T, stage.restores.T[::-1]):
        _require(_within(blocks, 1, limits.num_blocks - 1), header, "copy of a block that does not exist")
        _require(_within(host, 0, limits.host_blocks - 1), header, "copy of a host block that does not exist")
    slots, tokens = stage.forced.T
    free = np.setdiff1d(stage.slots, stage.given)
    _require(bool(np.isin(slots, free).all()), header, "forced token of a slot that is not in it, or is sampled")
    _require(np.unique(slots).size == slots.size, header, "two forced tokens of a slot")
    _require(_within(tokens, 0, limits.vocab_size - 1), header, "forced token out of range")
