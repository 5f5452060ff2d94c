"""Distillation of exit gates from a model's own gate, on frozen weights.

Two students of the teacher's exit distribution p_1..p_R (Ouro's gate; ``objectives.exit_log_probabilities``):

* lookahead: a linear head on the state after loop r whose logit is the hazard of loop r + 1. Nothing can
  exit at loop 1, so the hazard the head states after loop 1 stands for both: 1 - (1 - l_1)(1 - l_2).
  Tensors ``weight`` [1, D] and ``bias`` [1].
* preloop: a linear head from the token embedding, before the loop, to logits over depths 1..R, whose softmax
  is the exit distribution. Tensors ``weight`` [R, D] and ``bias`` [R].

Both minimise the mean KL divergence from the teacher's distribution, over cached states, with L-BFGS. The
files are safetensors, fp32; header metadata ``kind`` is ``lookahead`` or ``preloop``.

Source: appendix E.2 of the continuous depth batching paper (gate distillation); the loss is ours.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from depthbatch.common.errors import ConfigError
from depthbatch.training.objectives import exit_log_probabilities
from depthbatch.training.ouro import OuroTrainer

KINDS = ("lookahead", "preloop")
HELDOUT_SHARE = 0.1
WEIGHT_PENALTY = 1e-6
ITERATIONS_A_CALL = 20


class TokenRow(NamedTuple):
    """A token sequence and the positions whose next token counts for the distillation."""

    ids: list[int]
    positions: list[int]


class Features(NamedTuple):
    """What the students read and the teacher says at N tokens, fp32.

    ``states``: states after loops 1..R, [R, N, D].
    ``embedding``: token embeddings, [N, D].
    ``teacher_logits``: raw outputs of the model's own gate, [R, N].
    """

    states: Tensor
    embedding: Tensor
    teacher_logits: Tensor


class GateFit(NamedTuple):
    """A trained gate and its mean KL (nats a token) from the teacher on tokens held out from the fit.

    ``constant_kl`` is that of the best gate that ignores its input, the figure to beat.
    """

    weight: Tensor
    bias: Tensor
    constant_kl: float
    kl: float


@torch.no_grad()
def collect_features(model: OuroTrainer, rows: Sequence[TokenRow], batch_tokens: int = 4096) -> Features:
    """Run the frozen model, fp32, over rows of similar length together.

    ``model``: the teacher.
    ``rows``: token sequences; at least one position in all.
    ``batch_tokens``: padded tokens in one forward.

    Raises ConfigError: no row has a position to learn from.
    """
    ordered = sorted((row for row in rows if row.positions), key=lambda row: len(row.ids))
    if not ordered:
        raise ConfigError("the gate's data holds no token to learn from")
    states, embeddings, logits, start = [], [], [], 0
    with tqdm(total=len(ordered), desc="teacher", mininterval=5.0) as bar:
        while start < len(ordered):
            end = start + 1
            while end < len(ordered) and len(ordered[end].ids) * (end + 1 - start) <= batch_tokens:
                end += 1
            part = ordered[start:end]
            ids = torch.zeros(len(part), len(part[-1].ids), dtype=torch.long)
            chosen = torch.zeros(ids.shape, dtype=torch.bool)
            for i, row in enumerate(part):
                ids[i, : len(row.ids)] = torch.tensor(row.ids)
                chosen[i, row.positions] = True
            output = model(ids)
            states.append(output.states[:, chosen].float())
            embeddings.append(output.embedding[chosen].float())
            logits.append(output.gate_logits[:, chosen])
            bar.update(end - start)
            start = end
    return Features(torch.cat(states, 1), torch.cat(embeddings), torch.cat(logits, 1))


def teacher_distribution(teacher_logits: Tensor) -> Tensor:
    """The exit distribution p_1..p_R of raw gate logits [R, N]; fp32, [R, N]."""
    return exit_log_probabilities(teacher_logits.float()).exp()


def lookahead_log_probabilities(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """log of the lookahead student's distribution over depths 2..R from states [R, N, D]; [R - 1, N]."""
    return exit_log_probabilities(F.linear(states[:-1], weight, bias)[..., 0])


