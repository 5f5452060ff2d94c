"""Prefill as captured pieces between its attentions (paper, A.5, after SGLang).

What a block does between two attentions depends on how many tokens there are, not on whose they are, so it is captured
once a token count; attention, which depends on how the tokens are divided among sequences, runs operator by operator::

    copy in | qkv 0 | attention 0 | rest of 0, qkv 1 | attention 1 | ... | rest of n - 1, final norm | copy out

A piece is the same at every loop. Its tensors are one static set for all pieces, sized for the most tokens; smaller
counts use the first rows. Rows past the real tokens hold what was there before: no operator of a piece mixes rows, and
attention never sees them. A prefill of more tokens keeps the device busy by itself and runs uncaptured.

Knows block stacks and attention contexts; nothing of models, slots or messages.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.worker.attention.backend import (
    AttentionBackend,
    CacheGeometry,
    PrefillRows,
    split_and_rotate,
)
from depthbatch.worker.layers.blocks import BlockStack
from depthbatch.worker.layers.rotary import Rotation
from depthbatch.worker.runner.accelerator import Work
from depthbatch.worker.runner.stages import PrefillAttention

# At most a third of the rows is padding where rows cost time; above, launching takes less time than computing.
TOKEN_COUNTS = (64, 128, 192, 256, 384, 512, 768, 1024)


def token_counts(max_tokens: int) -> tuple[int, ...]:
    """Captured token counts of prefills of up to ``max_tokens``, ascending."""
    below = tuple(count for count in TOKEN_COUNTS if count < max_tokens)
    return below if len(below) == len(TOKEN_COUNTS) else (*below, max_tokens)


class SeenStack(NamedTuple):
    """A stack as a model runs it."""

    stack: BlockStack
    interleaved: bool


class NotingAttention(PrefillAttention):
    """Runs as ever, and notes which stacks a prefill goes through."""

    def __init__(self, backend: AttentionBackend, rows: PrefillRows, seen: list[SeenStack]) -> None:
        super().__init__(backend, rows)
        self._seen = seen

    def run_stack(self, stack: BlockStack, x: Tensor, rotation: Rotation) -> Tensor | None:
        if all(known.stack is not stack for known in self._seen):
            self._seen.append(SeenStack(stack, rotation.interleaved))
        return None


class PiecewiseAttention(PrefillAttention):
    """Attention context that runs whole stacks piece by piece."""

    def __init__(self, backend: AttentionBackend, rows: PrefillRows, pieces: "PiecewisePrefill") -> None:
        super().__init__(backend, rows)
        self._pieces = pieces

    def run_stack(self, stack: BlockStack, x: Tensor, rotation: Rotation) -> Tensor | None:
        return self._pieces.run(stack, x, rotation, self)


class PieceBuffers:
    """What goes into and comes out of pieces, for up to T tokens."""

    def __init__(self, tokens: int, width: int, geometry: CacheGeometry) -> None:
        def zeros(*shape: int, dtype: torch.dtype = geometry.dtype) -> Tensor:
            return torch.zeros(tokens, *shape, dtype=dtype, device=geometry.device)

        heads, kv_heads, head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        self.x = zeros(width)  # [T, D] the stream
        self.q, self.k, self.v = zeros(heads, head_dim), zeros(kv_heads, head_dim), zeros(kv_heads, head_dim)
        self.attended = zeros(heads * head_dim)  # [T, H Dh]
        self.cos, self.sin = (zeros(head_dim // 2, dtype=torch.float32) for _ in range(2))


class PiecewisePrefill:
    """The pieces of every stack of a model at every token count.

    ``trial`` runs one small prefill under the context it is given, so that it shows which stacks there are; ``capture``
    is the accelerator's.
    """

    def __init__(
        self,
        trial: Callable[[Callable[[AttentionBackend, PrefillRows], PrefillAttention]], object],
        geometry: CacheGeometry,
        width: int,
        max_tokens: int,
        capture: Callable[[Work], Work],
    ) -> None:
        seen: list[SeenStack] = []
        trial(partial(NotingAttention, seen=seen))
        self.counts = token_counts(max_tokens)
        self._geometry = geometry
        self._buffers = PieceBuffers(self.counts[-1], width, geometry)
        self._stacks = tuple(known.stack for known in seen)  # alive as long as their ids are keys
        self._pieces = {
            (id(known.stack), count): [
                capture(partial(self._piece, known, index, count)) for index in range(len(known.stack.blocks) + 1)
            ]
            for count in reversed(self.counts)
            for known in seen
        }

    def context(self, backend: AttentionBackend, rows: PrefillRows) -> PrefillAttention:
        """The attention context of a prefill."""
        return PiecewiseAttention(backend, rows, self)

    def run(self, stack: BlockStack, x: Tensor, rotation: Rotation, attend: PrefillAttention) -> Tensor | None:
        """The stack on x [N, D] -> [N, D]; None for more tokens than are captured. The device runs one at a time."""
        tokens, buffers = len(x), self._buffers
        if tokens > self.counts[-1]:
            return None
        *before_attention, last = self._pieces[id(stack), self.counts[bisect_left(self.counts, tokens)]]
        for static, value in ((buffers.x, x), (buffers.cos, rotation.cos), (buffers.sin, rotation.sin)):
            static[:tokens].copy_(value)
        q, k, v = buffers.q[:tokens], buffers.k[:tokens], buffers.v[:tokens]
        for layer, piece in enumerate(before_attention, stack.first_layer):
            piece()
            buffers.attended[:tokens].copy_(attend(layer, q, k, v))
        last()
        return buffers.x[:tokens].clone()  # the next stack overwrites it

    def _piece(self, known: SeenStack, index: int, tokens: int) -> None:
        """What follows the attention of block index - 1 up to that of block ``index``, on the first ``tokens`` rows."""
        stack, buffers = known.stack, self._buffers
        x = buffers.x[:tokens]
        if index > 0:
            x = stack.after_attention(stack.blocks[index - 1], x, buffers.attended[:tokens])
        if index == len(stack.blocks):
            x = stack.ended(x)
        if index > 0:
            buffers.x[:tokens].copy_(x)
        if index < len(stack.blocks):
            block = stack.blocks[index]
            rotation = Rotation(known.interleaved, buffers.cos[:tokens], buffers.sin[:tokens])
            heads = split_and_rotate(stack.qkv(block, x), self._geometry, rotation, block.qk_bias)
            for static, value in zip((buffers.q, buffers.k, buffers.v), heads, strict=True):
                static[:tokens].copy_(value)
