"""Differentiable Ouro forward whose ``state_dict`` has the public checkpoint's keys.

Source: the facts of Ouro's published configuration and reference forward (docs/models.md). The module
does not know about KV caches, early exit at inference or serving.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthbatch.training.layers import (
    RMSNorm,
    causal_attention,
    init_weights,
    rope_angles,
    rotate_halves,
    split_heads,
)


@dataclass(frozen=True)
class OuroSize:
    """The fields of an Ouro ``config.json`` that fix its shapes and arithmetic."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    total_ut_steps: int = 4
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6


class OuroOutput(NamedTuple):
    """States after every loop and the raw gate output on them.

    ``embedding``: token embeddings, the input of loop 1, [B, T, D].
    ``states``: normed states after loops 1..R, [R, B, T, D].
    ``gate_logits``: the exit gate before its sigmoid, fp32, [R, B, T].
    """

    embedding: Tensor
    states: Tensor
    gate_logits: Tensor


class _Attention(nn.Module):
    def __init__(self, size: OuroSize) -> None:
        super().__init__()
        width = size.hidden_size
        self.heads = size.num_attention_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate_halves(split_heads(self.q_proj(x), self.heads), cos, sin)
        k = rotate_halves(split_heads(self.k_proj(x), self.heads), cos, sin)
        out: Tensor = self.o_proj(causal_attention(q, k, split_heads(self.v_proj(x), self.heads)))
        return out


class _Mlp(nn.Module):
    def __init__(self, size: OuroSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden_size, size.intermediate_size, bias=False)
        self.up_proj = nn.Linear(size.hidden_size, size.intermediate_size, bias=False)
        self.down_proj = nn.Linear(size.intermediate_size, size.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    """One sandwich-normed layer: each branch is normed on its input and on its output, before the add."""

    def __init__(self, size: OuroSize) -> None:
        super().__init__()
        self.self_attn = _Attention(size)
        self.mlp = _Mlp(size)
        self.input_layernorm = RMSNorm(size.hidden_size, size.rms_norm_eps)
        self.input_layernorm_2 = RMSNorm(size.hidden_size, size.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(size.hidden_size, size.rms_norm_eps)
        self.post_attention_layernorm_2 = RMSNorm(size.hidden_size, size.rms_norm_eps)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = h + self.input_layernorm_2(self.self_attn(self.input_layernorm(h), cos, sin))
        out: Tensor = h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))
        return out


class _Trunk(nn.Module):
    def __init__(self, size: OuroSize) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab_size, size.hidden_size)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(size.num_hidden_layers))
        self.norm = RMSNorm(size.hidden_size, size.rms_norm_eps)
        self.early_exit_gate = nn.Linear(size.hidden_size, 1)


class OuroTrainer(nn.Module):
    """An Ouro model for training; parameter names equal the public checkpoint keys.

    ``size``: shapes and constants.
    ``seed``: seed of the initial weights.
    """

    def __init__(self, size: OuroSize, seed: int = 0) -> None:
        super().__init__()
        self.size = size
        self.model = _Trunk(size)
        self.lm_head = nn.Linear(size.hidden_size, size.vocab_size, bias=False)
        init_weights(self, seed)
        nn.init.zeros_(self.model.early_exit_gate.weight)
        nn.init.zeros_(self.model.early_exit_gate.bias)

    def forward(self, ids: Tensor, loops: int | None = None) -> OuroOutput:
        """Run every loop over whole rows.

        ``ids``: token ids [B, T], padded on the right.
        ``loops``: loops to run, R; the trained number when None.
        """
        size = self.size
        cos, sin = rope_angles(ids.shape[1], size.hidden_size // size.num_attention_heads, size.rope_theta)
        embedding = h = self.model.embed_tokens(ids)
        states = []
        for _ in range(loops or size.total_ut_steps):
            for layer in self.model.layers:
                h = layer(h, cos, sin)
            h = self.model.norm(h)
            states.append(h)
        stacked = torch.stack(states)
        gate_logits = self.gate(stacked)
        return OuroOutput(embedding, stacked, gate_logits)

    def gate(self, states: Tensor) -> Tensor:
        """The exit gate's raw output on ``states`` [..., D], fp32, [...]."""
        gate = self.model.early_exit_gate
        return (states.float() @ gate.weight.float()[0]) + gate.bias.float()

    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits of ``states`` [..., D], fp32, [..., V]."""
        out: Tensor = self.lm_head(states).float()
        return out
