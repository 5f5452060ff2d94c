"""Nanbeige for the oracle: a Llama whose layers and final norm are run several times; imports nothing of depthbatch."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from reference import decoding
from reference.decoding import Memory, NeverExits, Result, State


class NanbeigeReference:
    """See ``decoding.Reference``. The state is (h,)."""

    def __init__(self, model_dir: str | Path) -> None:
        self.config, self.tensors = decoding.read_model(model_dir)
        self.r_max = self.config["num_loops"]
        self.boundary_layers = (0, 0)
        self.core_layers = self.config["num_hidden_layers"]
        self.kv_heads, self.head_dim = self.config["num_key_value_heads"], self.config["head_dim"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return decoding.root_mean_square_norm(x, self.tensors[f"model.{name}.weight"], self.config["rms_norm_eps"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"model.{name}.weight"].T

    def prelude(self, ids: Sequence[int], start: int, memory: Memory) -> State:
        return (self.tensors["model.embed_tokens.weight"][torch.as_tensor(ids).long()],)

    def core(self, state: State, plane: int, start: int, memory: Memory) -> State:
        x = state[0]
        angles = decoding.rotary_angles(start, len(x), self.head_dim, float(self.config["rope_theta"]))
        for i in range(self.core_layers):
            u = self.norm(x, f"layers.{i}.input_layernorm")
            q, k, v = (
                self.linear(u, f"layers.{i}.self_attn.{part}_proj").reshape(len(x), -1, self.head_dim) for part in "qkv"
            )
            q, k = (decoding.rotate_halves(part, angles) for part in (q, k))
            x = x + self.linear(memory.attend(i, plane, start, q, k, v), f"layers.{i}.self_attn.o_proj")
            u = self.norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = (self.linear(u, f"layers.{i}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, f"layers.{i}.mlp.down_proj")
        return (self.norm(x, "norm"),)

    def logits(self, state: State, start: int, memory: Memory) -> torch.Tensor:
        return state[0] @ self.tensors["lm_head.weight"].T

    def predicted_depth(self, state: State, threshold: float) -> int:
        raise ValueError("nanbeige has no pre-loop gate")

    def make_decider(self, gate: str, threshold: float) -> decoding.Decider:
        return NeverExits()


load = cache(NanbeigeReference)


def generate(model_dir: str | Path, prompt_ids: Sequence[int], max_tokens: int, layout: str, **options: Any) -> Result:
    """``decoding.generate`` on a model directory; options are its keyword arguments."""
    with torch.no_grad():
        return decoding.generate(load(model_dir), prompt_ids, max_tokens, layout, **options)
