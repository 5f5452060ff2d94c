"""KV layouts as tensor arithmetic: the planes that rows use, and those that an early exit must fill.

The same functions as ``common.kv_layout.KVLayout``, for rows whose loops lie on the device. Knows nothing of blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.common.kv_layout import KVLayout


def planes_of(layout: KVLayout, loops: Tensor, r_max: int, out: Tensor) -> Tensor:
    """Plane that each row writes and reads at its loop; loops, out int32 [N]. Padding rows (loop 0) get plane 0."""
    return torch.sub(loops, 1, out=out).clamp_(0, layout.num_planes(r_max) - 1)


class PlaneFill(NamedTuple):
    """Copies that exits ask for: plane source -> planes first .. end - 1, each int32 [N]; first >= end: none."""

    source: Tensor
    first: Tensor
    end: Tensor


def needs_fill(layout: KVLayout, r_max: int) -> bool:
    """True when a token that exits early leaves planes behind that later tokens read."""
    return any(len(layout.planes_to_fill(loop, r_max)) for loop in range(1, r_max + 1))


def fill_of(layout: KVLayout, exit_loops: Tensor, r_max: int) -> PlaneFill:
    """Planes to fill for tokens that exit after ``exit_loops`` int32 [N]. Padding rows (loop 0) fill nothing.

    ``last_exited`` fills everything above the last plane written; ``first_then_shared`` fills plane 1 after an exit at
    loop 1, which is the same interval: plane(1) + 1 up to the number of planes.
    """
    planes = layout.num_planes(r_max)
    source = (exit_loops - 1).clamp(0, planes - 1)
    return PlaneFill(source, source + 1, torch.where(exit_loops > 0, planes, 0).to(torch.int32))
