"""An AttentionContext as plain as can be: contiguous K/V a sequence and plane, one Python loop over rows."""

from typing import NamedTuple

import torch

from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.attention.backend import CacheGeometry, split_and_rotate
from depthbatch.worker.layers.blocks import BlockStack
from depthbatch.worker.layers.rotary import Rotation
from depthbatch.worker.models.interface import ModelSpec


class Row(NamedTuple):
    """Where a row of the batch belongs."""

    sequence: int
    position: int
    loop: int


class ContiguousMemory:
    """K/V of several sequences, [planes, sequences, capacity, Hkv, Dh] a layer; NaN until written."""

    def __init__(self, spec: ModelSpec, layout: KVLayout, sequences: int, capacity: int) -> None:
        self.spec, self.layout = spec, layout
        self.planes = spec.planes_per_layer(layout)
        shapes = [(n, sequences, capacity, spec.num_kv_heads, spec.head_dim) for n in self.planes]
        self.keys = [torch.full(shape, torch.nan, dtype=spec.dtype) for shape in shapes]
        self.values = [torch.full(shape, torch.nan, dtype=spec.dtype) for shape in shapes]

    def rows(self, rows: list[Row]) -> "ContiguousAttention":
        return ContiguousAttention(self, rows)

    def fill(self, row: Row) -> None:
        """The copies that a layout wants when the row's token exits at its loop."""
        source = self.layout.plane(row.loop)
        for layer, planes in enumerate(self.planes):
            for plane in self.layout.planes_to_fill(row.loop, self.spec.r_max) if planes > 1 else ():
                for memory in (self.keys[layer], self.values[layer]):
                    memory[plane, row.sequence, row.position] = memory[source, row.sequence, row.position]


class ContiguousAttention:
    """The context of one stage call."""

    def __init__(self, memory: ContiguousMemory, rows: list[Row]) -> None:
        self.memory, self.rows = memory, rows
        spec = memory.spec
        self.geometry = CacheGeometry(
            1, 1, spec.num_heads, spec.num_kv_heads, spec.head_dim, (), spec.dtype, torch.device("cpu")
        )

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.memory.keys[layer], self.memory.values[layer]
        single = self.memory.planes[layer] == 1
        planes = [0 if single else self.memory.layout.plane(row.loop) for row in self.rows]
        for i, (row, plane) in enumerate(zip(self.rows, planes, strict=True)):
            keys[plane, row.sequence, row.position] = k[i]
            values[plane, row.sequence, row.position] = v[i]
        out = []
        for i, (row, plane) in enumerate(zip(self.rows, planes, strict=True)):
            windows = self.memory.spec.windows
            first = max(0, row.position + 1 - windows[layer]) if windows and windows[layer] else 0
            context = (plane, row.sequence, slice(first, row.position + 1))
            out.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q[i][None, :, None],
                    keys[context].transpose(0, 1)[None],
                    values[context].transpose(0, 1)[None],
                    enable_gqa=True,
                ).flatten()
            )
        return torch.stack(out)

    def from_qkv(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self(layer, *split_and_rotate(qkv, self.geometry, rotation, qk_bias))

    def run_stack(self, stack: BlockStack, x: torch.Tensor, rotation: Rotation) -> None:
        """None: the stack runs its plain loop over this context."""
