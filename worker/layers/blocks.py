"""A run of transformer blocks as data: what every looped model's prelude, core and coda are made of.

The plain loop here is the meaning; an attention backend may run the whole stack in one pass with the same result.
Knows nothing of slots, cache blocks or loops.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from depthbatch.worker.layers.linear import GatedLinear, Linear
from depthbatch.worker.layers.ops import add_rms_norm, rms_norm, rms_norm_add
from depthbatch.worker.layers.rotary import Rotation


class AttentionContext(Protocol):
    """The attention of the stage that is running, bound to its rows.

    Writes k, v of the N rows to the cache of ``layer`` at their positions (in the plane their loop uses), then attends
    causally to everything the row's sequence holds up to its own position (in a layer with a window, to the last of it),
    scaled by head_dim ** -0.5.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, Dh], k and v [N, Hkv, Dh], rotated already -> [N, H * Dh]."""
        ...

    def from_qkv(self, layer: int, qkv: Tensor, rotation: Rotation, qk_bias: Tensor | None = None) -> Tensor:
        """The same from one projection qkv [N, (H + 2 Hkv) * Dh], not rotated yet: the fast path on the CPU.

        qk_bias [(H + Hkv) * Dh] is added to q and k before they are rotated.
        """
        ...

    def run_stack(self, stack: "BlockStack", x: Tensor, rotation: Rotation) -> Tensor | None:
        """All blocks of ``stack`` on x [N, D] in one pass; None where the backend has none (BlockStack then loops)."""
        ...


@dataclass(frozen=True)
class Block:
    """Attention and a gated MLP; each may have a norm on its input and one on its output."""

    qkv: Linear  # D -> (H + 2 Hkv) Dh
    out: Linear  # H Dh -> D
    gate_up: GatedLinear  # D -> I
    down: Linear  # I -> D
    norm_in: Tensor | None = None  # [D]
    norm_out: Tensor | None = None  # [D]
    norm_mlp_in: Tensor | None = None  # [D]
    norm_mlp_out: Tensor | None = None  # [D]
    qk_bias: Tensor | None = None  # [(H + Hkv) Dh], added to q and k before the rotation
    q_norm: Tensor | None = None  # before the rotation: [H Dh] over the whole of q, or [Dh] over each of its heads
    k_norm: Tensor | None = None  # [Hkv Dh] or [Dh], likewise


@dataclass(frozen=True, eq=False)
class BlockStack:
    """Blocks that run one after the other on cache layers first_layer, first_layer + 1, ...

    norm_on_sum: a branch joins the stream as x = norm(x + branch) (Huginn), else as x = x + norm(branch) (Ouro).
    final_norm [D] is applied to the result, if given.
    """

    blocks: tuple[Block, ...]
    first_layer: int
    norm_on_sum: bool
    eps: float
    final_norm: Tensor | None = None

    def __call__(self, x: Tensor, rotation: Rotation, attend: AttentionContext) -> Tensor:
        """x [N, D] -> [N, D]. A backend knows BlockStack itself; a subclass runs as it says, operator by operator."""
        fused = attend.run_stack(self, x, rotation) if self.blocks and type(self) is BlockStack else None
        return self.plain(x, rotation, attend) if fused is None else fused

    def plain(self, x: Tensor, rotation: Rotation, attend: AttentionContext) -> Tensor:
        """The same, operator by operator."""
        for layer, block in enumerate(self.blocks, self.first_layer):
            x = self.after_attention(block, x, attend.from_qkv(layer, self.qkv(block, x), rotation, block.qk_bias))
        return self.ended(x)

    def qkv(self, block: Block, x: Tensor) -> Tensor:
        """What a block's attention starts from: x [N, D] -> [N, (H + 2 Hkv) Dh], not rotated."""
        qkv = block.qkv(self._normed(x, block.norm_in))
        if block.q_norm is None and block.k_norm is None:
            return qkv
        q_width = block.out.in_features
        kv_width = (block.qkv.out_features - q_width) // 2
        q, k, v = torch.split(qkv, [q_width, kv_width, kv_width], -1)
        return torch.cat((self._normed_heads(q, block.q_norm), self._normed_heads(k, block.k_norm), v), -1)

    def after_attention(self, block: Block, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of a block: its input x [N, D], attended [N, H Dh] -> [N, D]."""
        x = self._join(x, block.out(attended), block.norm_out)
        return self._join(x, block.down(block.gate_up(self._normed(x, block.norm_mlp_in))), block.norm_mlp_out)

    def ended(self, x: Tensor) -> Tensor:
        """The last block's output [N, D] as the stack gives it."""
        return self._normed(x, self.final_norm)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else rms_norm(x, norm, self.eps)

    def _normed_heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """x [N, heads * Dh], every len(norm) features of it normed by themselves."""
        if norm is None:
            return x
        groups = x.contiguous().view(x.numel() // len(norm), len(norm))
        return rms_norm(groups, norm, self.eps).view(x.shape)

    def _join(self, x: Tensor, branch: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None:
            return x + branch
        return add_rms_norm(x, branch, norm, self.eps) if self.norm_on_sum else rms_norm_add(x, branch, norm, self.eps)
