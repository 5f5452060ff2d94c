"""Distillation of exit gates on frozen weights, from a model's own gate or from what more loops do to its tokens.

Two students of the teacher's exit distribution p_1..p_R. Ouro's gate is a teacher (``objectives.exit_log_probabilities``).
For Huginn, which has none, p is 1 at the depth from which on the likeliest token is that of full depth.

* lookahead: a linear head on the state after loop r whose logit is the hazard of loop r + 1. Nothing can
  exit at loop 1, so the hazard the head states after loop 1 stands for both: 1 - (1 - l_1)(1 - l_2).
  Tensors ``weight`` [1, D] and ``bias`` [1].
* preloop: a linear head on what the loop starts from (Ouro: the token's embedding; Huginn: the injection), to logits
  over depths 1..R, whose softmax is the exit distribution. Tensors ``weight`` [R, D] and ``bias`` [R].

Both minimise the mean KL divergence from the teacher's distribution, over cached states, with L-BFGS. The
files are safetensors, fp32; header metadata ``kind`` is ``lookahead`` or ``preloop``, ``family`` the model's.

Source: appendix E.2 of the continuous depth batching paper (gate distillation); the loss is ours.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from depthbatch.common.errors import ConfigError
from depthbatch.training.huginn import HuginnTrainer
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
    ``start``: what the loop starts from, [N, D].
    ``teacher``: the exit distribution p_1..p_R, [R, N].
    """

    states: Tensor
    start: Tensor
    teacher: Tensor


class GateFit(NamedTuple):
    """A trained gate and its mean KL divergence (nats a token) from the teacher on tokens held out from the fit.

    ``constant_kl`` is that of the best gate that ignores its input, the figure to beat.
    """

    weight: Tensor
    bias: Tensor
    constant_kl: float
    kl: float


def ouro_features(model: OuroTrainer, ids: Tensor, chosen: Tensor) -> Features:
    """Of the ``chosen`` positions, bool [B, T], of rows [B, T]."""
    output = model(ids)
    teacher = teacher_distribution(output.gate_logits[:, chosen])
    return Features(output.states[:, chosen].float(), output.embedding[chosen].float(), teacher)


def huginn_features(model: HuginnTrainer, loops: int, ids: Tensor, chosen: Tensor) -> Features:
    """As ``ouro_features``, with ``loops`` as full depth."""
    output = model(ids, loops)
    tokens = torch.stack([model.logits(states)[chosen].argmax(-1) for states in output.states])
    settled = (tokens == tokens[-1]).flip(0).cumprod(0).sum(0)  # loops from which on the token is the last one's
    teacher = F.one_hot(loops - settled, loops).T.float()
    return Features(output.states[:, chosen].float(), output.injection[chosen].float(), teacher)


@torch.no_grad()
def collect_features(
    features_of: Callable[[Tensor, Tensor], Features], rows: Sequence[TokenRow], batch_tokens: int = 4096
) -> Features:
    """Run the frozen model, fp32, over rows of similar length together.

    ``features_of``: of padded rows and of the positions in them that count.
    ``rows``: token sequences; at least one position in all.
    ``batch_tokens``: padded tokens in one forward.

    Raises ConfigError: no row has a position to learn from.
    """
    ordered = sorted((row for row in rows if row.positions), key=lambda row: len(row.ids))
    if not ordered:
        raise ConfigError("the gate's data holds no token to learn from")
    parts, start = [], 0
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
            parts.append(features_of(ids, chosen))
            bar.update(end - start)
            start = end
    states, starts, teachers = zip(*parts, strict=True)
    return Features(torch.cat(states, 1), torch.cat(starts), torch.cat(teachers, 1))


def teacher_distribution(teacher_logits: Tensor) -> Tensor:
    """The exit distribution p_1..p_R of raw gate logits [R, N]; fp32, [R, N]."""
    return exit_log_probabilities(teacher_logits.float()).exp()


def lookahead_log_probabilities(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """log of the lookahead student's distribution over depths 2..R from states [R, N, D]; [R - 1, N]."""
    return exit_log_probabilities(F.linear(states[:-1], weight, bias)[..., 0])


def preloop_log_probabilities(start: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """log of the pre-loop student's distribution over depths 1..R from what the loop starts from [N, D]; [R, N]."""
    return F.linear(start, weight, bias).log_softmax(-1).T


def merge_first(p: Tensor) -> Tensor:
    """Move depth 1's probability to depth 2: [R, N] to [R - 1, N]."""
    return torch.cat(((p[0] + p[1])[None], p[2:]))


def mean_kl(target: Tensor, log_student: Tensor) -> Tensor:
    """Mean over tokens of KL(target || student), both [depths, N]; a scalar in nats."""
    return (torch.xlogy(target, target) - target * log_student).sum(0).mean()


def _log_student(kind: str, features: Features, weight: Tensor, bias: Tensor) -> Tensor:
    if kind == "lookahead":
        return lookahead_log_probabilities(features.states, weight, bias)
    return preloop_log_probabilities(features.start, weight, bias)


def _target(kind: str, features: Features) -> Tensor:
    return merge_first(features.teacher) if kind == "lookahead" else features.teacher


def _take(features: Features, index: Tensor) -> Features:
    return Features(features.states[:, index], features.start[index], features.teacher[:, index])


def _minimise(kind: str, features: Features, parameters: list[Tensor], iterations: int, title: str) -> None:
    """L-BFGS on ``parameters`` (weight, bias), or on the bias alone when the weight needs no gradient."""
    weight, bias = parameters
    target = _target(kind, features)
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
    ``features``: states and the teacher's distribution, at least 20 tokens, at least 3 loops for ``lookahead``.
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
    target = _target(kind, test)
    with torch.no_grad():
        constant_kl, kl = (mean_kl(target, _log_student(kind, test, *pair)).item() for pair in (constant, gate))
    return GateFit(gate[0].detach(), gate[1].detach(), constant_kl, kl)


def save_gate(fit: GateFit, kind: str, family: str, path: Path) -> None:
    """Write a gate file: fp32 tensors ``weight``, ``bias``; metadata name kind and family. Replaces ``path`` atomically."""
    partial = path.with_name(path.name + ".partial")
    tensors = {"weight": fit.weight.contiguous(), "bias": fit.bias.contiguous()}
    save_file(tensors, partial, metadata={"format": "pt", "kind": kind, "family": family})
    partial.chmod(0o644)
    os.replace(partial, path)
