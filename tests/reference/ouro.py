"""Ouro's forward pass for the oracle: batch 1, fp32, straight from the model facts; imports nothing of depthbatch."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from reference import decoding
from reference.decoding import Memory, Result, State


class OuroReference:
    """See ``decoding.Reference``. The state is (h,)."""

    boundary_layers = (0, 0)

    def __init__(self, model_dir: str | Path) -> None:
        self.model_dir = Path(model_dir)
        self.config, self.tensors = decoding.read_model(model_dir)
        self.r_max = self.config["total_ut_steps"]
        self.core_layers = self.config["num_hidden_layers"]
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        rope = self.config.get("rope_parameters") or {}
        self.rope_base = self.config.get("rope_theta") or rope["rope_theta"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return decoding.root_mean_square_norm(x, self.tensors[f"model.{name}.weight"], self.config["rms_norm_eps"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"model.{name}.weight"].T

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """x [n, heads, head_dim], feature i paired with i + head_dim / 2."""
        angles = decoding.rotary_angles(start, x.shape[0], self.head_dim, self.rope_base)
        half = self.head_dim // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * torch.cat((angles, angles), -1).cos() + rotated * torch.cat((angles, angles), -1).sin()

    def attention(self, x: torch.Tensor, layer: int, plane: int, start: int, memory: Memory) -> torch.Tensor:
        prefix = f"layers.{layer}.self_attn"
        q = self.linear(x, f"{prefix}.q_proj").reshape(-1, self.heads, self.head_dim)
        k = self.linear(x, f"{prefix}.k_proj").reshape(-1, self.kv_heads, self.head_dim)
        v = self.linear(x, f"{prefix}.v_proj").reshape(-1, self.kv_heads, self.head_dim)
        q, k = self.rotate(q, start), self.rotate(k, start)
        return self.linear(memory.attend(layer, plane, start, q, k, v), f"{prefix}.o_proj")

    def mlp(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        prefix = f"layers.{layer}.mlp"
        return self.linear(
            F.silu(self.linear(x, f"{prefix}.gate_proj")) * self.linear(x, f"{prefix}.up_proj"), f"{prefix}.down_proj"
        )

    def prelude(self, ids: Sequence[int], start: int, memory: Memory) -> State:
        return (self.tensors["model.embed_tokens.weight"][torch.as_tensor(ids).long()],)

    def core(self, state: State, plane: int, start: int, memory: Memory) -> State:
        (h,) = state
        for layer in range(self.core_layers):
            name = f"layers.{layer}"
            branch = self.attention(self.norm(h, f"{name}.input_layernorm"), layer, plane, start, memory)
            h = h + self.norm(branch, f"{name}.input_layernorm_2")
            branch = self.mlp(self.norm(h, f"{name}.post_attention_layernorm"), layer)
            h = h + self.norm(branch, f"{name}.post_attention_layernorm_2")
        return (self.norm(h, "norm"),)

    def logits(self, state: State, start: int, memory: Memory) -> torch.Tensor:
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        return state[0] @ head.T

    def gate_logits(self, state: State) -> torch.Tensor:
        return self.linear(state[0], "early_exit_gate")[:, 0] + self.tensors["model.early_exit_gate.bias"]

    def predicted_depth(self, state: State, threshold: float) -> int:
        """First depth at which the pre-loop head's probabilities, added up, reach the threshold."""
        return decoding.first_depth(self.model_dir / "preloop_gate.safetensors", state[0][-1], threshold)

    def make_decider(self, gate: str, threshold: float) -> decoding.Decider:
        if gate in ("none", "fixed", "replay", "preloop"):
            return decoding.NeverExits()
        if gate == "lookahead":
            return decoding.CumulatedHazard.of_file(self.model_dir / "lookahead_gate.safetensors", threshold)
        if gate in ("own", "delayed"):
            weight = self.tensors["model.early_exit_gate.weight"]
            return decoding.CumulatedHazard(weight, self.tensors["model.early_exit_gate.bias"], threshold)
        raise ValueError(f"ouro has no gate {gate}")


load = cache(OuroReference)


def generate(model_dir: str | Path, prompt_ids: Sequence[int], max_tokens: int, layout: str, **options: Any) -> Result:
    """``decoding.generate`` on a model directory; options are its keyword arguments."""
    with torch.no_grad():
        return decoding.generate(load(model_dir), prompt_ids, max_tokens, layout, **options)


def outputs_at_depths(model_dir: str | Path, prompt_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [R, L, V] and gate logits [R, L] after each loop of a whole prompt, one K/V a loop."""
    model = load(model_dir)
    memory = decoding.new_memory(model, "depth_indexed", model.r_max, len(prompt_ids))
    state = model.prelude(prompt_ids, 0, memory)
    logits, gates = [], []
    for plane in range(model.r_max):
        state = model.core(state, plane, 0, memory)
        logits.append(model.logits(state, 0, memory))
        gates.append(model.gate_logits(state))
    return torch.stack(logits), torch.stack(gates)
