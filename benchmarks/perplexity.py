"""``depthbatch bench perplexity``: how well a model foresees a text, by the number of loops, with and without quantised
weights, through the real engine.

The text is cut into pieces of equal length, each a prompt of its own: what stands at a piece's begin is foreseen badly,
whatever the model. All figures are of the same pieces. Errors of quantised weights add up over loops, so each loop count
is an engine of its own, which runs everything with that many.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.common.arguments import positive
from depthbatch.common.config import FIELD_NAMES, EngineConfig, add_config_arguments, config_from_sources
from depthbatch.common.errors import ConfigError
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.common.text_files import read_text
from depthbatch.frontend.tokenizer import load_tokenizer


def add_perplexity_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the text, and what is compared."""
    parser.add_argument("model", metavar="MODEL", help="directory or repo id")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="what is to be foreseen")
    parser.add_argument("--length", type=positive, default=512, help="tokens of a piece (default 512)")
    parser.add_argument("--pieces", type=positive, default=16, help="how many, from the begin of the text (default 16)")
    parser.add_argument(
        "--loops", type=positive, nargs="+", default=None, help="numbers of loops (default: the model's)"
    )
    add_output_argument(parser)
    add_config_arguments(parser, [name for name in FIELD_NAMES if name not in ("model", "max_loops")])


def run_perplexity(args: argparse.Namespace) -> int:
    """Raises ConfigError, ModelError, EngineDeadError."""
    config = config_from_sources(args, model=args.model)
    if args.length < 2 or args.pieces < 1:
        raise ConfigError(f"--length {args.length} --pieces {args.pieces}: there is nothing to foresee")
    try:
        text = read_text(args.text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {args.text}: {error}") from None
    kinds = _kinds(config, args.loops or [None])
    pieces = _pieces(config, text, args)
    rows: list[dict[str, Any]] = []
    for loops in args.loops or [None]:
        by_kind = {}
        for kind in kinds:
            with_these = replace(config, quantization=kind, max_loops=loops)
            by_kind[kind or "as stored"] = _perplexity(with_these, pieces)
        first = next(iter(by_kind.values()))
        relative = {name: value / first - 1.0 for name, value in list(by_kind.items())[1:]}
        rows.append({"loops": loops, "perplexity": by_kind, "increase": relative})
        said = "  ".join(f"{name} {value:.4f}" for name, value in by_kind.items())
        more = "".join(f" ({value:+.2%})" for value in relative.values())
        print(f"loops {loops or 'of the model'}: {said}{more}", file=sys.stderr)
    report = {"model": Path(config.model).name, "text": args.text.name, "length": args.length, "pieces": args.pieces}
    write_json(report | {"dtype": config.dtype, "rows": rows}, args.output)
    return 0


def _kinds(config: EngineConfig, loops: list[int | None]) -> list[str | None]:
    """What is compared: the checkpoint as it is stored, and the quantisation that is asked for. Raises ConfigError or
    ModelError for options that the model refuses, before anything is measured."""
    from depthbatch.worker.models.loader import read_spec

    stored = {read_spec(config.model, config.dtype, config.load_format, r_max).quantization for r_max in loops}
    if config.quantization is None:
        return [None]
    for r_max in loops:
        read_spec(config.model, config.dtype, config.load_format, r_max, quantization=config.quantization)
    if config.quantization in stored:
        raise ConfigError(
            f"--quantization {config.quantization}: the checkpoint of '{config.model}' is stored and run in "
            f"{config.quantization}; there is nothing to compare it with"
        )
    return [None, config.quantization]


def _pieces(config: EngineConfig, text: str, args: argparse.Namespace) -> list[list[int]]:
    """The text's token ids, cut. Raises ConfigError."""
    tokenizer = load_tokenizer(resolve_model_dir(config.model))
    if tokenizer is None:
        raise ConfigError(f"model '{config.model}' has no tokenizer: a text means nothing to it")
    ids = tokenizer.encode_bare(text)
    pieces = [ids[start : start + args.length] for start in range(0, len(ids), args.length)][: args.pieces]
    if len(pieces) < args.pieces or len(pieces[-1]) < args.length:
        raise ConfigError(f"--text {args.text}: {len(ids)} tokens are less than --pieces x --length")
    return pieces


def _perplexity(config: EngineConfig, pieces: list[list[int]]) -> float:
    from depthbatch.frontend.llm import LLM
    from depthbatch.frontend.params import SamplingParams

    with LLM.from_config(config, quiet=True) as llm:
        outputs = llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0))
        scores = [scored.logprob for output in outputs for scored in output.prompt_logprobs]
    return math.exp(-sum(scores) / len(scores))
