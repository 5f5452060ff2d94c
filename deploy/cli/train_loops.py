"""``depthbatch train-loops``: trains adapter and core of a converted model, and shows what more loops are worth."""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from depthbatch.common.arguments import positive
from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.deploy.cli.train import encoder
from depthbatch.training.checkpoints import load_retrofitted
from depthbatch.training.corpus import read_rows
from depthbatch.training.retrofitted import RetrofittedTrainer
from depthbatch.training.train_loops import Depths, Healing, heal, measure, split_rows
from depthbatch.worker.models.checkpoint import read_json

REPORT, FIGURE = "loops.json", "loops.png"


def add_train_loops_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, text, size of the run, where it goes."""
    parser.add_argument("model", metavar="MODEL", help="retrofitted model with Llama blocks (see depthbatch convert)")
    parser.add_argument("output", metavar="DIR", type=Path, help="model directory to write, with loops.json")
    parser.add_argument("--text", type=Path, required=True, help="text or .jsonl file; the last tenth is held out")
    parser.add_argument("--loops", type=positive, default=4, help="loops to train (default 4)")
    parser.add_argument("--steps", type=positive, default=200, help="optimiser steps (default 200)")
    parser.add_argument("--batch-size", type=positive, default=4, help="rows a step (default 4)")
    parser.add_argument("--length", type=positive, default=128, help="tokens a row (default 128)")
    parser.add_argument("--max-tokens", type=positive, default=200_000, help="tokens of the text that are read")
    parser.add_argument(
        "--heldout-rows", type=positive, default=40, help="most rows that are measured with (default 40)"
    )
    parser.add_argument(
        "--rank", type=int, default=16, help="rank of the core's change; 0 trains it whole (default 16)"
    )
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate (default 5e-4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of rows and low-rank matrices")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads")
    parser.add_argument("--figure", action="store_true", help="also draw loops.png (needs matplotlib)")


def run_train_loops(args: argparse.Namespace) -> int:
    """Raises ModelError for a model that is none of these, ConfigError for bad text, options or an output that is there."""
    torch.set_num_threads(args.threads)
    if args.output.is_dir() and any(args.output.iterdir()):
        raise ConfigError(f"{args.output} is not empty")
    if args.rank < 0 or not 0 < args.rate < 1:
        raise ConfigError("--rank must be 0 or more, --rate between 0 and 1")
    source = resolve_model_dir(args.model)
    model, dtype = load_retrofitted(source)
    if args.length > model.plan.max_positions:
        raise ConfigError(f"--length {args.length} is more than the model's {model.plan.max_positions} positions")
    rows = read_rows(args.text, encoder(source), model.plan.vocab, args.length + 1, args.max_tokens)
    train, heldout = split_rows([row.ids for row in rows], args.length)
    heldout = heldout[: args.heldout_rows]
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror}") from None
    before = measure(model, heldout, args.loops)
    run = Healing(args.loops, args.steps, args.batch_size, args.rate, args.rank, args.seed)
    losses = list(heal(model, train, run))
    after = measure(model, heldout, args.loops)
    _write_model(model, dtype, source, args.output, args.loops)
    report = {
        "model": args.model,
        "text": args.text.name,
        "run": run._asdict() | {"length": args.length, "rows": len(train), "heldout_rows": len(heldout)},
        "loss": losses,
        "before": before.as_json(),
        "after": after.as_json(),
    }
    (args.output / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.figure:
        from depthbatch.benchmarks.figures import draw_loops

        draw_loops(report, args.output / FIGURE)
    print(table(before, after), file=sys.stderr)
    return 0


def table(before: Depths, after: Depths) -> str:
    """Perplexity by loops, and mean exit depths, before and after."""
    lines = [f"{'loops':>22}" + "".join(f"{loops:>9}" for loops in range(1, len(before.perplexity) + 1))]
    for name, depths in (("before", before), ("after", after)):
        lines.append(f"{'perplexity ' + name:>22}" + "".join(f"{value:>9.3f}" for value in depths.perplexity))
    for threshold, exits in after.exits.items():
        means = (sum(depths) / len(depths) for depths in (before.exits[threshold], exits))
        lines.append(
            f"mean exit depth at convergence {threshold:g}: " + " before, ".join(f"{m:.2f}" for m in means) + " after"
        )
    best = min(range(len(after.perplexity)), key=after.perplexity.__getitem__) + 1
    lines.append(f"best after {best} loop{'s' if best > 1 else ''}")
    return "\n".join(lines)


def _write_model(model: RetrofittedTrainer, dtype: torch.dtype, source: Path, target: Path, loops: int) -> None:
    """The directory anew, with the weights in the type they had and ``loops`` as the model's own number."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt") and not path.name.endswith("index.json"):
            shutil.copyfile(path, target / path.name)
    text = json.dumps(read_json(source / "config.json") | {"mean_recurrence": loops}, indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    try:
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror}") from None
