"""Dory for the oracle: a looped nGPT, straight from the model facts; imports nothing of depthbatch."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from reference import decoding
from reference.decoding import Memory, NeverExits, Result, State


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class DoryReference:
    """See ``decoding.Reference``. The state is (s, e)."""

    def __init__(self, model_dir: str | Path) -> None:
        self.config, self.tensors = decoding.read_model(model_dir)
        config = self.config
        self.r_max = config["n_recurrent_loops"]
        first, self.core_layers, last = (config[f"n_{part}_layers"] // 2 for part in ("input", "recurrent", "output"))
        self.boundary_layers = (first, last)
        self.kv_heads, self.head_dim = config["num_key_value_heads"], config["head_dim"]
        self.width, self.sigma = config["hidden_size"], config["initializer_range"]
        self.kinds = config["layer_types"][::2]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"backbone.layers.{name}.weight"].T

    def scale(self, name: str) -> torch.Tensor:
        return self.tensors[f"backbone.layers.{name}"]

    def towards(self, x: torch.Tensor, branch: torch.Tensor, name: str) -> torch.Tensor:
        """Part of the way from the stream to a branch's result, both of length 1."""
        step = (self.scale(name) * self.config["ngpt_alpha_init"] / self.sigma).abs()
        return x + step * (unit(branch) - x)

    def block(self, x: torch.Tensor, number: int, plane: int, start: int, memory: Memory) -> torch.Tensor:
        attention, mlp, kind = f"{2 * number}", f"{2 * number + 1}", self.kinds[number]
        x = unit(x)
        q, k, v = (
            self.linear(x, f"{attention}.mixer.{part}_proj").reshape(len(x), -1, self.head_dim) for part in "qkv"
        )
        base = self.config["rope_parameters"][kind]["rope_theta"]
        angles = decoding.rotary_angles(start, len(x), self.head_dim, base)
        q, k = (decoding.rotate_halves(unit(part), angles) for part in (q, k))
        q = q * (self.scale(f"{attention}.mixer.sqk") * self.head_dim**0.5 / self.sigma).square().view(
            -1, self.head_dim
        )
        window = self.config["sliding_window"] if kind == "sliding_attention" else None
        mixed = memory.attend(number, plane, start, q, k, v, window)
        gate = (self.scale(f"{attention}.mixer.s_gate") * self.width**0.25 / self.sigma).square()
        mixed = unit(mixed * torch.sigmoid(self.linear(x, f"{attention}.mixer.g_proj") * gate))
        x = unit(self.towards(x, self.linear(mixed, f"{attention}.mixer.o_proj"), f"{attention}.attn_alpha"))
        gate, up = (
            self.linear(x, f"{mlp}.mixer.{part}_proj") * self.scale(f"{mlp}.mixer.suv_{part}") * self.width**0.5
            for part in ("gate", "up")
        )
        branch = self.linear(unit(F.silu(gate) * up), f"{mlp}.mixer.down_proj")
        return self.towards(x, branch, f"{mlp}.mlp_alpha")

    def prelude(self, ids: Sequence[int], start: int, memory: Memory) -> State:
        x = unit(self.tensors["backbone.embeddings.weight"][torch.as_tensor(ids).long()])
        for number in range(self.boundary_layers[0]):
            x = self.block(x, number, 0, start, memory)
        return unit(x), unit(x)

    def core(self, state: State, plane: int, start: int, memory: Memory) -> State:
        x = unit(state[0]) + state[1]
        for number in range(self.boundary_layers[0], self.boundary_layers[0] + self.core_layers):
            x = self.block(x, number, plane, start, memory)
        return x, state[1]

    def logits(self, state: State, start: int, memory: Memory) -> torch.Tensor:
        x = state[0]
        for number in range(self.boundary_layers[0] + self.core_layers, len(self.kinds)):
            x = self.block(x, number, 0, start, memory)
        return unit(x) @ self.tensors["lm_head.weight"].T * self.tensors["lm_head.logit_scale"] / self.sigma

    def predicted_depth(self, state: State, threshold: float) -> int:
        raise ValueError("dory has no pre-loop gate")

    def make_decider(self, gate: str, threshold: float) -> decoding.Decider:
        return NeverExits()


load = cache(DoryReference)


def generate(model_dir: str | Path, prompt_ids: Sequence[int], max_tokens: int, layout: str, **options: Any) -> Result:
    """``decoding.generate`` on a model directory; options are its keyword arguments."""
    with torch.no_grad():
        return decoding.generate(load(model_dir), prompt_ids, max_tokens, layout, **options)
