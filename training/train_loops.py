"""Training of a converted model's adapter and core, so that more loops may come to be worth something.

Every loop's state, read through the coda, is to predict the next token (the mean of the cross-entropies over loops 1..R).
A converted model starts with all of them equal, for its adapter drops the state. Source: "Teaching Pretrained Language
Models to Think Deeper with Retrofitted Recurrence", which trains the whole model on billions of tokens.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from depthbatch.common.errors import ConfigError
from depthbatch.training.retrofitted import RetrofittedTrainer

DISTANCES = (0.3, 0.1, 0.03)
"""Thresholds of the convergence test at which exit depths are told."""
WARMUP_SHARE = 0.1
GRADIENT_CLIP = 1.0


class Healing(NamedTuple):
    """One run: loops R, steps, rows a step, learning rate, rank of the change of the core (0: the core itself), seed."""

    loops: int
    steps: int
    batch_size: int
    rate: float
    rank: int
    seed: int


class Depths(NamedTuple):
    """What a model makes of held-out text.

    ``perplexity``: after each of loops 1..R.
    ``exits``: threshold -> depth of every token, where the convergence test decides at once; its next token's rank is
    not looked at.
    """

    perplexity: list[float]
    exits: dict[float, list[int]]

    def as_json(self) -> dict[str, Any]:
        """Perplexity by loops, and how many tokens left at which depth."""
        by_threshold = []
        for threshold, depths in self.exits.items():
            histogram = {depth: depths.count(depth) for depth in sorted(set(depths))}
            mean = sum(depths) / len(depths)
            by_threshold.append({"threshold": threshold, "mean_depth": mean, "histogram": histogram})
        perplexity = [{"loops": loops, "perplexity": value} for loops, value in enumerate(self.perplexity, 1)]
        return {"perplexity": perplexity, "exits": by_threshold}


def split_rows(rows: Sequence[list[int]], length: int) -> tuple[list[list[int]], list[list[int]]]:
    """Rows to train on, and the last tenth of them, at least one, to measure with. All have ``length`` + 1 tokens; what is
    left over of a text is not used. Raises ConfigError: fewer than two rows."""
    whole = [row for row in rows if len(row) == length + 1]
    if len(whole) < 2:
        raise ConfigError(f"the text holds {len(whole)} rows of {length + 1} tokens; at least 2 are needed")
    held = max(1, len(whole) // 10)
    return whole[:-held], whole[-held:]


def losses(model: RetrofittedTrainer, ids: Tensor, loops: int) -> Tensor:
    """Mean cross-entropy of the next token after each of loops 1..R on rows [B, T + 1]: [R]."""
    states, targets = model(ids[:, :-1], loops), ids[:, 1:].flatten()
    return torch.stack([F.cross_entropy(model.logits(state).flatten(0, 1), targets) for state in states])


def heal(model: RetrofittedTrainer, rows: Sequence[list[int]], run: Healing) -> Iterator[float]:
    """Trains adapter and core; yields the mean loss of every step."""
    parameters = model.train_core(run.rank, run.seed)
    optimizer = torch.optim.AdamW(parameters, lr=run.rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(run.seed)
    for step in tqdm(range(run.steps), desc="loops", mininterval=5.0):
        warm = min(1.0, (step + 1) / max(1.0, WARMUP_SHARE * run.steps))
        for group in optimizer.param_groups:
            group["lr"] = run.rate * warm * (1.0 - step / run.steps)
        ids = torch.tensor([rng.choice(rows) for _ in range(run.batch_size)])
        with torch.autocast("cpu", torch.bfloat16):
            loss = losses(model, ids, run.loops).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_CLIP)
        optimizer.step()
        yield loss.item()
    model.merge()


@torch.no_grad()
def measure(model: RetrofittedTrainer, rows: Sequence[list[int]], loops: int) -> Depths:
    """Perplexity by loops, and exit depths by the distance of states, of rows [T + 1]."""
    totals, exits = torch.zeros(loops), {threshold: list[int]() for threshold in DISTANCES}
    for row in rows:
        ids = torch.tensor([row])
        states = model(ids[:, :-1], loops)
        totals += torch.stack([F.cross_entropy(model.logits(state)[0], ids[0, 1:]) for state in states])
        steps = states[1:] - states[:-1]
        distance = (steps.norm(dim=-1) / states[1:].norm(dim=-1).clamp_min(1e-12))[:, 0]  # of loops 2..R, [R - 1, T]
        for threshold, depths in exits.items():
            near = torch.cat((distance < threshold, torch.ones(1, distance.shape[1], dtype=torch.bool)))
            depths += (near.int().argmax(0) + 2).clamp(max=loops).tolist()
    return Depths([math.exp(total / len(rows)) for total in totals.tolist()], exits)
