"""Huginn's forward pass for the oracle: batch 1, fp32, straight from the model facts; imports nothing of depthbatch."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F

from reference import decoding
from reference.decoding import Memory, Result, State

MASK = (1 << 64) - 1


class HuginnReference:
    """See ``decoding.Reference``. The state is (s, e).

    Args:
        model_dir: a model directory.
        state_seed: seed of the initial state; None is the zero state.
    """

    def __init__(self, model_dir: str | Path, state_seed: int | None = None) -> None:
        self.model_dir = Path(model_dir)
        self.config, self.tensors = decoding.read_model(model_dir)
        self.state_seed = state_seed
        self.r_max = min(16, self.config["mean_recurrence"])
        self.boundary_layers = (self.config["n_layers_in_prelude"], self.config["n_layers_in_coda"])
        self.core_layers = self.config["n_layers_in_recurrent_block"]
        self.width = self.config["n_embd"]
        self.heads = self.kv_heads = self.config["n_heads"]
        self.head_dim = self.width // self.heads

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return decoding.root_mean_square_norm(x, self.tensors[f"transformer.{name}.weight"], self.config["norm_eps"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"transformer.{name}.weight"].T

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """x [n, heads, head_dim], features 2i and 2i + 1 paired: a complex product."""
        angles = decoding.rotary_angles(start, x.shape[0], self.head_dim, self.config["rope_base"])
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)

    def attention(
        self, x: torch.Tensor, name: str, cache_layer: int, plane: int, start: int, memory: Memory
    ) -> torch.Tensor:
        q, k, v = (
            part.reshape(-1, self.heads, self.head_dim) for part in self.linear(x, f"{name}.attn.Wqkv").chunk(3, -1)
        )
        bias_q, bias_k = self.tensors[f"transformer.{name}.attn.qk_bias"]  # each [1, heads, head_dim]
        q, k = self.rotate(q + bias_q, start), self.rotate(k + bias_k, start)
        return self.linear(memory.attend(cache_layer, plane, start, q, k, v), f"{name}.attn.proj")

    def block(
        self, x: torch.Tensor, name: str, cache_layer: int, plane: int, start: int, memory: Memory
    ) -> torch.Tensor:
        x = self.norm(
            x + self.attention(self.norm(x, f"{name}.norm_1"), name, cache_layer, plane, start, memory),
            f"{name}.norm_2",
        )
        gate, up = self.linear(self.norm(x, f"{name}.norm_3"), f"{name}.mlp.fc").chunk(2, -1)
        return self.norm(x + self.linear(F.silu(gate) * up, f"{name}.mlp.proj"), f"{name}.norm_4")

    def prelude(self, ids: Sequence[int], start: int, memory: Memory) -> State:
        x = self.tensors["transformer.wte.weight"][torch.as_tensor(ids).long()] * self.width**0.5
        for i in range(self.boundary_layers[0]):
            x = self.block(x, f"prelude.{i}", i, 0, start, memory)
        if self.state_seed is None:
            return torch.zeros_like(x), x
        return torch.tensor([seeded_state(self.state_seed, start + i, self.width) for i in range(len(ids))]), x

    def core(self, state: State, plane: int, start: int, memory: Memory) -> State:
        s, e = state
        x = self.linear(torch.cat((s, e), -1), "adapter")
        for i in range(self.core_layers):
            x = self.block(x, f"core_block.{i}", self.boundary_layers[0] + i, plane, start, memory)
        return x, e

    def logits(self, state: State, start: int, memory: Memory) -> torch.Tensor:
        x = self.norm(state[0], "ln_f")
        for i in range(self.boundary_layers[1]):
            x = self.block(x, f"coda.{i}", self.boundary_layers[0] + self.core_layers + i, 0, start, memory)
        head = self.tensors.get("lm_head.weight", self.tensors["transformer.wte.weight"])
        return self.norm(x, "ln_f") @ head.T

    def predicted_depth(self, state: State, threshold: float) -> int:
        """First depth at which the probabilities of the pre-loop head, which reads the injection, reach the threshold."""
        return decoding.first_depth(self.model_dir / "preloop_gate.safetensors", state[1][-1], threshold)

    def make_decider(self, gate: str, threshold: float) -> decoding.Decider:
        if gate in ("none", "fixed", "replay", "preloop"):
            return decoding.NeverExits()
        if gate == "lookahead":
            return decoding.CumulatedHazard.of_file(self.model_dir / "lookahead_gate.safetensors", threshold)
        if gate in ("own", "delayed", "convergence"):
            return decoding.StateDistance(threshold)
        raise ValueError(f"huginn has no gate {gate}")


def mixed(x: int) -> int:
    """splitmix64's finaliser on unsigned 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def seeded_state(seed: int, position: int, width: int) -> list[float]:
    """Normal of standard deviation sqrt(0.4), cut at three of them, by inversion in double precision."""
    golden = 0x9E3779B97F4A7C15
    key = mixed((mixed(((seed & 0xFFFFFFFF) + golden) & MASK) + (position + 1) * golden) & MASK)
    normal = NormalDist(0.0, 0.4**0.5)
    low, high = normal.cdf(-3 * 0.4**0.5), normal.cdf(3 * 0.4**0.5)
    state = []
    for feature in range(width):
        bits = mixed((key + ((1 << 32) + feature + 1) * 0xBF58476D1CE4E5B9) & MASK)
        uniform = ((bits >> 41) + 0.5) / (1 << 23)
        state.append(normal.inv_cdf(low + uniform * (high - low)))
    return state


load = cache(HuginnReference)


def generate(
    model_dir: str | Path,
    prompt_ids: Sequence[int],
    max_tokens: int,
    layout: str,
    state_seed: int | None = None,
    **options: Any,
) -> Result:
    """``decoding.generate`` on a model directory; options are its keyword arguments."""
    with torch.no_grad():
        return decoding.generate(load(model_dir, state_seed), prompt_ids, max_tokens, layout, **options)


def outputs_at_depths(
    model_dir: str | Path, prompt_ids: Sequence[int], steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [steps, L, V] and state distances [steps, L] after each loop of a whole prompt, one K/V a loop."""
    model = load(model_dir)
    memory = decoding.new_memory(model, "depth_indexed", steps, len(prompt_ids))
    state = model.prelude(prompt_ids, 0, memory)
    logits, distances = [], []
    for plane in range(steps):
        before, state = state, model.core(state, plane, 0, memory)
        logits.append(model.logits(state, 0, memory))
        distances.append(decoding.state_distance(before, state))
    return torch.stack(logits), torch.stack(distances)
