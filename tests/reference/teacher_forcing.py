"""A plain, slow evaluation of the demo task, the oracle of ``bench accuracy``: exact match by depth, by exit threshold, by class.

Whole answers are scored in one forward: an answer is exact when every token, the end marker included, is
the most likely one after the right tokens before it, which is when greedy decoding produces it. The
first answer token is read at full depth, as in serving, where it comes from prefill. Every loop runs for
every token, so later tokens attend to full-depth keys and values whatever the exit: this is the published
references' semantics. `bench accuracy` measures the engine, with its KV layouts.

Mean depth counts the tokens an exit gate decides: answer tokens after the first, and the end marker.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.training.batches import IGNORED, Batch, collate, encode_row
from depthbatch.training.data import CLASSES, Example
from depthbatch.training.demo_tokenizer import build_tokenizer
from depthbatch.training.huginn import HuginnTrainer
from depthbatch.training.ouro import OuroTrainer


class Scored(NamedTuple):
    """Accuracy (0..1) and mean depth (loops) of one setting, overall and by class in `CLASSES` order."""

    accuracy: float
    mean_depth: float
    class_accuracy: dict[str, float]
    class_depth: dict[str, float]


class Trace(NamedTuple):
    """What a model did on every example, N answer tokens in all.

    Attributes:
        right: whether the most likely token is the answer's, by depth, [R, N].
        decided: whether an exit gate decides the token (not the first of its answer), [N].
        row: the example each token belongs to, [N].
        signal: raw gate logits (Ouro) or convergence distances (Huginn), [R, N].
        states: states the gates read, [R, N, D] (Ouro: normed; Huginn: raw).
        embedding: token embeddings at the positions (Ouro), else empty, [N, D].
        classes: difficulty class of every example.
    """

    right: Tensor
    decided: Tensor
    row: Tensor
    signal: Tensor
    states: Tensor
    embedding: Tensor
    classes: list[str]


def _batches(examples: list[Example]) -> list[Batch]:
    tokenizer = build_tokenizer()
    rows = [encode_row(tokenizer, example, example.prompt) for example in examples]
    return [collate(rows[start : start + 128]) for start in range(0, len(rows), 128)]


def _by_length(examples: list[Example]) -> list[Example]:
    return sorted(examples, key=lambda e: (len(e.prompt) + len(e.answer), e))


def _positions(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Mask of supervised positions [B, T], and per supervised token its row and whether a gate decides it."""
    chosen = batch.targets != IGNORED
    first = chosen & ~torch.nn.functional.pad(chosen, (1, 0))[:, :-1]
    return chosen, chosen.nonzero()[:, 0], ~first[chosen]


def _join(parts: list[Trace], classes: list[str]) -> Trace:
    return Trace(
        right=torch.cat([part.right for part in parts], 1),
        decided=torch.cat([part.decided for part in parts]),
        row=torch.cat([part.row for part in parts]),
        signal=torch.cat([part.signal for part in parts], 1),
        states=torch.cat([part.states for part in parts], 1),
        embedding=torch.cat([part.embedding for part in parts]),
        classes=classes,
    )


@torch.no_grad()
def trace_ouro(model: OuroTrainer, examples: list[Example]) -> Trace:
    """Run an Ouro model over the examples, fp32."""
    parts, ordered, done = [], _by_length(examples), 0
    for batch in _batches(ordered):
        chosen, row, decided = _positions(batch)
        output = model(batch.ids)
        states = output.states[:, chosen]
        right = model.logits(states).argmax(-1) == batch.targets[chosen]
        signal, embedding = output.gate_logits[:, chosen], output.embedding[chosen]
        parts.append(Trace(right, decided, row + done, signal, states, embedding, []))
        done += len(batch.ids)
    return _join(parts, [example.difficulty for example in ordered])


@torch.no_grad()
def trace_huginn(model: HuginnTrainer, examples: list[Example], loops: int) -> Trace:
    """Run a Huginn model from the zero state over the examples, fp32.

    The coda runs on whole rows of one depth: keys and values of the coda are those of that depth.
    """
    parts, ordered, done = [], _by_length(examples), 0
    for batch in _batches(ordered):
        chosen, row, decided = _positions(batch)
        states = model(batch.ids, loops).states
        right = torch.stack([model.logits(s).argmax(-1)[chosen] for s in states]) == batch.targets[chosen]
        before = torch.cat((torch.zeros_like(states[:1]), states[:-1]))
        distance = ((states - before).norm(dim=-1) / states.norm(dim=-1).clamp_min(1e-12))[:, chosen]
        parts.append(Trace(right, decided, row + done, distance, states[:, chosen], torch.empty(0), []))
        done += len(batch.ids)
    return _join(parts, [example.difficulty for example in ordered])


def score(trace: Trace, depths: Tensor) -> Scored:
    """Score exits at `depths` [N] (loops from 1); first answer tokens are read at full depth whatever it says."""
    full = trace.right.shape[0]
    used = torch.where(trace.decided, depths, full)
    right = trace.right.gather(0, (used - 1)[None])[0]
    rows = len(trace.classes)
    exact = torch.ones(rows).scatter_reduce(0, trace.row, right.float(), "amin")
    token_class = torch.tensor([CLASSES.index(c) for c in trace.classes])
    class_accuracy, class_depth = {}, {}
    for i, name in enumerate(CLASSES):
        members = token_class == i
        if members.any():
            class_accuracy[name] = exact[members].mean().item()
            class_depth[name] = used[members[trace.row] & trace.decided].float().mean().item()
    mean_depth = used[trace.decided].float().mean().item()
    return Scored(exact.mean().item(), mean_depth, class_accuracy, class_depth)


def fixed_depth(trace: Trace, depth: int) -> Tensor:
    """Exit depth [N] when every decided token leaves at `depth`."""
    return torch.full_like(trace.row, depth)


def hazard_exits(hazards: Tensor, threshold: float, least: int = 2) -> Tensor:
    """Exit depths [N] from hazards [R, N]: the first depth >= `least` whose cumulated exit probability
    reaches `threshold`, else R. A threshold of 1 or more is full depth. fp32."""
    full = hazards.shape[0]
    if threshold >= 1.0:
        return torch.full(hazards.shape[1:], full)
    exited = 1 - (1 - hazards[:-1].float()).cumprod(0)
    exited[: least - 1] = -1.0
    reached = torch.cat((exited >= threshold, torch.ones_like(exited[:1], dtype=torch.bool)))
    return reached.int().argmax(0) + 1


def convergence_exits(distances: Tensor, threshold: float, least: int = 2) -> Tensor:
    """Exit depths [N] from distances [R, N]: the first depth >= `least` with distance < `threshold`, else R."""
    near = distances < threshold
    near[: least - 1] = False
    near[-1] = True
    return near.int().argmax(0) + 1
