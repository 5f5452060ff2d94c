"""The oracle's decoding loop: one sequence, one token at a time, fp32, no paging and no batching.

Written from the design documents, independently of the engine: it imports nothing of depthbatch. It models what a KV
layout means (which K/V a token sees after early exits and at prefill chunk borders), every exit gate and the loop
limits. ``ouro`` and ``huginn`` beside it hold the forward passes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

State = tuple[torch.Tensor, ...]


@dataclass
class Result:
    """What one request yields."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # of the first token, which comes from prefill: r_max
    logits: list[torch.Tensor] = field(default_factory=list)  # fp32 [V] a token


class Memory:
    """K/V of one sequence: [planes, capacity, heads, head_dim] a layer; planes hold zeros until written."""

    def __init__(self, planes: Sequence[int], capacity: int, kv_heads: int, head_dim: int) -> None:
        self.planes = tuple(planes)
        self.keys = [torch.zeros(n, capacity, kv_heads, head_dim) for n in planes]
        self.values = [torch.zeros(n, capacity, kv_heads, head_dim) for n in planes]

    def attend(
        self,
        layer: int,
        plane: int,
        start: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        """Writes k, v [n, kv_heads, head_dim] from position ``start`` on; q [n, heads, head_dim] -> [n, heads * head_dim].
        A position sees the last ``window`` ones, its own included."""
        if self.planes[layer] == 1:
            plane = 0
        count, heads, head_dim = q.shape
        end = start + count
        self.keys[layer][plane, start:end] = k
        self.values[layer][plane, start:end] = v
        group = heads // k.shape[1]
        keys = self.keys[layer][plane, :end].repeat_interleave(group, 1)  # query head h reads KV head h // group
        values = self.values[layer][plane, :end].repeat_interleave(group, 1)
        scores = torch.einsum("nhd,mhd->hnm", q, keys) / head_dim**0.5
        behind = torch.arange(start, end)[:, None] - torch.arange(end)[None, :]  # [n, m]
        seen = (behind >= 0) & (behind < (window or end))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", weights, values).reshape(count, heads * head_dim)

    def copy(self, position: int, source: int, targets: range) -> None:
        """One position's K/V from plane ``source`` to the planes ``targets`` in every layer that has several."""
        for layer, planes in enumerate(self.planes):
            for target in targets if planes > 1 else ():
                self.keys[layer][target, position] = self.keys[layer][source, position]
                self.values[layer][target, position] = self.values[layer][source, position]


class Reference(Protocol):
    """A forward pass over consecutive positions of one sequence."""

    r_max: int
    boundary_layers: tuple[int, int]  # attention layers before and after the looped ones
    core_layers: int
    kv_heads: int
    head_dim: int

    def prelude(self, ids: Sequence[int], start: int, memory: Memory) -> State: ...

    def core(self, state: State, plane: int, start: int, memory: Memory) -> State: ...

    def logits(self, state: State, start: int, memory: Memory) -> torch.Tensor: ...

    def predicted_depth(self, state: State, threshold: float) -> int: ...

    def make_decider(self, gate: str, threshold: float) -> "Decider": ...


class Decider(Protocol):
    """The exit gate of one token: told each loop's states in turn, says whether it fires."""

    def fires(self, loop: int, before: State, after: State) -> bool: ...


class CumulatedHazard:
    """Fires when p_1 + .. + p_t reaches the threshold, all in fp32; never when the threshold is 1 or more."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, threshold: float) -> None:
        self.weight, self.bias = weight, bias
        self.threshold = torch.tensor(threshold)
        self.survival, self.cumulated = torch.tensor(1.0), torch.tensor(0.0)

    @classmethod
    def of_file(cls, path: Path, threshold: float) -> "CumulatedHazard":
        head = load_file(path)
        return cls(head["weight"].float(), head["bias"].float(), threshold)

    def fires(self, loop: int, before: State, after: State) -> bool:
        hazard = torch.sigmoid(after[0][-1] @ self.weight.flatten() + self.bias[0])
        self.cumulated = self.cumulated + hazard * self.survival
        self.survival = self.survival * (1 - hazard)
        return bool(self.threshold < 1 and self.cumulated >= self.threshold)


class StateDistance:
    """Fires when |s_r - s_{r-1}| / |s_r| is under the threshold; the distance to the initial state does not count."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def fires(self, loop: int, before: State, after: State) -> bool:
        return loop >= 2 and state_distance(before, after)[-1].item() < self.threshold


def first_depth(path: Path, x: torch.Tensor, threshold: float) -> int:
    """The first depth at which the probabilities of a pre-loop head on x [D], added up, reach the threshold."""
    head = load_file(path)
    cumulated = (head["weight"].float() @ x + head["bias"].float()).softmax(0).cumsum(0).tolist()
    reached = [depth for depth, total in enumerate(cumulated, 1) if total >= threshold]
    return reached[0] if reached and threshold < 1 else len(cumulated)


def state_distance(before: State, after: State) -> torch.Tensor:
    """|s_r - s_{r-1}| / |s_r| a position."""
    return (after[0] - before[0]).norm(dim=-1) / after[0].norm(dim=-1).clamp(min=1e-12)


def plane_count(layout: str, r_max: int) -> int:
    return {"single": 1, "first_then_shared": min(2, r_max), "last_exited": r_max, "depth_indexed": r_max}[layout]


def plane_of(layout: str, loop: int) -> int:
    return {"single": 0, "first_then_shared": 0 if loop == 1 else 1}.get(layout, loop - 1)


def planes_left_empty(layout: str, depth: int, r_max: int) -> range:
    """Planes a token that exits at ``depth`` never wrote and that deeper tokens read."""
    if layout == "last_exited":
        return range(depth, r_max)
    if layout == "first_then_shared" and depth == 1 and r_max > 1:
        return range(1, 2)
    return range(0)


def new_memory(model: Reference, layout: str, r_max: int, capacity: int) -> Memory:
    first, last = model.boundary_layers
    planes = [1] * first + [plane_count(layout, r_max)] * model.core_layers + [1] * last
    return Memory(planes, capacity, model.kv_heads, model.head_dim)


def prefill(
    model: Reference,
    ids: Sequence[int],
    layout: str,
    r_max: int,
    chunk: int | Sequence[int] | None,
    memory: Memory,
) -> torch.Tensor:
    """Runs a prompt at full depth in chunks; logits [V] of its last position.

    A chunk sees earlier chunks through the planes as they were left: under ``single`` each loop of the second chunk
    sees the first chunk's last loop, within the chunk it sees its own loop.
    """
    size = chunk or len(ids)
    lengths = [size] * -(-len(ids) // size) if isinstance(size, int) else size
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        state = model.prelude(ids[start : start + length], start, memory)
        for loop in range(1, r_max + 1):
            state = model.core(state, plane_of(layout, loop), start, memory)
        logits = model.logits(state, start, memory)
    return logits[-1]


def generate(
    model: Reference,
    prompt_ids: Sequence[int],
    max_tokens: int,
    layout: str,
    gate: str = "none",
    threshold: float = 1.0,
    min_loops: int = 2,
    max_loops: int | None = None,
    exit_depths: Sequence[int] = (),
    chunk: int | Sequence[int] | None = None,
    r_max: int | None = None,
) -> Result:
    """Greedy decoding of one request.

    Args:
        gate: none, fixed (depth is max_loops), replay (``exit_depths`` a decode token), own, delayed, lookahead,
            preloop or convergence.
        min_loops, max_loops: bounds of decode tokens' depths; max_loops None is r_max. A lookahead gate with min_loops 1
            asks the pre-loop head whether the first loop is the last.
        chunk: prompt tokens a prefill step, or the length of every chunk; None is all at once.
        r_max: loops of prefill; None is the model's own.
    """
    r_max = r_max or model.r_max
    max_loops = max_loops or r_max
    memory = new_memory(model, layout, r_max, len(prompt_ids) + max_tokens)
    logits = prefill(model, prompt_ids, layout, r_max, chunk, memory)
    result = Result([int(logits.argmax())], [r_max], [logits])
    for index in range(max_tokens - 1):
        depth = max_loops
        if gate == "replay" and index < len(exit_depths):
            depth = exit_depths[index]
        position = len(prompt_ids) + index
        state = model.prelude([result.tokens[-1]], position, memory)
        if gate == "preloop":
            depth = min(max(model.predicted_depth(state, threshold), min_loops), max_loops)
        if gate == "lookahead" and min_loops == 1 and model.predicted_depth(state, threshold) == 1:
            depth = 1
        decider = model.make_decider(gate, threshold)
        loop = 0
        while loop < depth:
            loop += 1
            before, state = state, model.core(state, plane_of(layout, loop), position, memory)
            decided_exit = loop + (0 if gate == "own" else 1)
            if decider.fires(loop, before, state) and decided_exit >= min_loops:
                depth = min(depth, decided_exit)
        memory.copy(position, plane_of(layout, loop), planes_left_empty(layout, loop, r_max))
        logits = model.logits(state, position, memory)[-1]
        result.tokens.append(int(logits.argmax()))
        result.depths.append(loop)
        result.logits.append(logits)
    return result


class NeverExits:
    """Gates whose depths are known in advance: none, fixed, replay."""

    def fires(self, loop: int, before: State, after: State) -> bool:
        return False


def read_model(model_dir: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and all checkpoint tensors in fp32."""
    path = Path(model_dir)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        if not file.name.endswith("_gate.safetensors"):
            tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
    return json.loads((path / "config.json").read_text()), tensors


def rotary_angles(start: int, count: int, head_dim: int, base: float) -> torch.Tensor:
    """fp32 angles [count, 1, head_dim / 2] of consecutive positions."""
    frequencies = torch.tensor([1.0]) / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (torch.arange(start, start + count).float()[:, None] * frequencies)[:, None, :]


def rotate_halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [n, heads, head_dim] turned by angles [n, 1, head_dim / 2], feature i paired with i + head_dim / 2."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def root_mean_square_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
