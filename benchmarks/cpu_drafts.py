"""``depthbatch bench cpu drafts MODEL``: what drafts are worth on the CPU device, with real weights and real readouts.

Two engines for each number of streams, one without drafts and one with, both alive, answer the same prompts in turns; who is
first changes with every round. Prompts are the demo task's held-out questions or the texts below, greedy, each continued for
``--tokens`` tokens whatever the model says. The first round, in which things are learned, is thrown away. Reported: medians
over rounds of tokens/s, the ratio round by round, how many drafts were right, and the share of requests with equal tokens (all
of them, in fp32).
"""

import argparse
import sys
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import numpy as np

from depthbatch.benchmarks.questions import heldout_questions
from depthbatch.benchmarks.record import acceptance, draft_lanes_mean
from depthbatch.common.arguments import positive, seconds, width
from depthbatch.common.config import EngineConfig, add_config_arguments, config_from_sources
from depthbatch.common.errors import ConfigError
from depthbatch.common.stats import CoreStats
from depthbatch.frontend.llm import LLM
from depthbatch.frontend.params import SamplingParams

ENGINE_OPTIONS = (
    "dtype",
    "policy",
    "gate",
    "exit_threshold",
    "max_loops",
    "speculation",
    "draft_depth",
    "threads",
    "async_scheduling",
)
TEXTS = (
    "The lighthouse keeper climbed the stairs every evening to",
    "A good loaf of bread needs only flour, water, salt and",
    "In the spring the river rises, because the snow in the mountains",
    "The first railway between the two towns was built in",
    "My grandmother taught me how to repair a clock. First you",
    "Bees find their way back to the hive by",
    "The library was quiet except for",
    "To boil an egg so that the yolk stays soft,",
)


class Turn(NamedTuple):
    """One round of one engine."""

    tokens_per_s: float
    outputs: list[tuple[int, ...]]
    depth: float  # mean over decode tokens


def add_cpu_drafts_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, load and the engine's options."""
    parser.add_argument("model", metavar="MODEL", help="directory, repo id, 'demo' or 'demo-huginn'")
    parser.add_argument("--streams", type=width, nargs="+", default=[1, 8], help="sequences at a time")
    parser.add_argument("--requests-per-stream", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=64, help="of each output")
    parser.add_argument(
        "--seconds", type=seconds, default=60.0, help="no round begins after so many, for each --streams"
    )
    add_config_arguments(parser, ENGINE_OPTIONS)


def run_cpu_drafts(args: argparse.Namespace) -> dict[str, Any]:
    """By number of streams. Raises ConfigError, ModelError, EngineDeadError."""
    config = msgspec.structs.replace(
        config_from_sources(args, model=args.model),
        device="cpu",
        kv_layout="last_exited",
        generation_config="off",
        prefix_caching="off",
    )
    if not config.draft_lanes:
        raise ConfigError("bench cpu drafts needs --speculation")
    return {"model": args.model, "tokens": args.tokens} | {
        "by_streams": [_measure(config, streams, args) for streams in args.streams]
    }


def _measure(config: EngineConfig, streams: int, args: argparse.Namespace) -> dict[str, Any]:
    count = streams * args.requests_per_stream
    prompts = [each.prompt for each in heldout_questions(0, count)]
    if not args.model.startswith("demo"):
        prompts = [TEXTS[index % len(TEXTS)] for index in range(count)]
    with ExitStack() as stack:
        with_drafts, without = (
            stack.enter_context(LLM.from_config(each, quiet=True)) for each in _configs(config, streams)
        )
        engines = {"drafts": with_drafts, "none": without}
        rounds: list[dict[str, Turn]] = []
        before, start_s = CoreStats(), time.monotonic()
        while len(rounds) < 2 or time.monotonic() - start_s < args.seconds:
            order = list(engines) if len(rounds) % 2 else list(reversed(engines))
            rounds.append({name: _serve(engines[name], prompts, args.tokens) for name in order})
            if len(rounds) == 1:
                before = _core_stats(with_drafts)
        after, info = _core_stats(with_drafts), with_drafts.info
    return {
        "streams": streams,
        "dtype": info.dtype,
        "gate": info.default_gate.label,
        "r_max": info.r_max,
        "speculation": config.speculation,
        "draft_depth": config.draft_depth,
    } | summary(rounds[1:], before, after)


def _configs(config: EngineConfig, streams: int) -> tuple[EngineConfig, EngineConfig]:
    """With drafts and without."""
    config = msgspec.structs.replace(config, max_num_seqs=streams)
    return config, msgspec.structs.replace(config, speculation="off", draft_depth=None)


def _serve(llm: LLM, prompts: list[str], tokens: int) -> Turn:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start_s
    depths = [depth for output in outputs for depth in output.exit_depths[1:]]
    return Turn(
        sum(len(output.token_ids) for output in outputs) / seconds,
        [tuple(output.token_ids) for output in outputs],
        float(np.mean(depths)) if depths else float(llm.info.r_max),
    )


def _core_stats(llm: LLM) -> CoreStats:
    return llm.scheduler_stats().core or CoreStats()


def summary(rounds: list[dict[str, Turn]], before: CoreStats, after: CoreStats) -> dict[str, Any]:
    """Medians over rounds, the ratio within each, and what ``after - before`` says of drafts."""
    ratios = np.array([each["drafts"].tokens_per_s / each["none"].tokens_per_s for each in rounds])
    last = rounds[-1]
    equal = [mine == theirs for mine, theirs in zip(last["drafts"].outputs, last["none"].outputs, strict=True)]
    core = [each.stages["core"].rows.sum if "core" in each.stages else 0.0 for each in (before, after)]
    result = {
        "rounds": len(rounds),
        "tokens_per_s": {
            name: round(float(np.median([r[name].tokens_per_s for r in rounds])), 1) for name in ("none", "drafts")
        },
        "ratio_quartiles": [round(float(q), 3) for q in np.percentile(ratios, (25, 50, 75))],
        "mean_depth": round(last["none"].depth, 2),
        "acceptance": acceptance(before, after),
        "draft_lanes_mean": round(draft_lanes_mean(after.draft_rows - before.draft_rows, core[1] - core[0]), 2),
        "equal_outputs": sum(equal) / len(equal),
    }
    print(", ".join(f"{name} {value}" for name, value in result.items()), file=sys.stderr, flush=True)
    return result
