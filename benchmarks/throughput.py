"""``depthbatch bench throughput``: tokens per second of the policies, through the real processes.

All requests of a workload are submitted at once; each policy gets an engine of its own, ``cb`` first, all in one run.
Depths are replayed, so that every policy does the same work; prompts are made-up token ids.
"""

import argparse
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from tqdm import tqdm

from depthbatch.benchmarks.flops import stage_flops
from depthbatch.benchmarks.record import (
    COLUMNS,
    Record,
    Setting,
    add_output_argument,
    make_record,
    print_table,
    write_json,
)
from depthbatch.benchmarks.sources import add_workload_arguments, describe_exits, workload_from_arguments
from depthbatch.benchmarks.trace import PolicyChoice, add_scheduling_arguments, chosen_policies, scheduling_options
from depthbatch.benchmarks.workload import Window, Workload
from depthbatch.common.config import FIELD_NAMES, POLICIES, EngineConfig, add_config_arguments, config_from_sources
from depthbatch.common.errors import ConfigError
from depthbatch.common.messages import EngineInfo, SchedulerStats
from depthbatch.worker.device_profile import StageFlops

if TYPE_CHECKING:
    from depthbatch.frontend.llm import LLM

BASELINE = "cb"
_SET_HERE = {
    "model",
    "policy",
    "objective",
    "ttft_target_ms",
    "itl_target_ms",
    "max_num_seqs",
    "min_coda_batch",
    "min_free_slots",
    "max_num_batched_tokens",
}
_WARM_UP_REQUESTS = 4


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, workload, policies and the engine's options."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    add_workload_arguments(parser)
    add_scheduling_arguments(parser)
    parser.add_argument(
        "--policy",
        action="append",
        dest="policies",  # config_from_sources would read "policy"
        help=f"{', '.join(POLICIES)}, or refill:K; may be given several times (default: no-refill, which has no drafts, refill and auto)",
    )
    add_output_argument(parser)
    parser.add_argument(
        "--acceptance", dest="draft_acceptance", default=argparse.SUPPRESS, help="as --draft-acceptance, for short"
    )
    add_config_arguments(parser, [name for name in FIELD_NAMES if name not in _SET_HERE])


def run_throughput(args: argparse.Namespace) -> int:
    """Measures every policy and writes one record, or a list of them when several were asked for."""
    base = config_from_sources(args, model=args.model)
    policies = args.policies or (("refill", "auto") if base.draft_lanes else ("no-refill", "refill", "auto"))
    choices = chosen_policies(policies, args.k)
    flops = stage_flops(base)
    workload: Workload | None = None
    records: list[Record] = []
    for choice in [PolicyChoice(BASELINE, None), *(c for c in choices if c.policy != BASELINE)]:
        k = args.k if choice.k is None else choice.k
        options = scheduling_options(args, k if choice.policy == "refill" else None)
        if choice.policy == BASELINE:
            options |= {"speculation": "off", "draft_depth": None, "draft_acceptance": None}
        config = msgspec.structs.replace(base, policy=choice.policy, **options)
        if workload is None:
            limits = _limits(config)
            workload = fitting(workload_from_arguments(args, limits.r_max, base.seed), limits.max_positions)
            print(describe_exits(args, workload, limits.r_max), file=sys.stderr)
        records.append(measure(config, workload, flops))
        records[-1].compare_with(records[0])
        print_table(records[-1:])
    print_table(records)
    print(COLUMNS, file=sys.stderr)
    only_one = len(choices) == 1
    write_json(records[-1].as_json() if only_one else [record.as_json() for record in records], args.output)
    return 0


def measure(config: EngineConfig, workload: Workload, flops: StageFlops, window: Window | None = None) -> Record:
    """Runs a workload through an engine of its own, all of it or as far as the window goes. Raises ConfigError, ModelError,
    RequestError, EngineDeadError."""
    from depthbatch.frontend.llm import LLM
    from depthbatch.frontend.params import SamplingParams

    if config.max_model_len is None:
        config = msgspec.structs.replace(config, max_model_len=workload.longest)
    with LLM.from_config(config, quiet=True) as llm:
        prompts = [r.prompt(index, llm.info.vocab_size).tolist() for index, r in enumerate(workload.requests)]
        params = [request.sampling() for request in workload.requests]
        others = [prompt[::-1] for prompt in prompts[:_WARM_UP_REQUESTS]]  # of which no prefix is in the cache then
        llm.generate(others, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        with tqdm(total=len(prompts), desc=config.policy, unit="req", file=sys.stderr, mininterval=1.0) as bar:
            first, tokens = _Reading.of(llm), 0
            for _, delta in llm.stream(prompts, params):
                bar.update(delta.finish_reason is not None)
                before, tokens = tokens, tokens + len(delta.token_ids)
                if window is not None and before < window.skip <= tokens:
                    first = _Reading.of(llm)
                if window is not None and tokens >= window.skip + window.tokens:
                    break
            end = _Reading.of(llm)
        info = llm.info
    setting = Setting(config.policy, config.max_num_seqs, effective_k(config, info), info.r_max)
    return make_record(setting, first.stats, end.stats, end.time_s - first.time_s, flops)


class _Reading(NamedTuple):
    """The scheduler's counters, and when they were read."""

    time_s: float
    stats: SchedulerStats

    @classmethod
    def of(cls, llm: "LLM") -> "_Reading":
        return cls(time.perf_counter(), llm.scheduler_stats())


def effective_k(config: EngineConfig, info: EngineInfo) -> int | None:
    """The K that is in force, None where it plays no part."""
    from depthbatch.scheduler.config import SchedulerConfig

    return SchedulerConfig.resolve(config, info).min_coda_batch if config.policy == "refill" else None


class _Limits(NamedTuple):
    """What a model allows, known before an engine runs."""

    r_max: int
    max_positions: int


def _limits(config: EngineConfig) -> _Limits:
    if config.device.startswith("simulated:"):
        from depthbatch.worker.simulated import MAX_POSITIONS, find_profile

        profile = find_profile(config.device.removeprefix("simulated:"))
        return _Limits(config.max_loops or profile.r_max, config.max_model_len or MAX_POSITIONS)
    from depthbatch.worker.models.loader import read_spec

    spec = read_spec(config.model, config.dtype, config.load_format, config.max_loops)
    return _Limits(spec.r_max, config.max_model_len or spec.max_positions)


def fitting(workload: Workload, max_tokens: int) -> Workload:
    """The requests that the model has positions for, as the paper drops what exceeds the context length. Raises
    ConfigError when none does."""
    kept = tuple(request for request in workload.requests if request.total_tokens <= max_tokens)
    dropped = len(workload.requests) - len(kept)
    if not kept:
        raise ConfigError(f"no request of the workload fits into {max_tokens} tokens")
    if dropped:
        print(
            f"{dropped} of {len(workload.requests)} requests are longer than {max_tokens} tokens: dropped",
            file=sys.stderr,
        )
    return Workload(kept)
