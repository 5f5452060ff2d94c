"""Retrofitted recurrence for the oracle: Huginn's loop over Llama's or OLMo's blocks; imports nothing of depthbatch."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from reference import decoding
from reference.decoding import Memory, Result, State
from reference.huginn import HuginnReference


class RetrofittedReference(HuginnReference):
    """See ``decoding.Reference``. The state is (s, e), from zero."""

    def __init__(self, model_dir: str | Path) -> None:
        super().__init__(model_dir)
        self.kv_heads, self.head_dim = self.config["num_key_value_heads"], self.config["head_dim"]
        self.is_olmo = "transformer.core_block.0.attn.q_norm.weight" in self.tensors

    def frequencies(self) -> torch.Tensor:
        """[head_dim / 2]; llama3: what turns often over the trained context keeps its speed, the rest is slowed."""
        plain = [self.config["rope_theta"] ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)]
        scaling = self.config.get("rope_scaling")
        if not scaling:
            return torch.tensor(plain)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        slowed = []
        for frequency in plain:
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            blend = min(1.0, max(0.0, (turns - low) / (high - low)))
            slowed.append(frequency * (blend + (1 - blend) / scaling["factor"]))
        return torch.tensor(slowed)

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """x [n, heads, head_dim], feature i paired with i + head_dim / 2."""
        angles = (torch.arange(start, start + len(x)).float()[:, None] * self.frequencies())[:, None, :]
        return decoding.rotate_halves(x, angles)

    def attention(
        self, x: torch.Tensor, name: str, cache_layer: int, plane: int, start: int, memory: Memory
    ) -> torch.Tensor:
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = self.linear(x, f"{name}.attn.Wqkv").split((width, kv_width, kv_width), -1)
        if self.is_olmo:
            q, k = self.norm(q, f"{name}.attn.q_norm"), self.norm(k, f"{name}.attn.k_norm")
        q, k, v = (part.reshape(len(x), -1, self.head_dim) for part in (q, k, v))
        q, k = self.rotate(q, start), self.rotate(k, start)
        return self.linear(memory.attend(cache_layer, plane, start, q, k, v), f"{name}.attn.proj")

    def block(
        self, x: torch.Tensor, name: str, cache_layer: int, plane: int, start: int, memory: Memory
    ) -> torch.Tensor:
        def mlp(u: torch.Tensor) -> torch.Tensor:
            gate, up = self.linear(u, f"{name}.mlp.fc").chunk(2, -1)
            return self.linear(F.silu(gate) * up, f"{name}.mlp.proj")

        def attend(u: torch.Tensor) -> torch.Tensor:
            return self.attention(u, name, cache_layer, plane, start, memory)

        if self.is_olmo:
            x = x + self.norm(attend(x), f"{name}.norm_1")
            return x + self.norm(mlp(x), f"{name}.norm_2")
        x = x + attend(self.norm(x, f"{name}.norm_1"))
        return x + mlp(self.norm(x, f"{name}.norm_2"))

    def prelude(self, ids: Sequence[int], start: int, memory: Memory) -> State:
        x = self.tensors["transformer.wte.weight"][torch.as_tensor(ids).long()]
        x = x * self.config["init_values"]["embed_scale"]
        for i in range(self.boundary_layers[0]):
            x = self.block(x, f"prelude.{i}", i, 0, start, memory)
        return torch.zeros_like(x), x

    def logits(self, state: State, start: int, memory: Memory) -> torch.Tensor:
        x = state[0]
        for i in range(self.boundary_layers[1]):
            x = self.block(x, f"coda.{i}", self.boundary_layers[0] + self.core_layers + i, 0, start, memory)
        return self.norm(x, "ln_f") @ self.tensors["lm_head.weight"].T


load = cache(RetrofittedReference)


def generate(model_dir: str | Path, prompt_ids: Sequence[int], max_tokens: int, layout: str, **options: Any) -> Result:
    """``decoding.generate`` on a model directory; options are its keyword arguments."""
    with torch.no_grad():
        return decoding.generate(load(model_dir), prompt_ids, max_tokens, layout, **options)
