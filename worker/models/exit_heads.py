"""Trained exit heads that any family may use beside what its model brings: their files, and what they compute.

They say how probable it is that a token's loops may end: where a model has a gate of its own (Ouro) what that will say,
elsewhere (Huginn) that more loops will not change the token. How they are trained: training/train_gate.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from depthbatch.common.gates import Gate
from depthbatch.worker.models.family import LOOKAHEAD_GATE, PRELOOP_GATE, BuildInputs, TensorTable


@dataclass(frozen=True)
class ScalarHead:
    """Weight and bias of a head with one fp32 output a row."""

    weight: torch.Tensor  # fp32 [D]
    bias: torch.Tensor  # fp32 [1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, D] -> fp32 [N]; a row's sum does not depend on its neighbours."""
        return (x.float() * self.weight).sum(-1) + self.bias


@dataclass(frozen=True)
class DepthHead:
    """Weight and bias of a head with one logit a depth, read before the loop."""

    weight: torch.Tensor  # fp32 [R, D]
    bias: torch.Tensor  # fp32 [R]

    def __call__(self, x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        """x [N, D], threshold fp32 [N] -> int32 [N]: the first depth whose cumulated softmax reaches the threshold, the last
        one where none does."""
        cumulated = F.linear(x.float(), self.weight, self.bias).softmax(-1).cumsum(-1)
        passed = cumulated < threshold.unsqueeze(-1)  # [N, R]; the last depth needs no vote
        return passed.narrow(-1, 0, self.bias.shape[0] - 1).sum(-1, dtype=torch.int32) + 1


@dataclass(frozen=True)
class ExitHeads:
    """The heads of a model; None where it has no such file."""

    lookahead: ScalarHead | None = None
    preloop: DepthHead | None = None


def head_tables(width: int, depths: int) -> dict[str, TensorTable]:
    """Shapes of the gate files of a model of that width; ``depths`` that a pre-loop head tells apart."""
    return {
        LOOKAHEAD_GATE: TensorTable({"weight": (1, width), "bias": (1,)}),
        PRELOOP_GATE: TensorTable({"weight": (depths, width), "bias": (depths,)}),
    }


def head_gates(files: frozenset[str]) -> tuple[Gate, ...]:
    """The gates that gate files bring."""
    names: Mapping[str, Gate] = {LOOKAHEAD_GATE: Gate.LOOKAHEAD, PRELOOP_GATE: Gate.PRELOOP}
    return tuple(gate for name, gate in names.items() if name in files)


def exit_heads(inputs: BuildInputs) -> ExitHeads:
    """The heads whose files are there."""
    ahead, before = inputs.side.get(LOOKAHEAD_GATE), inputs.side.get(PRELOOP_GATE)
    return ExitHeads(
        lookahead=None if ahead is None else ScalarHead(ahead["weight"].flatten(), ahead["bias"]),
        preloop=None if before is None else DepthHead(before["weight"], before["bias"]),
    )
