"""Exit decisions of a core step, on the device, in fp32 (architecture, section 6; models.md).

Says whether a row's gate fired at this loop. When that takes effect, and the bounds min_loops and
max_loops, are the scheduler's. Knows nothing of slots or messages.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.common.gates import Gate
from depthbatch.worker.models.interface import LoopedModel, WorkItem


class Hazard(NamedTuple):
    """The exit distribution so far: S_t and p_1 + .. + p_t, each fp32 [N]."""

    survival: Tensor
    cumulated: Tensor


def accumulate_hazard(before: Hazard, logit: Tensor) -> Hazard:
    """One loop of l_t = sigmoid(logit), p_t = l_t S_{t-1}, S_t = S_{t-1} (1 - l_t); logit fp32 [N].

    fp32 because in bf16 the sum rounds to 1 and a threshold of 1 exits early (models.md, section 1).
    """
    hazard = torch.sigmoid(logit.float())
    return Hazard(before.survival * (1.0 - hazard), before.cumulated + hazard * before.survival)


def hazard_fires(state: Hazard, threshold: Tensor) -> Tensor:
    """Cumulated probability reaches the threshold, inclusive; a threshold of 1 or more never fires. bool [N]."""
    return (state.cumulated >= threshold) & (threshold < 1.0)


def convergence_fires(distance: Tensor, threshold: Tensor, loops: Tensor) -> Tensor:
    """Distance of consecutive states strictly under the threshold, from loop 2 on: s_0 is no state of the loop. bool [N]."""
    return (distance < threshold) & (loops >= 2)


class GateStep(NamedTuple):
    """What a core step does to the gates of its rows."""

    fired: Tensor  # uint8 [N]
    hazard: Hazard


def gate_step(
    model: LoopedModel,
    kind: Tensor,
    threshold: Tensor,
    loops: Tensor,
    hazard: Hazard,
    before: WorkItem,
    after: WorkItem,
) -> GateStep:
    """Which rows fire that ran ``loops`` [N] and went from item ``before`` to ``after``; kind int32 [N] of Gate.

    A model has either a hazard gate or a convergence test (OWN and DELAYED use either, CONVERGENCE the latter), or no gate;
    a trained LOOKAHEAD head gives the hazards of the loops to come. Rows whose gate does not decide on the device never fire.
    """
    gates = model.spec.gates
    own, ahead = (kind == Gate.OWN) | (kind == Gate.DELAYED), kind == Gate.LOOKAHEAD
    by_hazard, fires, logit = own, torch.zeros_like(own), None
    if Gate.CONVERGENCE in gates:
        near = convergence_fires(model.convergence(before, after), threshold, loops)
        fires = near & (own | (kind == Gate.CONVERGENCE))
        by_hazard = torch.zeros_like(own)
    elif Gate.OWN in gates:
        logit = model.gate_logit(after)
    if Gate.LOOKAHEAD in gates:
        foreseen = model.lookahead_logit(after)
        logit = foreseen if logit is None else torch.where(ahead, foreseen, logit)
        by_hazard = by_hazard | ahead
    if logit is not None:
        hazard = accumulate_hazard(hazard, logit)
        fires = fires | (hazard_fires(hazard, threshold) & by_hazard)
    return GateStep(fires.to(torch.uint8), hazard)
