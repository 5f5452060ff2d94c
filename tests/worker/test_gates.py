"""Exit arithmetic: the published hazard distribution in fp32, strict and inclusive comparisons, who may fire."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from depthbatch.common.gates import Gate
from depthbatch.worker.models.interface import LoopedModel
from depthbatch.worker.sampling.exit_gates import Hazard, accumulate_hazard, gate_step, hazard_fires

HAZARD_GATES = (Gate.NONE, Gate.FIXED, Gate.REPLAY, Gate.OWN, Gate.DELAYED, Gate.LOOKAHEAD)
CONVERGENCE_GATES = (Gate.NONE, Gate.FIXED, Gate.REPLAY, Gate.OWN, Gate.DELAYED, Gate.CONVERGENCE)


def hazard_model(own: torch.Tensor, ahead: torch.Tensor | None = None) -> LoopedModel:
    gates = HAZARD_GATES if ahead is not None else HAZARD_GATES[:-1]
    model = SimpleNamespace(
        spec=SimpleNamespace(gates=gates), gate_logit=lambda item: own, lookahead_logit=lambda item: ahead
    )
    return cast(LoopedModel, model)


def convergence_model(distance: torch.Tensor) -> LoopedModel:
    model = SimpleNamespace(spec=SimpleNamespace(gates=CONVERGENCE_GATES), convergence=lambda before, after: distance)
    return cast(LoopedModel, model)


def start(rows: int) -> Hazard:
    return Hazard(torch.ones(rows), torch.zeros(rows))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_cumulated_hazard_is_the_published_distribution() -> None:
    """cum_t = 1 - prod(1 - l): checked in float64 for random logits, so a wrong recurrence cannot pass."""
    logits = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) * 3
    state = start(32)
    for row in logits:
        state = accumulate_hazard(state, row)
    hazards = 1 / (1 + np.exp(-logits.double().numpy()))
    assert np.allclose(state.cumulated.numpy(), 1 - np.prod(1 - hazards, axis=0), atol=2e-6)
    assert np.allclose(state.survival.numpy(), np.prod(1 - hazards, axis=0), atol=2e-6)


def test_threshold_one_is_full_depth_although_the_sum_rounds_to_one() -> None:
    """Gate logits of 40 make the cumulated sum exactly 1.0; >= alone would fire."""
    state = accumulate_hazard(start(1), torch.tensor([40.0]))
    assert state.cumulated.item() == 1.0
    assert not hazard_fires(state, torch.tensor([1.0])).item()
    assert hazard_fires(state, torch.tensor([0.999])).item()


def test_the_bf16_example_of_the_model_notes_stays_below_one_in_fp32() -> None:
    """Logits (-4, 2, 5): cumulated in bf16 is 1 at loop 3, in fp32 it is not, so q = 1 - 1e-4 must not fire there."""
    state = start(1)
    for logit in (-4.0, 2.0, 5.0):
        state = accumulate_hazard(state, torch.tensor([logit]))
    assert 0.999 < state.cumulated.item() < 0.9999


def test_hazard_threshold_is_inclusive() -> None:
    """l = sigmoid(0) = 0.5 exactly: equality must fire."""
    state = accumulate_hazard(start(2), torch.zeros(2))
    assert hazard_fires(state, torch.tensor([0.5, 0.50001])).tolist() == [True, False]


def test_only_rows_with_a_device_gate_fire() -> None:
    """All rows have the same certain hazard; the kinds alone decide."""
    kinds = ints(*(int(gate) for gate in Gate))
    rows = len(kinds)
    model = hazard_model(torch.full((rows,), 9.0))
    step = gate_step(model, kinds, torch.full((rows,), 0.5), torch.full_like(kinds, 2), start(rows), (), ())
    fired = {Gate(kind) for kind, flag in zip(kinds.tolist(), step.fired.tolist(), strict=True) if flag}
    assert fired == {Gate.OWN, Gate.DELAYED}


def test_lookahead_rows_use_the_trained_head_and_others_the_own_gate() -> None:
    """The two heads disagree in sign, in both directions, so a mix-up flips both flags."""
    kinds = ints(Gate.OWN, Gate.LOOKAHEAD, Gate.OWN, Gate.LOOKAHEAD)
    own, ahead = torch.tensor([9.0, 9.0, -9.0, -9.0]), torch.tensor([-9.0, -9.0, 9.0, 9.0])
    step = gate_step(hazard_model(own, ahead), kinds, torch.full((4,), 0.5), ints(1, 1, 1, 1), start(4), (), ())
    assert step.fired.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("kind", [Gate.OWN, Gate.DELAYED, Gate.CONVERGENCE])
def test_convergence_is_strict_and_counts_from_loop_2(kind: Gate) -> None:
    """Equality must not fire, nor loop 1, whose predecessor s_0 is no state of the loop."""
    distance = torch.tensor([0.25, 0.24, 0.24, 0.0])
    loops = ints(2, 2, 1, 3)
    model = convergence_model(distance)
    step = gate_step(model, torch.full_like(loops, int(kind)), torch.full((4,), 0.25), loops, start(4), (), ())
    assert step.fired.tolist() == [0, 1, 0, 1]
    none = gate_step(model, torch.full_like(loops, int(Gate.REPLAY)), torch.full((4,), 0.25), loops, start(4), (), ())
    assert none.fired.tolist() == [0, 0, 0, 0]


def test_a_lookahead_head_beside_a_convergence_test_gives_hazards() -> None:
    """Its threshold is a probability, that of the other gates a distance; neither touches the other's rows."""
    kinds = ints(Gate.LOOKAHEAD, Gate.LOOKAHEAD, Gate.CONVERGENCE, Gate.OWN)
    model = SimpleNamespace(
        spec=SimpleNamespace(gates=(*CONVERGENCE_GATES, Gate.LOOKAHEAD)),
        convergence=lambda before, after: torch.tensor([0.0, 0.0, 0.5, 0.05]),
        lookahead_logit=lambda item: torch.tensor([4.0, -4.0, 4.0, 4.0]),
    )
    step = gate_step(cast(LoopedModel, model), kinds, torch.full((4,), 0.1), ints(1, 3, 3, 3), start(4), (), ())
    assert step.fired.tolist() == [1, 0, 0, 1]  # the first after one loop, where no distance counts yet
    again = gate_step(cast(LoopedModel, model), kinds, torch.full((4,), 0.03), ints(2, 4, 4, 4), step.hazard, (), ())
    assert again.fired.tolist() == [1, 1, 0, 0]  # 1 - (1 - 0.018)^2: hazards add up
