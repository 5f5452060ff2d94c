"""The training loop: optimiser, schedule, checkpoints, resume, progress bar.

A run is a function of its configuration: data depends on (seed, step), weights on the seed, so a run
resumed from a checkpoint continues bit for bit as if it had not stopped (same machine, same threads).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from depthbatch.training.batches import IGNORED, Batch, step_batches
from depthbatch.training.demo_tokenizer import build_tokenizer

WARMUP_STEPS = 100
DECAY_SHARE = 0.35
MUON_LR, ADAM_LR = 0.02, 3e-3
TIED_LR = 5e-4  # Huginn multiplies its embedding by sqrt(D), and each step with it
WEIGHT_DECAY = 0.01
GRADIENT_CLIP = 1.0

Objective = Callable[[Batch, int], Tensor]
"""Maps (batch, step) to the summed loss over the batch's supervised tokens."""


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    ``seed``: seed of data and loop counts.
    ``steps``: optimiser steps in all.
    ``batch_size``: examples a step.
    ``checkpoint``: file that holds the run's state.
    ``checkpoint_every``: steps between writes of the checkpoint.
    """

    seed: int
    steps: int
    batch_size: int
    checkpoint: Path
    checkpoint_every: int = 200


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, constant, then linear decay to zero over the last ``DECAY_SHARE`` of the run."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, (steps - step) / (DECAY_SHARE * steps))


def build_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, head, norms, gate and biases."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    tied: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith("wte.weight"):
            tied.append(parameter)
        elif parameter.dim() == 2 and not any(part in name for part in ("embed_tokens", "lm_head", "gate.w")):
            matrices.append(parameter)
        else:
            others.append(parameter)
    groups = [{"params": others, "lr": ADAM_LR}]
    if tied:
        groups.append({"params": tied, "lr": TIED_LR})
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    if not matrices:
        return [adam]
    return [torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY), adam]


class Run:
    """A training run over the generated task, resumable from its checkpoint.

    ``model``: the model; parameters with ``requires_grad`` are trained.
    ``objective``: the loss.
    ``config``: the run's constants.
    ``rate``: factor of all learning rates.
    """

    def __init__(self, model: nn.Module, objective: Objective, config: RunConfig, rate: float = 1.0) -> None:
        self.model = model
        self.objective = objective
        self.config = config
        self.tokenizer: Tokenizer = build_tokenizer()
        self.optimizers = build_optimizers(model)
        self.base_rates = [[rate * group["lr"] for group in opt.param_groups] for opt in self.optimizers]
        self.step = 0

    def train_step(self) -> float:
        """One optimiser step; returns the mean loss over its supervised tokens."""
        factor = learning_rate_factor(self.step, self.config.steps)
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.zero_grad(set_to_none=True)
        batches = step_batches(self.tokenizer, self.config.seed, self.step, self.config.batch_size)
        tokens = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.objective(batch, self.step) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return total

    def save(self) -> None:
        """Write the checkpoint; a crash during the write leaves the previous one."""
        state: dict[str, Any] = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = self.config.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.config.checkpoint)

    def resume(self) -> bool:
        """Continue from the checkpoint file when it exists; returns whether it did."""
        if not self.config.checkpoint.exists():
            return False
        state = torch.load(self.config.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = int(state["step"])
        return True

    def train(self, title: str, on_checkpoint: Callable[[], None] | None = None) -> None:
        """Run the remaining steps with a progress bar; checkpoint regularly and at the end.

        ``title``: name on the progress bar.
        ``on_checkpoint``: called after every checkpoint, e.g. to export the model.
        """
        smooth = None
        with tqdm(total=self.config.steps, initial=self.step, desc=title, mininterval=5.0) as bar:
            while self.step < self.config.steps:
                loss = self.train_step()
                smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
                bar.update()
                if self.step % 20 == 0:
                    bar.set_postfix(loss=f"{smooth:.4f}")
                if self.step % self.config.checkpoint_every == 0 or self.step == self.config.steps:
                    self.save()
                    if on_checkpoint is not None:
                        on_checkpoint()
