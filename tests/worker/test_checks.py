"""Stages that do not fit the worker are refused before a kernel sees them: each field out of range, one at a time."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthbatch.common.frames import (
    BAD_SEQUENCE_TOKENS,
    MAX_ADJUSTMENTS,
    MAX_BAD_SEQUENCES,
    SLOT_PARAM_WORDS,
    Int32Array,
    Stage,
)
from depthbatch.common.messages import GrammarStart, StageBatch, StageExtra, Variant
from depthbatch.worker.runner.stage_input import FEW, StageError, StageLimits, _within, parse_stage

LIMITS = StageLimits(
    num_slots=4, num_blocks=10, max_blocks=3, max_positions=48, r_max=4, vocab_size=50, buckets=(1, 2, 4)
)


def int32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def decode(stage: Stage, aux: tuple[int, int, int]) -> tuple[StageBatch, Int32Array]:
    frame = np.array([[1, 4, 2, 0], [0, 47, 16, 0], [*aux, 0], [1, 4, 2, 0]], np.int32)
    return StageBatch(7, stage, bucket=4, rows=3), frame


def prefill() -> tuple[StageBatch, Int32Array]:
    """Two sequences of 3 and 2 tokens, the second from position 46 on; one block."""
    frame = np.array([1, 4, 0, 46, 3, 2, 1, 0, 5, 6, 49, 0, 1, 1, 2, 9], np.int32)
    return StageBatch(7, Stage.PREFILL, bucket=0, rows=2, n_tokens=5, n_updates=1), frame


def test_good_stages_pass() -> None:
    """Every limit is touched from inside, so a bound one too tight fails here."""
    for header, frame in (
        prefill(),
        decode(Stage.PRELUDE, (0, 9, 1)),
        decode(Stage.CORE, (1, 4, 2)),
        decode(Stage.CODA, (4, 1, 1)),
    ):
        parse_stage(header, frame, None, LIMITS)
    header, frame = decode(Stage.CORE, (1, 1, 1))
    params = np.zeros((2, SLOT_PARAM_WORDS), np.int32)
    params[:, 0] = 1, 4
    parse_stage(msgspec.structs.replace(header, n_slot_params=2), frame, params, LIMITS)


@pytest.mark.parametrize(
    ("index", "value", "what"),
    [
        ((0, 0), 0, "slot out of range"),
        ((0, 0), 5, "slot out of range"),
        ((0, 0), -1, "slot out of range"),
        ((0, 1), 1, "twice"),
        ((0, 3), 3, "padding"),
        ((2, 3), 1, "padding"),
        ((1, 0), 48, "position"),
        ((1, 0), -1, "position"),
        ((3, 1), 3, "lane"),
        ((3, 3), 3, "padding"),
    ],
)
@pytest.mark.parametrize("stage", [Stage.PRELUDE, Stage.CORE, Stage.CODA])
def test_bad_rows(stage: Stage, index: tuple[int, int], value: int, what: str) -> None:
    header, frame = decode(stage, (1, 1, 1))
    frame[index] = value
    with pytest.raises(StageError, match=rf"stage 7 \({stage.label}\): .*{what}"):
        parse_stage(header, frame, None, LIMITS)


def chain(stage: Stage, slots: list[int], positions: list[int], aux: list[int]) -> tuple[StageBatch, Int32Array]:
    """Rows of slots with three lanes, each in the lane of its position."""
    lanes = [slot + position % 3 * 4 for slot, position in zip(slots, positions, strict=True)]
    return StageBatch(7, stage, bucket=4, rows=4), np.array([slots, positions, aux, lanes], np.int32)


@pytest.mark.parametrize(
    ("stage", "slots", "positions", "aux", "what"),
    [
        (Stage.PRELUDE, [1, 2, 3, 4], [5, 5, 5, 6], [0, 3, 9, 0], None),
        (Stage.PRELUDE, [1, 2, 1, 4], [5, 5, 6, 6], [0, 3, 9, 0], "a slot begins two tokens"),
        (Stage.CORE, [1, 2, 1, 1], [6, 5, 5, 7], [2, 4, 3, 1], None),
        (Stage.CORE, [1, 2, 1, 1], [6, 5, 5, 7], [2, 4, 2, 1], "as deep as one before it"),
        (Stage.CORE, [1, 2, 1, 1], [6, 5, 5, 7], [2, 4, 3, 4], "as deep as one before it"),
        (Stage.CODA, [1, 2, 1, 1], [6, 5, 5, 7], [-4, 4, 3, -1], None),
        (Stage.CODA, [1, 2, 1, 1], [6, 5, 5, 7], [-5, 4, 3, -1], "loop out of range"),
        (Stage.CODA, [1, 2, 1, 1], [6, 5, 5, 8], [-2, 4, 3, -1], "a lane is there twice"),
        (Stage.CORE, [1, 2, 1, 1], [6, 5, 5, 7], [-2, 4, 3, 1], "loop out of range"),
    ],
)
def test_rows_of_a_slot(stage: Stage, slots: list[int], positions: list[int], aux: list[int], what: str | None) -> None:
    """Several tokens of a sequence in one stage: none may read what another writes. Kernels work row by row, so a row
    would read K/V that another thread has half written."""
    header, frame = chain(stage, slots, positions, aux)
    limits = LIMITS._replace(lanes=3)
    if what is None:
        parse_stage(header, frame, None, limits)
        with pytest.raises(StageError):  # with one lane there are no others
            parse_stage(header, frame, None, LIMITS)
        return
    with pytest.raises(StageError, match=what):
        parse_stage(header, frame, None, limits)


@pytest.mark.parametrize(
    ("stage", "value"), [(Stage.PRELUDE, -1), (Stage.PRELUDE, 10), (Stage.CORE, 0), (Stage.CORE, 5), (Stage.CODA, 0)]
)
def test_bad_aux(stage: Stage, value: int) -> None:
    header, frame = decode(stage, (1, value, 1))
    with pytest.raises(StageError, match="out of range"):
        parse_stage(header, frame, None, LIMITS)


@pytest.mark.parametrize(
    ("index", "value", "what"),
    [
        (0, 4, "twice"),
        (1, 5, "slot"),
        (3, 47, "position out of range"),
        (2, -1, "start"),
        (4, 0, "chunk without tokens"),
        (5, 3, "add up"),
        (6, 2, "sample"),
        (8, 50, "token id"),
        (9, -1, "token id"),
        (13, 0, "slot that does not exist"),
        (14, 3, "outside the block table"),
        (15, 10, "block out of range"),
        (15, 0, "block out of range"),
    ],
)
def test_bad_prefills(index: int, value: int, what: str) -> None:
    header, frame = prefill()
    frame[index] = value
    with pytest.raises(StageError, match=what):
        parse_stage(header, frame, None, LIMITS)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: msgspec.structs.replace(h, stage=9),
        lambda h: msgspec.structs.replace(h, bucket=3),
        lambda h: msgspec.structs.replace(h, bucket=2),
        lambda h: msgspec.structs.replace(h, rows=0),
        lambda h: msgspec.structs.replace(h, rows=5),
        lambda h: msgspec.structs.replace(h, n_slot_params=1),
        lambda h: msgspec.structs.replace(h, variant=Variant(1 << 12)),
        lambda h: msgspec.structs.replace(h, variant=Variant.FILTER),
    ],
)
def test_bad_headers(change: Callable[[StageBatch], StageBatch]) -> None:
    header, frame = decode(Stage.CORE, (1, 1, 1))
    with pytest.raises(StageError):
        parse_stage(change(header), frame, None, LIMITS)


def test_counts_that_cancel_are_refused() -> None:
    """The frame is as long as its counts say, but a negative number of updates would stand in for three tokens."""
    header, frame = prefill()
    header, frame = msgspec.structs.replace(header, n_tokens=8, n_updates=-1), frame[:13].copy()
    frame[4:6] = 4, 4
    frame[8:] = 0
    with pytest.raises(StageError, match="negative number of updates"):
        parse_stage(header, frame, None, LIMITS._replace(max_positions=99))


def test_slot_parameters_must_fit() -> None:
    header, frame = decode(Stage.CORE, (1, 1, 1))
    for params in (np.zeros(SLOT_PARAM_WORDS - 1, np.int32), np.full(SLOT_PARAM_WORDS, 5, np.int32)):
        with pytest.raises(StageError, match=r"slot parameter frame|parameters of a slot"):
            parse_stage(msgspec.structs.replace(header, n_slot_params=1), frame, params, LIMITS)
    with pytest.raises(StageError, match="slot parameter frame"):
        parse_stage(header, frame, np.full(SLOT_PARAM_WORDS, 1, np.int32), LIMITS)


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        (StageExtra(adjustments=b"\0" * 12), "not rows of 4"),
        (StageExtra(targets=b"\0" * 12), "not rows of 2"),
        (StageExtra(bad_sequences=b"\0" * 12), "not rows of 18"),
        (StageExtra(bad_sequences=int32(5, 0, *[1] * BAD_SEQUENCE_TOKENS)), "slot that does not exist"),
        (StageExtra(bad_sequences=int32(1, MAX_BAD_SEQUENCES, *[1] * BAD_SEQUENCE_TOKENS)), "outside the slot's table"),
        (StageExtra(bad_sequences=int32(1, 0, *[50] * BAD_SEQUENCE_TOKENS)), "bad token"),
        (StageExtra(bad_sequences=int32(1, 0, *[-2] * BAD_SEQUENCE_TOKENS)), "bad token"),
        (StageExtra(bad_sequences=int32(1, 0, *[-1] * BAD_SEQUENCE_TOKENS)), "without a last token"),
        (StageExtra(allow_lists=int32(1, 1)), "not rows of"),
        (StageExtra(allow_lists=int32(5, 1, 0)), "slot that does not exist"),
        (StageExtra(allow_lists=int32(1, 0, 0)), "allows nothing"),
        (StageExtra(adjustments=int32(0, 0, 1, 0)), "slot that does not exist"),
        (StageExtra(adjustments=int32(5, 0, 1, 0)), "slot that does not exist"),
        (StageExtra(adjustments=int32(1, MAX_ADJUSTMENTS, 1, 0)), "outside the slot's table"),
        (StageExtra(adjustments=int32(1, -1, 1, 0)), "outside the slot's table"),
        (StageExtra(adjustments=int32(1, 0, 50, 0)), "adjusted token"),
        (StageExtra(targets=int32(5, 1)), "outside the prompt tokens"),
        (StageExtra(targets=int32(-1, 1)), "outside the prompt tokens"),
        (StageExtra(targets=int32(0, 50)), "target token"),
        (StageExtra(grammars=(GrammarStart(5, 1, "x"),)), "grammar of a slot"),
        (StageExtra(depths=bytes([1, 1, 1, 1])), "4 depths for 5 tokens"),
        (StageExtra(offloads=int32(1, 0)), "host block that does not exist"),
        (StageExtra(restores=int32(0, 1)), "host block that does not exist"),
        (StageExtra(offloads=int32(0, 0)), "copy of a block that does not exist"),
        (StageExtra(restores=int32(0, 99)), "copy of a block that does not exist"),
        (StageExtra(offloads=int32(1, 2, 3)), "not rows of 2 int32"),
        (StageExtra(depths=bytes([1, 1, 5, 1, 1])), "depth out of range"),
        (StageExtra(forced_tokens=b"\0" * 12), "not rows of 2"),
        (StageExtra(forced_tokens=int32(2, 1)), "forced token of a slot"),
        (StageExtra(forced_tokens=int32(1, 1)), "or is sampled"),
        (StageExtra(forced_tokens=int32(4, 1, 4, 2)), "two forced tokens"),
        (StageExtra(forced_tokens=int32(4, 50)), "forced token out of range"),
    ],
)
def test_bad_extras(extra: StageExtra, what: str) -> None:
    """Rare inputs index static tables as the frames do; the good ones beside them touch each limit from inside."""
    header, frame = prefill()
    adjustments, targets = int32(4, MAX_ADJUSTMENTS - 1, 49, 0, 1, 0, 0, 0), int32(0, 49, 4, 0)
    good = StageExtra(adjustments, targets, (GrammarStart(4, 1, "x"),), bytes([4, 4, 4, 1, 2]), int32(4, 49))
    parse_stage(msgspec.structs.replace(header, extra=good), frame, None, LIMITS)
    with pytest.raises(StageError, match=what):
        parse_stage(msgspec.structs.replace(header, extra=extra), frame, None, LIMITS)


@pytest.mark.parametrize("stage", [Stage.PRELUDE, Stage.CORE, Stage.CODA])
@pytest.mark.parametrize(
    "extra",
    [
        StageExtra(),
        StageExtra(forced_tokens=int32(1, 5)),
        StageExtra(depths=b"\1", forced_tokens=int32(1, 5)),
        StageExtra(offloads=int32(1, 0)),
        StageExtra(restores=int32(0, 1)),
    ],
)
def test_decode_stages_have_no_extras_but_those_of_preludes(stage: Stage, extra: StageExtra) -> None:
    """Preludes have forced tokens and offloads; K/V come back in prefills alone."""
    limits = LIMITS._replace(host_blocks=2)
    header, frame = decode(stage, (1, 1, 1))
    header = msgspec.structs.replace(header, extra=extra)
    if stage is Stage.PRELUDE and not extra.depths and not extra.restores:
        parse_stage(header, frame, None, limits)
        return
    with pytest.raises(StageError, match="decode stage with extra"):
        parse_stage(header, frame, None, limits)


@given(
    values=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 9), max_size=2 * FEW),
    low=st.integers(-4, 3),
    span=st.integers(0, 8),
)
def test_bounds_of_few_and_of_many_numbers(values: list[int], low: int, span: int) -> None:
    """Few are compared by Python, many by numpy in one wrapping subtraction; both as one would write it down."""
    for numbers in (values, [*values, *[low] * FEW], [low] * FEW + values[:1]):
        want = all(low <= number <= low + span for number in numbers)
        assert _within(np.array(numbers, np.int32), low, low + span) == want