def preloop_log_probabilities(embedding: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """log of the pre-loop student's distribution over depths 1..R from embeddings [N, D]; [R, N]."""
    return F.linear(embedding, weight, bias).log_softmax(-1).T


def merge_first(p: Tensor) -> Tensor:
    """Move depth 1's probability to depth 2: [R, N] to [R - 1, N]."""
    return torch.cat(((p[0] + p[1])[None], p[2:]))


def mean_kl(target: Tensor, log_student: Tensor) -> Tensor:
    """Mean over tokens of KL(target || student), both [depths, N]; a scalar in nats."""
    return (torch.xlogy(target, target) - target * log_student).sum(0).mean()


def _log_student(kind: str, features: Features, weight: Tensor, bias: Tensor) -> Tensor:
    if kind == "lookahead":
        return lookahead_log_probabilities(features.states, weight, bias)
    return preloop_log_probabilities(features.embedding, weight, bias)


def _take(features: Features, index: Tensor) -> Features:
    return Features(features.states[:, index], features.embedding[index], features.teacher_logits[:, index])


def _minimise(kind: str, features: Features, parameters: list[Tensor], iterations: int, title: str) -> None:
    """L-BFGS on ``parameters`` (weight, bias), or on the bias alone when the weight needs no gradient."""
    weight, bias = parameters
    target = teacher_distribution(features.teacher_logits)
    if kind == "lookahead":
        target = merge_first(target)
    free = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.LBFGS(free, max_iter=ITERATIONS_A_CALL, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean_kl(target, _log_student(kind, features, weight, bias))
        loss = loss + WEIGHT_PENALTY * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in tqdm(range(max(1, iterations // ITERATIONS_A_CALL)), desc=title, mininterval=5.0):
        optimizer.step(closure)  # type: ignore[no-untyped-call]


def fit_gate(kind: str, features: Features, seed: int = 0, iterations: int = 300) -> GateFit:
    """Distil one gate.

    ``kind``: ``lookahead`` or ``preloop``.
    ``features``: teacher's states and logits, at least 20 tokens, at least 3 loops for ``lookahead``.
    ``seed``: picks the tenth of the tokens held out from the fit.
    ``iterations``: L-BFGS iterations.

    Raises ConfigError: an unknown kind, too few tokens or too few loops.
    """
    if kind not in KINDS:
        raise ConfigError(f"gate kind '{kind}' is not one of {', '.join(KINDS)}")
    loops, tokens, width = features.states.shape
    if tokens < 20:
        raise ConfigError(f"the gate's data holds {tokens} tokens; at least 20 are needed")
    if kind == "lookahead" and loops < 3:
        raise ConfigError(f"a lookahead gate needs a model of at least 3 loops, this one has {loops}")
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    held = max(1, int(tokens * HELDOUT_SHARE))
    fit, test = _take(features, order[held:]), _take(features, order[:held])
    outputs = 1 if kind == "lookahead" else loops
    constant = [torch.zeros(outputs, width), torch.zeros(outputs, requires_grad=True)]
    _minimise(kind, fit, constant, ITERATIONS_A_CALL, "constant gate")
    gate = [torch.zeros(outputs, width, requires_grad=True), constant[1].detach().clone().requires_grad_()]
    _minimise(kind, fit, gate, iterations, f"{kind} gate")
    target = teacher_distribution(test.teacher_logits)
    target = merge_first(target) if kind == "lookahead" else target
    with torch.no_grad():
        constant_kl, kl = (mean_kl(target, _log_student(kind, test, *pair)).item() for pair in (constant, gate))
    return GateFit(gate[0].detach(), gate[1].detach(), constant_kl, kl)


def save_gate(fit: GateFit, kind: str, path: Path) -> None:
    """Write a gate file: fp32 tensors ``weight``, ``bias``; metadata names the kind. Replaces ``path`` atomically."""
    partial = path.with_name(path.name + ".partial")
    tensors = {"weight": fit.weight.contiguous(), "bias": fit.bias.contiguous()}
    save_file(tensors, partial, metadata={"format": "pt", "kind": kind})
    partial.chmod(0o644)
    os.replace(partial, path)
