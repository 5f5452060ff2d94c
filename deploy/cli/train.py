"""``depthbatch train-demo`` and ``depthbatch train-gate``: trains, and says how good the result is.

A demo model is scored by ``bench accuracy`` through the real engine, a gate by its divergence from the model's own.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch

from depthbatch.benchmarks import accuracy
from depthbatch.benchmarks.questions import heldout_questions
from depthbatch.common.arguments import positive
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.model_dir import DEMO_DIR, resolve_model_dir
from depthbatch.frontend.tokenizer import load_tokenizer
from depthbatch.training.checkpoints import load_huginn, load_ouro
from depthbatch.training.corpus import Encode, read_rows
from depthbatch.training.recipes import HUGINN_MOST_LOOPS, distillation_rows, train_demo, train_demo_huginn
from depthbatch.training.train_gate import KINDS, collect_features, fit_gate, huginn_features, ouro_features, save_gate
from depthbatch.training.trainer import RunConfig
from depthbatch.worker.models.loader import read_spec

# Held-out exact match after so many: demo 99.6 % at full depth; demo-huginn 99.9 % at any depth from 4 loops up.
STEPS = {"demo": 3500, "demo-huginn": 5000}
BATCH_SIZES = {"demo": 80, "demo-huginn": 64}


def add_train_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, size of the run, where it goes."""
    parser.add_argument("--model", choices=sorted(STEPS), default="demo", help="which demo model to train")
    parser.add_argument("--output", type=Path, required=True, help="model directory to write")
    parser.add_argument("--steps", type=positive, help="optimiser steps (default 3500 and 5000)")
    parser.add_argument("--batch-size", type=positive, help="examples a step (default 80 and 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and loop counts")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads")
    parser.add_argument("--checkpoint", type=Path, help="state to resume from (default OUTPUT/training.pt)")
    parser.add_argument("--restart", action="store_true", help="ignore an existing checkpoint")
    parser.add_argument("--examples", type=positive, default=1400, help="held-out questions scored at the end")


def run_train_demo(args: argparse.Namespace) -> int:
    """Trains, exports and scores a demo model. Raises ConfigError when the output or checkpoint cannot be written."""
    torch.set_num_threads(args.threads)
    checkpoint = args.checkpoint or args.output / "training.pt"
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    if not os.access(args.output, os.W_OK):
        raise ConfigError(f"cannot write {args.output}")
    if args.restart:
        for old in (checkpoint, checkpoint.with_name(checkpoint.stem + "-gate.pt")):
            old.unlink(missing_ok=True)
    steps, batch_size = args.steps or STEPS[args.model], args.batch_size or BATCH_SIZES[args.model]
    config = RunConfig(args.seed, steps, batch_size, checkpoint)
    (train_demo if args.model == "demo" else train_demo_huginn)(config, args.output)
    print(report(args.output, args.model, args.examples, args.threads), file=sys.stderr)
    return 0


def report(directory: Path, model: str, examples: int, threads: int) -> str:
    """The tables of a quick ``bench accuracy`` of an exported demo model (``demo`` or ``demo-huginn``)."""
    loops = None if model == "demo" else HUGINN_MOST_LOOPS  # beyond those it was not trained
    config = EngineConfig(model=str(directory), device="cpu", max_loops=loops, threads=threads)
    figures = accuracy.measure(config, heldout_questions(0, examples), quick=True)
    return accuracy.tables({"model": model, "examples": examples} | figures)


def add_train_gate_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, kind of gate, data."""
    parser.add_argument("model", nargs="?", default="demo", help="Ouro or Huginn model, or 'demo'")
    parser.add_argument("--kind", choices=KINDS, default="lookahead", help="which gate to distil")
    parser.add_argument("--data", type=Path, help="text or .jsonl file; the demo's own task for 'demo'")
    parser.add_argument("--output", type=Path, help="file to write (default MODEL/KIND_gate.safetensors)")
    parser.add_argument("--max-tokens", type=positive, default=50_000, help="tokens to learn from")
    parser.add_argument("--length", type=positive, default=512, help="longest row, in tokens")
    parser.add_argument("--iterations", type=positive, default=300, help="L-BFGS iterations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the held-out tenth")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads")


def run_train_gate(args: argparse.Namespace) -> int:
    """Distils a gate and saves it. Raises ModelError when the model is missing, broken or of another family, ConfigError
    for bad data or nothing to learn from."""
    torch.set_num_threads(args.threads)
    directory = resolve_model_dir(args.model)
    output = args.output or directory / f"{args.kind}_gate.safetensors"
    if output.is_dir() or not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise ConfigError(f"cannot write {output}")
    if args.data is None and directory.parent != DEMO_DIR:
        raise ConfigError("--data is needed: a text or .jsonl file like what the model will serve")
    spec = read_spec(args.model)
    if spec.architecture == "huginn":
        features_of = partial(huginn_features, load_huginn(args.model), spec.r_max)
    else:
        features_of = partial(ouro_features, load_ouro(args.model))
    if args.data is None:
        rows = distillation_rows(args.seed)
    else:
        length = min(args.length, spec.max_positions)
        rows = read_rows(args.data, encoder(directory), spec.vocab_size, length, args.max_tokens)
    fit = fit_gate(args.kind, collect_features(features_of, rows), args.seed, args.iterations)
    save_gate(fit, args.kind, spec.architecture, output)
    print(
        f"{output}: KL divergence from the teacher {fit.kl:.4f} nats a token on held-out tokens "
        f"({fit.constant_kl:.4f} for the best constant gate)",
        file=sys.stderr,
    )
    is_default = args.kind == "lookahead" and not spec.default_gate.compares_distances(spec.gates)
    if is_default and output.absolute() == (directory / "lookahead_gate.safetensors").absolute():
        print(
            f"lookahead is the default gate of {args.model} from now on, at the model's exit threshold "
            "(--gate delayed: the model's own)",
            file=sys.stderr,
        )
    return 0


def encoder(directory: Path) -> Encode:
    """The model directory's tokenizer, without what it puts around a text. Raises ModelError on use when it has none."""
    tokenizer = load_tokenizer(directory)

    def encode(text: str) -> list[int]:
        if tokenizer is None:
            raise ModelError(f"{directory} has no tokenizer.json; give the data as JSONL with token_ids")
        return tokenizer.encode(text, add_special_tokens=False, allow_special=True)

    return encode
