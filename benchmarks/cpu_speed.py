"""``depthbatch bench cpu WHAT``: the CPU device. Everything is side by side in one run: only ratios within it mean anything.

``engine``: the engine against the eager loop one would write first. Ouro shape 12 x 512, vocabulary 8192, dummy bf16 weights,
prompts of 32, outputs of 64, replayed depths of mean 2.7; policies through the real processes against the plain loop
with the same threads; a core step's time outside torch operators and kernels, against the step.

``policies``: ``auto`` against the fixed policies. One engine a policy (cb, no-refill, refill with K = 1 and K = W/4, auto),
all alive, serve that workload in turns; the order rotates with every round, so that what else the machine does meets all
alike. Reported are the median over rounds of tokens/s, and auto against the fixed policy with the best median, round by
round. The first round, in which things are learned, is thrown away.

``step``: benchmarks/cpu_step.py.

``kv``, ``all-reduce``, ``drafts`` and ``tokens`` have modules of their own.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthbatch.benchmarks.all_reduce import add_all_reduce_arguments, run_all_reduce
from depthbatch.benchmarks.cpu_drafts import add_cpu_drafts_arguments, run_cpu_drafts
from depthbatch.benchmarks.cpu_kv import add_cpu_kv_arguments, run_cpu_kv
from depthbatch.benchmarks.cpu_step import SHAPES, add_step_arguments, kernels_in_use, run_step
from depthbatch.benchmarks.cpu_tokens import add_tokens_arguments, run_tokens
from depthbatch.benchmarks.flops import stage_flops
from depthbatch.benchmarks.plain_loop import PlainLoop
from depthbatch.benchmarks.record import Record, add_output_argument, print_table, write_json
from depthbatch.benchmarks.throughput import measure
from depthbatch.benchmarks.trace import PolicyChoice
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.arguments import positive, seconds, width
from depthbatch.common.config import ASYNC_MODES, KV_LAYOUTS, EngineConfig
from depthbatch.common.frames import ROW_AUX, ROW_FIELDS, ROW_LANE, ROW_POSITION, ROW_SLOT, Stage
from depthbatch.common.messages import StageBatch
from depthbatch.frontend.llm import LLM
from depthbatch.worker.build import build_runner

SHAPE = SHAPES["12x512"]
PROMPT, OUTPUT = 32, 64
DEPTHS, WEIGHTS = (2, 3, 4), (0.45, 0.40, 0.15)  # mean 2.7
AUTO = "auto"


def add_cpu_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, each with options of its own."""
    what = parser.add_subparsers(metavar="WHAT", required=True)
    engine = what.add_parser("engine", help="the engine against a plain eager loop", allow_abbrev=False)
    engine.add_argument("--w", type=width, default=32, help="W: most active sequences")
    engine.add_argument("--rounds", type=positive, default=4, help="requests per slot")
    engine.add_argument(
        "--layouts", nargs="*", choices=KV_LAYOUTS, default=["last_exited", "single"], help="none: full depth alone"
    )
    policies = what.add_parser("policies", help="auto against the fixed policies", allow_abbrev=False)
    policies.add_argument("--w", type=width, default=16, help="W: most active sequences")
    policies.add_argument("--requests-per-slot", type=positive, default=2)
    policies.add_argument("--async-scheduling", choices=ASYNC_MODES, default="lookahead")
    policies.add_argument(
        "--seconds", type=seconds, default=240.0, help="no round begins after so many, start included"
    )
    step = what.add_parser("step", help="the kernels of a core step", allow_abbrev=False)
    add_step_arguments(step)
    kv = what.add_parser("kv", help="a core step with quantised K and V beside plain ones", allow_abbrev=False)
    add_cpu_kv_arguments(kv)
    sums = what.add_parser("all-reduce", help="what ranks pay to add up a layer's output", allow_abbrev=False)
    add_all_reduce_arguments(sums)
    drafts = what.add_parser("drafts", help="speculation beside none, with a real model", allow_abbrev=False)
    add_cpu_drafts_arguments(drafts)
    tokens = what.add_parser("tokens", help="what a token costs, stage by stage", allow_abbrev=False)
    add_tokens_arguments(tokens)
    for one, threads in ((engine, None), (policies, 1), (step, None), (tokens, None)):
        one.add_argument(
            "--threads", type=positive, default=threads, help=f"of a worker (default: {threads or 'torch decides'})"
        )
    runs: dict[argparse.ArgumentParser, Callable[[argparse.Namespace], dict[str, Any]]] = {
        engine: run_engine,
        policies: run_policies,
        step: run_step,
        kv: run_cpu_kv,
        tokens: run_tokens,
        sums: run_all_reduce,
        drafts: run_cpu_drafts,
    }
    for one, run in runs.items():
        add_output_argument(one)
        one.set_defaults(measure=run)


