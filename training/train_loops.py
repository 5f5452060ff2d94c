"""Training of a converted model's loop, so that more loops come to be worth something.

A converted model starts with all loop counts equal, for its adapter drops the state. Each step draws a loop count R, and
the state after R loops, read through the coda, is to predict the next token: cross-entropy, and if wanted the divergence
from what the model said before. Sources: "Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence"
(loop counts at random; it trains the whole model on billions of tokens); Hinton et al., "Distilling the Knowledge in a
Neural Network" (the divergence at a temperature).
"""

import copy
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from depthbatch.common.errors import ConfigError
from depthbatch.training.retrofitted import RetrofittedTrainer, Trained
from depthbatch.training.train_gate import TokenRow

DISTANCES = (0.3, 0.1, 0.03)
"""Thresholds of the convergence test at which exit depths are told; the last is what such models have by default."""
WARMUP_SHARE, DECAY_SHARE = 0.05, 0.5
GRADIENT_CLIP = 1.0
TEMPERATURE = 2.0
SAVE_EVERY = 20
SCALE_ROWS = 4


class Healing(NamedTuple):
    """One run.

    ``loops``: R is drawn from 1 (2, where one loop stays) to this.
    ``steps``, ``batch_size``: steps, and rows a step.
    ``rate``: of learning.
    ``trained``: what of the loop.
    ``distill``: weight of the divergence from the model before training; 0: none.
    ``seed``: of rows, loop counts and low-rank matrices.
    """

    loops: int
    steps: int
    batch_size: int
    rate: float
    trained: Trained
    distill: float
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


def split_rows(rows: Sequence[TokenRow]) -> tuple[list[TokenRow], list[TokenRow]]:
    """Rows to train on, and the last tenth of them, at least one, to measure with; positions without a next token are left
    out. Raises ConfigError: fewer than two rows."""
    counted = [TokenRow(row.ids, [p for p in row.positions if p + 1 < len(row.ids)]) for row in rows]
    useful = [row for row in counted if row.positions]
    if len(useful) < 2:
        raise ConfigError(f"the text makes {len(useful)} rows with something to predict; at least 2 are needed")
    held = max(1, len(useful) // 10)
    return useful[:-held], useful[-held:]


class Padded(NamedTuple):
    """Rows side by side: ids [B, T], which of them are to predict the next, bool [B, T], and the N tokens that follow."""

    ids: Tensor
    chosen: Tensor
    targets: Tensor


def pad(rows: Sequence[TokenRow]) -> Padded:
    """Padded at the end, where no position that counts sees it."""
    ids = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.long)
    chosen = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        chosen[i, row.positions] = True
    return Padded(ids, chosen, ids.roll(-1, 1)[chosen])


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean KL(teacher || student) of logits [N, V] at TEMPERATURE, times its square, so that gradients keep their size."""
    said, wanted = ((logits / TEMPERATURE).log_softmax(-1) for logits in (student, teacher))
    return F.kl_div(said, wanted, reduction="batchmean", log_target=True) * TEMPERATURE**2


class HealingRun:
    """The steps of a run; goes on from ``checkpoint`` where that is there. Raises ConfigError: it is another run's."""

    def __init__(self, model: RetrofittedTrainer, rows: Sequence[TokenRow], run: Healing, checkpoint: Path) -> None:
        self.model, self.rows, self.run, self.checkpoint = model, rows, run, checkpoint
        self._teacher = copy.deepcopy(model) if run.distill else None
        self._parameters = model.train_loop(run.trained, run.seed, pad(rows[:SCALE_ROWS]).ids)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=run.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.losses: list[float] = []
        if checkpoint.exists():
            self._resume()

    def train(self) -> list[float]:
        """All steps that are left; the loss of every step, at the loop count that it drew."""
        with tqdm(total=self.run.steps, initial=len(self.losses), desc="loops", mininterval=5.0) as bar:
            while (step := len(self.losses)) < self.run.steps:
                self.losses.append(self._step(step))
                bar.update()
                if len(self.losses) % SAVE_EVERY == 0:
                    self._save()
        self.model.merge()
        return self.losses

    def _step(self, step: int) -> float:
        run, share = self.run, step / self.run.steps
        factor = min(1.0, (share + 1 / run.steps) / WARMUP_SHARE, (1.0 - share) / DECAY_SHARE)
        for group in self._optimizer.param_groups:
            group["lr"] = run.rate * factor
        rng = random.Random(f"{run.seed} {step}")
        loops = rng.randint(min(run.loops, 2 if run.trained.one_loop_stays else 1), run.loops)
        loss = self.loss(pad([rng.choice(self.rows) for _ in range(run.batch_size)]), loops)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, GRADIENT_CLIP)
        self._optimizer.step()
        return loss.item()

    def loss(self, batch: Padded, loops: int) -> Tensor:
        """Of the state after so many loops."""
        injection = self.model.injection(batch.ids)
        logits = self.model.logits(self.model(injection, loops)[-1], batch.chosen)
        loss = F.cross_entropy(logits, batch.targets)
        if self._teacher is None:
            return loss
        with torch.no_grad():
            wanted = self._teacher.logits(self._teacher(injection, 1)[-1], batch.chosen)
        return loss + self.run.distill * divergence(wanted, logits)

    def _save(self) -> None:
        state = {
            "run": repr(self.run),
            "losses": self.losses,
            "parameters": [parameter.detach() for parameter in self._parameters],
            "optimizer": self._optimizer.state_dict(),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    @torch.no_grad()
    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        if state["run"] != repr(self.run):
            raise ConfigError(f"{self.checkpoint} is of a run with other options; --restart begins anew")
        for parameter, saved in zip(self._parameters, state["parameters"], strict=True):
            parameter.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]


def exit_depths(states: Tensor, threshold: float) -> Tensor:
    """Depths at which tokens come to rest, |s_r - s_{r-1}| / |s_r| below the threshold, of states [R, N, D]: [N], 2 to R."""
    distance = (states[1:] - states[:-1]).norm(dim=-1) / states[1:].norm(dim=-1).clamp_min(1e-12)
    near = torch.cat((distance < threshold, torch.ones(1, states.shape[1], dtype=torch.bool)))
    return (near.int().argmax(0) + 2).clamp(max=len(states))


@torch.no_grad()
def measure(model: RetrofittedTrainer, rows: Sequence[TokenRow], loops: int) -> Depths:
    """Perplexity by loops, and exit depths by the distance of states."""
    totals, exits, tokens = torch.zeros(loops), {threshold: list[int]() for threshold in DISTANCES}, 0
    for row in rows:
        ids, chosen, targets = pad([row])
        states = model(model.injection(ids), loops)
        totals += torch.stack([F.cross_entropy(model.logits(s, chosen), targets, reduction="sum") for s in states])
        tokens += len(targets)
        for threshold, depths in exits.items():
            depths += exit_depths(states[:, chosen], threshold).tolist()
    return Depths([math.exp(total / tokens) for total in totals.tolist()], exits)
