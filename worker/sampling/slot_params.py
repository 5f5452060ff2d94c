"""The parameters of some rows, as tensors. Knows the columns of the slot parameter frame."""

from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.common.frames import SlotParam


class SlotParams(NamedTuple):
    """The parameters of some rows, each [N]. Float columns are the bits that the scheduler sent."""

    gate: Tensor  # int32, common.gates.Gate
    exit_threshold: Tensor  # fp32
    temperature: Tensor  # fp32, 0 = greedy
    top_k: Tensor  # int32, 0 = off
    top_p: Tensor  # fp32
    min_p: Tensor  # fp32
    seed_low: Tensor  # int32
    seed_high: Tensor  # int32
    state_seed: Tensor  # int32
    first_output: Tensor  # int32, prompt length
    presence: Tensor  # fp32
    frequency: Tensor  # fp32
    repetition: Tensor  # fp32, 0 = 1 = off
    min_until: Tensor  # int32, position of the first output token that may be a stop token
    adjustments: Tensor  # int32, entries of the adjustment table
    constrained: Tensor  # int32, 1 = a grammar says what is allowed


def split_params(rows: Tensor) -> SlotParams:
    """Rows of the slot parameter frame, int32 [N, SLOT_PARAM_FIELDS], as columns."""
    floats = rows.view(torch.float32)
    return SlotParams(
        gate=rows[:, SlotParam.GATE],
        exit_threshold=floats[:, SlotParam.EXIT_THRESHOLD],
        temperature=floats[:, SlotParam.TEMPERATURE],
        top_k=rows[:, SlotParam.TOP_K],
        top_p=floats[:, SlotParam.TOP_P],
        min_p=floats[:, SlotParam.MIN_P],
        seed_low=rows[:, SlotParam.SEED_LOW],
        seed_high=rows[:, SlotParam.SEED_HIGH],
        state_seed=rows[:, SlotParam.STATE_SEED],
        first_output=rows[:, SlotParam.FIRST_OUTPUT],
        presence=floats[:, SlotParam.PRESENCE],
        frequency=floats[:, SlotParam.FREQUENCY],
        repetition=floats[:, SlotParam.REPETITION],
        min_until=rows[:, SlotParam.MIN_UNTIL],
        adjustments=rows[:, SlotParam.ADJUSTMENTS],
        constrained=rows[:, SlotParam.CONSTRAINED],
    )
