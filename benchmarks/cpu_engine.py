"""``python -m depthbatch.benchmarks.cpu_engine``: the CPU engine against a plain eager loop, side by side in one run.

Ouro shape 12 x 512, vocabulary 8192, dummy bf16 weights, prompts of 32, outputs of 64, replayed depths of mean 2.7.
Everything is a ratio within this run: policies through the real processes against the plain loop with the same threads;
a core step's time outside torch operators and kernels, against the step.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthbatch.benchmarks.flops import stage_flops
from depthbatch.benchmarks.plain_loop import PlainLoop, Shape
from depthbatch.benchmarks.record import print_table
from depthbatch.benchmarks.throughput import measure
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import Stage
from depthbatch.common.messages import StageBatch
from depthbatch.worker.attention.cpu_stack import FusedStack
from depthbatch.worker.build import build_runner

SHAPE = Shape(layers=12, hidden=512, heads=8, intermediate=1408, vocab=8192, loops=4)
PROMPT, OUTPUT = 32, 64
DEPTHS, WEIGHTS = (2, 3, 4), (0.45, 0.40, 0.15)  # mean 2.7


def make_workload(requests: int) -> Workload:
    """Equal requests with depths drawn per decode token."""
    rng = np.random.default_rng(0)
    depths = rng.choice(DEPTHS, size=(requests, OUTPUT - 1), p=WEIGHTS)
    return Workload(tuple(WorkloadRequest(PROMPT, OUTPUT, exit_depths=tuple(row)) for row in depths.tolist()))


def plain_tokens_per_s(batch: int, gather: bool) -> float:
    """One cohort of the plain loop, after a short one to warm up."""
    prompts = torch.randint(1, SHAPE.vocab, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    loop = PlainLoop(SHAPE, batch, PROMPT + OUTPUT, gather)
    loop.generate(prompts, 2)
    return batch * OUTPUT / loop.generate(prompts, OUTPUT)


def main() -> int:
    """Prints tables to stderr and one JSON object to stdout (or --output)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--w", type=int, default=32, help="W: most active sequences")
    parser.add_argument("--rounds", type=int, default=4, help="requests per slot")
    parser.add_argument("--layouts", nargs="+", default=["last_exited", "single"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    result: dict[str, object] = {"w": args.w, "shape": SHAPE._asdict(), "threads": torch.get_num_threads()}
    plain = {name: plain_tokens_per_s(args.w, name == "gather") for name in ("contiguous", "gather")}
    result["plain_tokens_per_s"] = plain
    workload = make_workload(args.rounds * args.w)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPE.config()))
        for layout in args.layouts:
            result[layout] = _policies(directory, layout, args.w, args.threads, workload, plain)
        result["core_step"] = core_step(directory, args.w, args.threads)
    text = json.dumps(result, indent=1)
    if args.output:
        Path(args.output).write_text(text + "\n")
    else:
        print(text)
    return 0


def _policies(
    directory: str, layout: str, w: int, threads: int | None, workload: Workload, plain: dict[str, float]
) -> dict[str, dict[str, float]]:
    """tokens/s of each policy with its ratios to cb and to the plain loops."""
    records = []
    for policy in ("cb", "no-refill", "refill"):
        config = EngineConfig(
            model=directory,
            load_format="dummy",
            device="cpu",
            policy=policy,
            max_num_seqs=w,
            kv_layout=layout,
            threads=threads,
            async_scheduling="lookahead",
        )
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
    kernel = KernelClock()
    with kernel.installed():
        config = EngineConfig(model=directory, load_format="dummy", device="cpu", max_num_seqs=w, threads=threads)
        runner = build_runner(config).runner
    frame = np.zeros((3, w), np.int32)
    frame[0] = np.arange(1, w + 1)
    frame[1] = PROMPT + OUTPUT // 2
    frame[2] = 2
    header = StageBatch(1, Stage.CORE, w, w)

    def steps(count: int) -> float:
        start_s = time.perf_counter()
        for _ in range(count):
            runner.run(header, frame.reshape(-1))
        return (time.perf_counter() - start_s) / count

    steps(20)
    kernel.seconds = 0.0
    step_s = steps(200)
    kernel_s = kernel.seconds / 200
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        steps(20)
    operators_s = sum(e.self_cpu_time_total for e in profile.key_averages() if e.key.startswith("aten::")) / 20e6
    figures = {
        "ms": 1e3 * step_s,
        "kernel_share": kernel_s / step_s,
        "operator_share": operators_s / step_s,
        "share_outside": 1.0 - (kernel_s + operators_s) / step_s,
    }
    print("core step: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()), file=sys.stderr)
    return figures


class KernelClock:
    """Adds up the time spent inside the fused C stack."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stacks that are fused meanwhile are timed for good."""
        plain = FusedStack.__init__

        def timed_init(stack: FusedStack, args: Any, widths: Any, function: Callable[..., Any], kept: Any) -> None:
            plain(stack, args, widths, partial(self._timed, function), kept)

        FusedStack.__init__ = timed_init  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            FusedStack.__init__ = plain  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any], *args: Any) -> None:
        start_s = time.perf_counter()
        function(*args)
        self.seconds += time.perf_counter() - start_s


if __name__ == "__main__":
    raise SystemExit(main())