def run_cpu(args: argparse.Namespace) -> int:
    """Measures; writes one JSON object, prints tables to stderr. Raises ConfigError, ModelError, EngineDeadError."""
    write_json(args.measure(args), args.output)
    return 0


def make_workload(requests: int) -> Workload:
    """Equal requests with depths drawn per decode token."""
    rng = np.random.default_rng(0)
    depths = rng.choice(DEPTHS, size=(requests, OUTPUT - 1), p=WEIGHTS)
    return Workload(tuple(WorkloadRequest(PROMPT, OUTPUT, exit_depths=tuple(row)) for row in depths.tolist()))


@contextmanager
def dummy_model() -> Iterator[str]:
    """A directory with the shape's config.json alone."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPE.config()))
        yield directory


def engine_config(directory: str, w: int, threads: int | None, **options: Any) -> EngineConfig:
    """Of the model in ``directory``, without the prefix cache: rounds have the same prompts."""
    return EngineConfig(
        model=directory,
        load_format="dummy",
        device="cpu",
        max_num_seqs=w,
        threads=threads,
        prefix_caching="off",
        **options,
    )


# --- the engine against a plain loop


def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    result: dict[str, Any] = {"w": args.w, "shape": SHAPE._asdict(), "threads": torch.get_num_threads()}
    plain = {name: plain_tokens_per_s(args.w, name == "gather") for name in ("contiguous", "gather")}
    result["plain_tokens_per_s"] = plain
    workload = make_workload(args.rounds * args.w)
    with dummy_model() as directory:
        for layout in args.layouts:
            result[layout] = _by_policy(directory, layout, args.w, args.threads, workload, plain)
        result["full_depth"] = _full_depth(directory, args, plain["contiguous"])
        result["core_step"] = core_step(directory, args.w, args.threads)
    return result


def _full_depth(directory: str, args: argparse.Namespace, plain: float) -> dict[str, dict[str, Any]]:
    """cb with every token at full depth, which is what the plain loop does, with either kind of weights: tokens/s, and what
    share of the time each stage takes. In turns; the best of each."""
    requests = (WorkloadRequest(PROMPT, OUTPUT),) * (args.rounds * args.w)
    best: dict[str, Record] = {}
    for kind in ("bf16", "int8") * 2:
        quantization = "int8" if kind == "int8" else None
        config = engine_config(directory, args.w, args.threads, policy="cb", quantization=quantization)
        record = measure(config, Workload(requests), stage_flops(config))
        if kind not in best or record.tokens_per_s > best[kind].tokens_per_s:
            best[kind] = record
    figures = {
        kind: {
            "tokens_per_s": record.tokens_per_s,
            "relative_to_plain": record.tokens_per_s / plain,
            "relative_to_bf16": record.tokens_per_s / best["bf16"].tokens_per_s,
            "stage_share": record.stage_share,
            "idle_share": record.idle_share,
        }
        for kind, record in best.items()
    }
    for kind, values in figures.items():
        print(f"full depth, {kind}: {json.dumps(values)}", file=sys.stderr)
    return figures


def plain_tokens_per_s(batch: int, gather: bool) -> float:
    """One cohort of the plain loop, after a short one to warm up."""
    prompts = torch.randint(1, SHAPE.vocab, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    loop = PlainLoop(SHAPE, batch, PROMPT + OUTPUT, gather)
    loop.generate(prompts, 2)
    return batch * OUTPUT / loop.generate(prompts, OUTPUT)


def _by_policy(
    directory: str, layout: str, w: int, threads: int | None, workload: Workload, plain: dict[str, float]
) -> dict[str, dict[str, float]]:
    """tokens/s of each policy with its ratios to cb and to the plain loops."""
    records = []
    for policy in ("cb", "no-refill", "refill"):
        config = engine_config(directory, w, threads, policy=policy, kv_layout=layout)
        records.append(measure(config, workload, stage_flops(config)))
        records[-1].compare_with(records[0])
    print_table(records)
    base = records[0].tokens_per_s
    return {
        record.policy: {
            "tokens_per_s": record.tokens_per_s,
            "relative_to_cb": record.tokens_per_s / base,
            "relative_to_plain": record.tokens_per_s / plain["contiguous"],
            "relative_to_plain_gather": record.tokens_per_s / plain["gather"],
        }
        for record in records
    }


def core_step(directory: str, w: int, threads: int | None) -> dict[str, float]:
    """A worker's core step at W rows in the middle of the outputs, and its share outside kernels and operators."""
    config = engine_config(directory, w, threads)
    with kernel_clock() as kernel:
        runner = build_runner(config).runner
    frame = np.zeros((ROW_FIELDS, w), np.int32)
    frame[ROW_SLOT] = frame[ROW_LANE] = np.arange(1, w + 1)
    frame[ROW_POSITION] = PROMPT + OUTPUT // 2
    frame[ROW_AUX] = 2
    header = StageBatch(1, Stage.CORE, w, w)

    def steps(count: int) -> float:
        start_s = time.perf_counter()
        for _ in range(count):
            runner.read(runner.launch(header, frame.reshape(-1)))
        return (time.perf_counter() - start_s) / count

    steps(20)
    kernel.seconds = 0.0
    step_s = steps(200)
    kernel_s = kernel.seconds / 200
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        steps(20)
    events = [event for event in profile.key_averages() if event.key.startswith(("aten::", "mkldnn::"))]
    operators_s = sum(event.self_cpu_time_total for event in events) / 20e6
    figures = {
        "ms": 1e3 * step_s,
        "kernel_share": kernel_s / step_s,
        "operator_share": operators_s / step_s,
        "share_outside": 1.0 - (kernel_s + operators_s) / step_s,
    }
    print("core step: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()), file=sys.stderr)
    return figures


class KernelClock:
    """Adds up the time spent inside a function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.seconds = 0.0
        self._function = function

    def __call__(self, *args: int) -> None:
        start_s = time.perf_counter()
        self._function(*args)
        self.seconds += time.perf_counter() - start_s


@contextmanager
def kernel_clock() -> Iterator[KernelClock]:
    """A clock in place of the C core step of the kernels in use; those that are fused meanwhile are timed for good."""
    kernels = kernels_in_use().by_type[torch.bfloat16]
    plain = kernels.core
    clock = KernelClock(plain)
    kernels.core = clock
    try:
        yield clock
    finally:
        kernels.core = plain


# --- auto against the fixed policies


def run_policies(args: argparse.Namespace) -> dict[str, Any]:
    start_s = time.monotonic()
    choices = ["cb", "no-refill", "refill:1", f"refill:{max(1, args.w // 4)}", AUTO]
    rounds: list[dict[str, float]] = []
    with dummy_model() as directory, ExitStack() as stack:
        engines = {choice: _Engine(choice, directory, args, stack) for choice in choices}
        while len(rounds) < 2 or time.monotonic() - start_s < args.seconds:
            turn = len(rounds) % len(choices)
            if not rounds:
                print(f"engines are up after {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
            rounds.append({choice: engines[choice].tokens_per_s() for choice in choices[turn:] + choices[:turn]})
            print(len(rounds), {c: round(rounds[-1][c], 1) for c in choices}, file=sys.stderr, flush=True)
    settings = {"w": args.w, "threads": args.threads, "async_scheduling": args.async_scheduling}
    return summary(rounds[1:]) | settings


class _Engine:
    """A policy's engine and its workload."""

    def __init__(self, choice: str, directory: str, args: argparse.Namespace, stack: ExitStack) -> None:
        policy = PolicyChoice.parse(choice)
        workload = make_workload(args.requests_per_slot * args.w)
        config = engine_config(
            directory,
            args.w,
            args.threads,
            policy=policy.policy,
            min_coda_batch=policy.k,
            max_model_len=workload.longest,
            kv_blocks=args.w * workload.longest,  # five engines share the memory; a block holds at least one token
            async_scheduling=args.async_scheduling,
        )
        self._llm = stack.enter_context(LLM.from_config(config, quiet=True))
        vocabulary = self._llm.info.vocab_size
        self._prompts = [r.prompt(index, vocabulary).tolist() for index, r in enumerate(workload.requests)]
        self._params = [request.sampling() for request in workload.requests]
        self._tokens = sum(request.output_tokens for request in workload.requests)

    def tokens_per_s(self) -> float:
        """Serves the workload once."""
        start_s = time.perf_counter()
        self._llm.generate(self._prompts, self._params)
        return self._tokens / (time.perf_counter() - start_s)


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, and auto round by round against the fixed policy whose median is best."""
    names = list(rounds[0])
    medians = {name: float(np.median([r[name] for r in rounds])) for name in sorted(names)}
    best = max((name for name in names if name != AUTO), key=lambda name: medians[name])
    ratios = np.array([r[AUTO] / r[best] for r in rounds])
    quartiles = np.percentile(ratios, (25, 50, 75))
    return {
        "rounds": len(rounds),
        "median_tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
        "relative_to_cb": {name: round(float(np.median([r[name] / r["cb"] for r in rounds])), 4) for name in medians},
        "best_fixed": best,
        "auto_vs_best_quartiles": [round(float(q), 4) for q in quartiles],
    }
