"""Training objectives: Ouro's expected loss, its adaptive gate loss, Huginn's loss.

Sources: "Scaling Latent Reasoning via Looped Language Models" (Ouro; stage I expected loss with an
entropy term, stage II gate training on the frozen model) and "Scaling up Test-Time Compute with Latent
Reasoning" (Huginn; log-normal Poisson loop counts, truncated backpropagation).
"""

import math
import random

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.training.batches import IGNORED, Batch
from depthbatch.training.huginn import HuginnTrainer, at
from depthbatch.training.ouro import OuroTrainer

ENTROPY_WEIGHT = 0.5
GATE_SHARPNESS = 50.0
GATE_GAIN = 0.1


def exit_log_probabilities(gate_logits: Tensor) -> Tensor:
    """log p_t of the exit distribution from raw gate logits [R, ...], fp32, [R, ...].

    p_t = l_t * prod_{s<t} (1 - l_s) with l = sigmoid(logit); the last loop takes the remaining mass.
    """
    log_stay = F.logsigmoid(-gate_logits[:-1]).cumsum(0)
    survival = torch.cat((torch.zeros_like(gate_logits[:1]), log_stay))
    hazard = torch.cat((F.logsigmoid(gate_logits[:-1]), torch.zeros_like(gate_logits[:1])))
    return survival + hazard


