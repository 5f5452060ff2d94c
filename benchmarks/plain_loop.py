"""The eager loop one would write first for a looped model on a CPU: F.linear, SDPA, one cohort, full depth.

The yardstick of ``bench cpu engine``: same shape, same work, same threads, no engine. Two caches: ``contiguous``
(a slice of a preallocated tensor) and ``gather`` (paged blocks, gathered before each attention).
"""

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16  # tokens of a cache block


class Shape(NamedTuple):
    """An Ouro shape."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    loops: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self) -> dict[str, object]:
        """config.json of a dummy checkpoint of this shape."""
        return {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "total_ut_steps": self.loops,
            "early_exit_threshold": 1.0,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }


class Layer(NamedTuple):
    """Weights of a layer, as a checkpoint has them."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor, Tensor, Tensor]


class PlainLoop:
    """A cohort of ``batch`` sequences, token by token."""

    def __init__(self, shape: Shape, batch: int, length: int, gather: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()

        d, i, v = shape.hidden, shape.intermediate, shape.vocab
        one = torch.ones(d, dtype=torch.bfloat16)
        self.shape, self.batch, self.gather = shape, batch, gather
        self.embedding, self.head, self.norm = weight(v, d), weight(v, d), one
        self.layers = [
            Layer(
                q=weight(d, d),
                k=weight(d, d),
                v=weight(d, d),
                o=weight(d, d),
                gate=weight(i, d),
                up=weight(i, d),
                down=weight(d, i),
                norms=(one, one, one, one),
            )
            for _ in range(shape.layers)
        ]
        blocks = -(-length // BLOCK)
        size = (shape.loops * shape.layers, batch * blocks, shape.heads, BLOCK, shape.head_dim)
        self.keys, self.values = (torch.zeros(size, dtype=torch.bfloat16) for _ in range(2))
        if not gather:
            flat = (shape.loops * shape.layers, batch, shape.heads, blocks * BLOCK, shape.head_dim)
            self.keys, self.values = self.keys.view(flat), self.values.view(flat)
        self.table = torch.arange(batch * blocks).view(batch, blocks)
        steps = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(length).float(), 1e6**-steps)
        self.cos, self.sin = angles.cos(), angles.sin()

    def generate(self, prompts: Tensor, new_tokens: int) -> float:
        """Seconds for prefill and ``new_tokens`` greedy tokens a sequence; prompts int64 [B, L]."""
        with torch.inference_mode():
            start_s = time.perf_counter()
            tokens = self._forward(prompts, 0)
            for step in range(new_tokens - 1):
                tokens = self._forward(tokens[:, None], prompts.shape[1] + step)
            return time.perf_counter() - start_s

    def _forward(self, tokens: Tensor, start: int) -> Tensor:
        """tokens [B, L] at positions start.. -> next tokens [B]."""
        h = self.embedding[tokens]
        for loop in range(self.shape.loops):
            for index, layer in enumerate(self.layers):
                n1, n2, n3, n4 = layer.norms
                h = h + self._norm(self._attend(layer, loop * len(self.layers) + index, self._norm(h, n1), start), n2)
                x = self._norm(h, n3)
                h = h + self._norm(F.linear(F.silu(F.linear(x, layer.gate)) * F.linear(x, layer.up), layer.down), n4)
            h = self._norm(h, self.norm)
        return F.linear(h[:, -1], self.head).float().argmax(-1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        f = x.float()
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        cos, sin = (t[start : start + x.shape[2]] for t in (self.cos, self.sin))
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def _attend(self, layer: Layer, cache: int, x: Tensor, start: int) -> Tensor:
        batch, length, d = x.shape
        heads = (batch, length, self.shape.heads, self.shape.head_dim)
        q, k, v = (F.linear(x, w).view(heads).transpose(1, 2) for w in (layer.q, layer.k, layer.v))
        q, k = self._rotate(q, start), self._rotate(k, start)
        end = start + length
        keys, values = (self._cached(c[cache], new, start, end) for c, new in ((self.keys, k), (self.values, v)))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=length > 1)
        return F.linear(out.transpose(1, 2).reshape(batch, length, d), layer.o)

    def _cached(self, cache: Tensor, new: Tensor, start: int, end: int) -> Tensor:
        """Appends new [B, H, L, Dh] and returns the context [B, H, end, Dh]."""
        if not self.gather:
            cache[:, :, start:end] = new
            return cache[:, :, :end]
        positions = torch.arange(start, end)
        cache[self.table[:, positions // BLOCK], :, positions % BLOCK] = new.transpose(1, 2)
        taken = cache[self.table[:, : -(-end // BLOCK)]]  # [B, blocks, H, BLOCK, Dh]
        return taken.transpose(1, 2).flatten(2, 3)[:, :, :end]
