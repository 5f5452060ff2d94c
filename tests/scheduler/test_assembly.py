"""The slot parameter frame, column by column."""

import numpy as np

from depthbatch.common.frames import SLOT_PARAM_FIELDS, SlotParam
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.stage_batch import slot_param_frame


def request(slot: int, **params: object) -> Request:
    fields = RequestParams(max_tokens=1, **params)  # type: ignore[arg-type]
    return Request(1, np.zeros(7, np.int32), fields, fields.gate, 1, 0, frozenset(), slot=slot)


def test_every_column_is_where_slot_param_says() -> None:
    """Each field has a value of its own, so two swapped columns cannot cancel; the 64-bit seed keeps all its bits."""
    seed = 0xFEDCBA9876543210
    row = request(
        3, gate=Gate.LOOKAHEAD, exit_threshold=0.25, temperature=0.75, top_k=11, top_p=0.5, min_p=0.125, seed=seed
    )
    frame = slot_param_frame([request(9), row])
    assert frame is not None and frame.shape == (2, SLOT_PARAM_FIELDS) and frame.dtype == np.int32
    floats, bits = frame[1].view(np.float32), frame[1].view(np.uint32)
    assert (frame[1, SlotParam.SLOT], frame[1, SlotParam.GATE], frame[1, SlotParam.TOP_K]) == (3, Gate.LOOKAHEAD, 11)
    assert floats[SlotParam.EXIT_THRESHOLD] == 0.25 and floats[SlotParam.TEMPERATURE] == 0.75
    assert floats[SlotParam.TOP_P] == 0.5 and floats[SlotParam.MIN_P] == 0.125
    assert int(bits[SlotParam.SEED_LOW]) | int(bits[SlotParam.SEED_HIGH]) << 32 == seed
    assert frame[1, SlotParam.FIRST_OUTPUT] == 7
    assert int(bits[SlotParam.STATE_SEED]) == 0xFEDCBA98 ^ 0x76543210
    assert frame[0, SlotParam.SLOT] == 9 and slot_param_frame([]) is None


def test_negative_seeds_are_their_64_bits() -> None:
    """-1 and 2**64 - 1 are the same seed."""
    one, other = (slot_param_frame([request(1, seed=seed)]) for seed in (-1, (1 << 64) - 1))
    assert one is not None and other is not None and one.tolist() == other.tolist()