def _supervised_losses(model: OuroTrainer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy and gate logits at the N supervised positions for every loop, both [R, N]."""
    output = model(batch.ids)
    chosen = batch.targets != IGNORED
    states = output.states[:, chosen]
    targets = batch.targets[chosen]
    loops = states.shape[0]
    flat = model.logits(states).flatten(0, 1)
    losses = F.cross_entropy(flat, targets.repeat(loops), reduction="none").view(loops, -1)
    return losses, output.gate_logits[:, chosen]


def lookup_loss(model: OuroTrainer, batch: Batch) -> Tensor:
    """Warm-up: summed over supervised tokens, the mean over loops 2..R of the cross-entropy with the answer
    after r - 1 look-ups; a scalar.

    Teaches one look-up a loop (loop 1 has no key to look up yet). Without it the second look-up, which
    only ever pays at the last loops, does not appear within a few thousand steps.
    """
    output = model(batch.ids)
    chosen = batch.targets != IGNORED
    logits = model.logits(output.states[1:, chosen])
    last = batch.partial.shape[0] - 1
    targets = torch.stack([batch.partial[min(1 + i, last)][chosen] for i in range(logits.shape[0])])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / logits.shape[0]


def expected_loss(model: OuroTrainer, batch: Batch) -> Tensor:
    """Stage I: sum over supervised tokens of E_{t~p}[CE_t] - ENTROPY_WEIGHT * H(p); a scalar."""
    losses, gate_logits = _supervised_losses(model, batch)
    log_p = exit_log_probabilities(gate_logits)
    p = log_p.exp()
    return (p * (losses + ENTROPY_WEIGHT * log_p)).sum()


def gate_loss(model: OuroTrainer, batch: Batch) -> Tensor:
    """Stage II: sum over supervised tokens and loops 1..R-1 of the gate's binary cross-entropy; a scalar.

    The label for staying at loop t is sigmoid(GATE_SHARPNESS * (CE_t - min_{s>t} CE_s - GATE_GAIN)): stay
    while a later loop still lowers this token's loss. Ouro's own label looks at the last step's gain
    (CE_{t-1} - CE_t); a pointer that is three look-ups from its value gains nothing until the last one,
    so here the label looks ahead. Ouro's GATE_GAIN of 0.005 would label a token with nothing left to gain
    0.44 and the gate undecided; 0.1 labels it 0.007. Only the gate's parameters receive gradients.
    """
    with torch.no_grad():
        output = model(batch.ids)
        chosen = batch.targets != IGNORED
        states = output.states[:, chosen]
        targets = batch.targets[chosen]
        losses = torch.stack([F.cross_entropy(model.logits(h), targets, reduction="none") for h in states])
        later = losses[1:].flip(0).cummin(0).values.flip(0)
        stay = torch.sigmoid(GATE_SHARPNESS * (losses[:-1] - later - GATE_GAIN))
    return F.binary_cross_entropy_with_logits(model.gate(states[:-1]), 1 - stay, reduction="sum")


def sample_loops(rng: random.Random, mean: float, most: int) -> int:
    """A loop count from Huginn's log-normal Poisson (sigma 0.5) of the given mean, within 1..most."""
    sigma = 0.5
    rate = math.exp(rng.gauss(math.log(mean) - sigma**2 / 2, sigma))
    level, product, count = math.exp(-rate), rng.random(), 0
    while product > level:
        product *= rng.random()
        count += 1
    return max(1, min(most, count + 1))


def huginn_loss(
    model: HuginnTrainer, batch: Batch, loops: int, state: Tensor | None = None, gradient_loops: int | None = None
) -> Tensor:
    """Huginn: summed over supervised tokens, the mean of two losses after ``loops`` steps; a scalar.

    The published loss: the cross-entropy of the last state, through the coda, with the final answer. The loss of
    the steps: every tracked state, read by the head alone, is to hold the answer after r - 1 look-ups: the name that
    is asked for after step 1, what it points at after step 2. Without the second, the first look-up is learned in the
    coda, where it cannot be repeated, and the second has not appeared after 3,000 batches; without it at random loop
    counts, the third is lost again.

    ``model``: the model.
    ``batch``: the batch.
    ``loops``: core steps R.
    ``state``: initial state [B, T, D]; zeros when None.
    ``gradient_loops``: backpropagate through the last so many steps only; through all when None.
    """
    states = model(batch.ids, loops, state, gradient_loops).states
    chosen = batch.targets != IGNORED
    return _huginn_loss(model, batch, states[-1], states[:, chosen], gradient_loops)


def shared_plane_loss(
    model: HuginnTrainer,
    batch: Batch,
    loops: int,
    answer_loops: int,
    state: Tensor | None = None,
    gradient_loops: int | None = None,
) -> Tensor:
    """``huginn_loss`` with a KV plane a loop, and with one for all loops: the mean of both; a scalar.

    With one plane a prompt is as it is with many, for it is prefilled at once, ``loops`` deep. The tokens of an answer
    then see it as its last loop left it, in all of their ``answer_loops`` loops (``HuginnTrainer.decode``).
    Other arguments as for ``huginn_loss``.
    """
    whole = model(batch.ids, loops, state, gradient_loops)
    chosen = batch.targets != IGNORED
    counts = chosen.sum(1, keepdim=True)  # answers are without gaps
    entries = torch.arange(int(counts.max()))
    positions = (chosen.int().argmax(1, keepdim=True) + entries).clamp(max=chosen.shape[1] - 1)
    answer_state = None if state is None else at(state, positions)
    answers = model.decode(whole, positions, answer_loops, answer_state, gradient_loops)[:, entries < counts]
    last = whole.states[-1].clone()
    last[chosen] = answers[-1]
    many = _huginn_loss(model, batch, whole.states[-1], whole.states[:, chosen], gradient_loops)
    return (many + _huginn_loss(model, batch, last, answers, gradient_loops)) / 2


def _huginn_loss(
    model: HuginnTrainer, batch: Batch, last: Tensor, answers: Tensor, gradient_loops: int | None
) -> Tensor:
    """Of raw states: ``last`` of whole rows [B, T, D], ``answers`` after every loop at the N supervised positions
    [R, N, D]."""
    chosen = batch.targets != IGNORED
    final, loops = batch.targets[chosen], len(answers)
    coda = F.cross_entropy(model.logits(last)[chosen], final, reduction="sum")
    tracked = range(max(0, loops - (gradient_loops or loops)), loops)  # answers[i] is that after step i + 1
    deepest = len(batch.partial) - 1
    targets = torch.cat([batch.partial[min(i, deepest)][chosen] for i in tracked])
    logits = model.head(answers[tracked.start :]).flatten(0, 1)
    return (F.cross_entropy(logits, targets, reduction="sum") / len(tracked) + coda) / 2
