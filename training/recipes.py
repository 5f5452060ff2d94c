"""The two demo models: their sizes, and the training runs that make them.

``demo`` (Ouro): a warm-up on partial answers; stage I trains everything on the expected loss; stage II
trains the gate alone on the frozen model; then the lookahead and pre-loop gates are distilled.
``demo-huginn``: a warm-up of a fixed loop count from the zero state, then random loop counts from random states;
a second run also with the K/V of the last loop in all loops, as the KV layout ``single`` has them; both gates.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from depthbatch.training.batches import IGNORED, Batch, step_batches
from depthbatch.training.checkpoints import export
from depthbatch.training.demo_tokenizer import VOCAB_SIZE, build_tokenizer
from depthbatch.training.huginn import HuginnSize, HuginnTrainer, initial_state
from depthbatch.training.objectives import (
    expected_loss,
    gate_loss,
    huginn_loss,
    lookup_loss,
    sample_loops,
    shared_plane_loss,
)
from depthbatch.training.ouro import OuroSize, OuroTrainer
from depthbatch.training.train_gate import (
    KINDS,
    Features,
    TokenRow,
    collect_features,
    fit_gate,
    huginn_features,
    ouro_features,
    save_gate,
)
from depthbatch.training.trainer import Run, RunConfig

OURO = OuroSize(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=2048,
    rope_theta=1e4,
)
HUGINN = HuginnSize(
    vocab_size=VOCAB_SIZE,
    n_embd=128,
    n_heads=4,
    intermediate_size=512,
    n_layers_in_prelude=1,
    n_layers_in_recurrent_block=1,
    n_layers_in_coda=1,
    block_size=2048,
    mean_recurrence=16,
)
"""Its ``mean_recurrence`` is what the published code runs by default; training draws from HUGINN_MEAN_LOOPS."""
HUGINN_MOST_LOOPS = 16
HUGINN_MEAN_LOOPS = 6
HUGINN_GRADIENT_LOOPS = 4
HUGINN_WARMUP_LOOPS = 4
WARMUP_SHARE = 0.6
"""Share of the steps trained on partial answers, one look-up a loop, before the recipe proper."""
SHARED_SHARE = 0.2
"""Steps of demo-huginn's second run, with one KV plane for all loops, as a share of those of the first."""
SHARED_RATE = 0.3
"""Its learning rate, as a share of that of the first."""
GATE_STEPS = 300
DISTIL_STEPS = range(1_000_000, 1_000_040)
"""Step numbers whose batches the gates are distilled on; no training run reaches them."""


def distillation_rows(seed: int, batch_size: int = 64) -> list[TokenRow]:
    """Training-split examples for distilling the demo's gates; the answers' positions count."""
    tokenizer = build_tokenizer()
    rows = []
    for step in DISTIL_STEPS:
        for batch in step_batches(tokenizer, seed, step, batch_size):
            for ids, targets in zip(batch.ids, batch.targets, strict=True):
                positions = (targets != IGNORED).nonzero()[:, 0].tolist()
                rows.append(TokenRow(ids[: positions[-1] + 1].tolist(), positions))
    return rows


def train_gate_stage(model: OuroTrainer, config: RunConfig) -> None:
    """Stage II: the gate alone, everything else frozen; resumes from its own checkpoint."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("early_exit_gate" in name)
    run = Run(model, lambda batch, _: gate_loss(model, batch), config)
    run.resume()
    run.train("exit gate")
    model.requires_grad_(True)


def distil_gates(features_of: Callable[[Tensor, Tensor], Features], family: str, directory: Path, seed: int) -> None:
    """Distil both gates and save them beside the model."""
    features = collect_features(features_of, distillation_rows(seed))
    for kind in KINDS:
        save_gate(fit_gate(kind, features, seed), kind, family, directory / f"{kind}_gate.safetensors")


def train_demo(config: RunConfig, directory: Path) -> OuroTrainer:
    """Train and export ``demo``: stage I, stage II, distilled gates.

    ``config``: stage I's run; stage II's checkpoint lies beside its checkpoint.
    ``directory``: model directory to write; also exported at every checkpoint of stage I.

    Returns the trained model, fp32 master weights.
    """
    model = OuroTrainer(OURO, config.seed)
    warmup = int(WARMUP_SHARE * config.steps)

    def objective(batch: Batch, step: int) -> torch.Tensor:
        return lookup_loss(model, batch) if step < warmup else expected_loss(model, batch)

    run = Run(model, objective, config)
    run.resume()
    run.train("demo", lambda: export(model, directory))
    gate_checkpoint = config.checkpoint.with_name(config.checkpoint.stem + "-gate.pt")
    train_gate_stage(model, replace(config, steps=GATE_STEPS, checkpoint=gate_checkpoint))
    export(model, directory)
    distil_gates(partial(ouro_features, model), "ouro", directory, config.seed)
    return model


def train_demo_huginn(config: RunConfig, directory: Path) -> HuginnTrainer:
    """Train and export ``demo-huginn``; arguments as for ``train_demo``. The second run, with one KV plane for all loops
    beside one a loop, has a checkpoint of its own."""
    model = HuginnTrainer(HUGINN, config.seed)
    warmup = int(WARMUP_SHARE * config.steps)

    def draw_state(batch: Batch, step: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        return initial_state((*batch.ids.shape, HUGINN.n_embd), noise)

    def draw_loops(rng: random.Random) -> int:
        return sample_loops(rng, HUGINN_MEAN_LOOPS, HUGINN_MOST_LOOPS)

    def objective(batch: Batch, step: int) -> torch.Tensor:
        if step < warmup:
            return huginn_loss(model, batch, HUGINN_WARMUP_LOOPS)
        loops = draw_loops(random.Random(f"loops-{config.seed}-{step}"))
        return huginn_loss(model, batch, loops, draw_state(batch, step), HUGINN_GRADIENT_LOOPS)

    def shared_objective(batch: Batch, step: int) -> torch.Tensor:
        rng = random.Random(f"shared-{config.seed}-{step}")
        loops, state = (draw_loops(rng), draw_loops(rng)), draw_state(batch, step)
        return shared_plane_loss(model, batch, max(loops), loops[0], state, HUGINN_GRADIENT_LOOPS)

    def save() -> None:
        export(model, directory)

    run = Run(model, objective, config)
    run.resume()
    run.train("demo-huginn", save)
    checkpoint = config.checkpoint.with_name(config.checkpoint.stem + "-shared.pt")
    second = replace(config, seed=config.seed + 1, steps=int(SHARED_SHARE * config.steps), checkpoint=checkpoint)
    run = Run(model, shared_objective, second, SHARED_RATE)
    run.resume()
    run.train("one plane for all loops", save)
    distil_gates(partial(huginn_features, model, HUGINN_MOST_LOOPS), "huginn", directory, config.seed)
    return model
