"""The slot parameter frame, column by column."""

import numpy as np
import pytest

from depthbatch.common.frames import SLOT_PARAM_WORDS, SLOT_PARAMS, slot_param_rows
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.stage_batch import slot_param_frame
from fakes.bans import bad_rows


def request(slot: int, **params: object) -> Request:
    fields = RequestParams(max_tokens=1, **params)  # type: ignore[arg-type]
    return Request(1, np.zeros(7, np.int32), fields, fields.gate, 1, 0, frozenset(), slot=slot)


def test_every_column_is_where_slot_param_says() -> None:
    """Each field has a value of its own, so two swapped columns cannot cancel; the 64-bit seed keeps all its bits."""
    seed = 0xFEDCBA9876543210
    penalties = {"presence_penalty": 1.5, "frequency_penalty": -0.25, "repetition_penalty": 1.75}
    given = {"exit_threshold": 0.25, "temperature": 0.75, "top_k": 11, "top_p": 0.5, "min_p": 0.125, **penalties}
    bias = np.array([1, 0, 2, 0], np.int32).tobytes()
    row = request(
        3,
        gate=Gate.LOOKAHEAD,
        seed=seed,
        min_tokens=1,
        stop_token_ids=(4,),
        logit_bias=bias,
        grammar="g",
        bad_sequences=bad_rows([[1], [2, 3]]),
        allow_list=b"\1\0\0\0",
        **given,
    )
    frame = slot_param_frame([request(9), row])
    assert frame is not None and frame.shape == (2, SLOT_PARAM_WORDS) and frame.dtype == np.int32
    low, high = (int(np.uint32(half).view(np.int32)) for half in (seed & 0xFFFFFFFF, seed >> 32))
    given |= {"slot": 3, "gate": Gate.LOOKAHEAD, "seed_low": low, "seed_high": high, "first_output": 7, "min_until": 8}
    given |= {"state_seed": low ^ high, "adjustments": 3, "constrained": 1, "num_bad_sequences": 2, "allow_listed": 1}
    assert dict(zip(SLOT_PARAMS.names or (), slot_param_rows(frame)[1].item(), strict=True)) == given
    assert slot_param_rows(frame)["slot"].tolist() == [9, 3] and slot_param_frame([]) is None


def test_flags_of_one_kind_are_not_another() -> None:
    rows = slot_param_rows(slot_param_frame([request(1, grammar="g"), request(2, allow_list=b"\1\0\0\0")]))
    assert rows["constrained"].tolist() == [1, 0] and rows["allow_listed"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "fields", [{"presence_penalty": 1.0}, {"bad_sequences": bad_rows([[1]])}, {"grammar": "g"}, {"speculation": False}]
)
def test_what_looks_back_has_no_drafts(fields: dict) -> None:
    """A draft is drawn before the tokens that a penalty, a bad word or a grammar asks for are final."""
    assert request(1).may_have_drafts and not request(1, **fields).may_have_drafts


def test_every_field_is_one_word() -> None:
    """The worker keeps rows as int32 on the device and finds a field by its offset in words."""
    fields = SLOT_PARAMS.fields or {}
    assert [field[1] for field in fields.values()] == list(range(0, SLOT_PARAMS.itemsize, 4))
    assert all(field[0].kind in "if" for field in fields.values())


def test_negative_seeds_are_their_64_bits() -> None:
    """-1 and 2**64 - 1 are the same seed."""
    one, other = (slot_param_frame([request(1, seed=seed)]) for seed in (-1, (1 << 64) - 1))
    assert one is not None and other is not None and one.tolist() == other.tolist()
