"""``depthbatch bench cpu WHAT``: the CPU device. Everything is side by side in one run: only ratios within it mean anything.

``engine``: the engine against the eager loop one would write first. Ouro shape 12 x 512, vocabulary 8192, dummy bf16 weights,
prompts of 32, outputs of 64, replayed depths of mean 2.7; policies through the real processes against the plain loop
with the same threads; a core step's time outside torch operators and kernels, against the step.

``policies``: ``auto`` against the fixed policies. One engine a policy (cb, no-refill, refill with K = 1 and K = W/4, auto),
all alive, serve that workload in turns; the order rotates with every round, so that what else the machine does meets all
alike. Reported are the median over rounds of tokens/s, and auto against the fixed policy with the best median, round by
round. The first round, in which things are learned, is thrown away.

``step``: the kernels of one core step against what the machine can do. Bounds are measured: bytes over the read bandwidth of
DRAM, operations over the multiply-add rate; a kernel's bound is the larger. Every kernel is timed over all layers in turn,
so weights and KV come from DRAM as they do in a step, beside the plain way to compute the same: F.linear, oneDNN's
blocked weights, gather + SDPA, operator by operator. Times are the least of several rounds.

``all-reduce`` and ``drafts`` have modules of their own.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.benchmarks.all_reduce import add_all_reduce_arguments, run_all_reduce
from depthbatch.benchmarks.cpu_drafts import add_cpu_drafts_arguments, run_cpu_drafts
from depthbatch.benchmarks.flops import stage_flops
from depthbatch.benchmarks.plain_loop import PlainLoop, Shape
from depthbatch.benchmarks.record import print_table, write_json
from depthbatch.benchmarks.throughput import measure
from depthbatch.benchmarks.trace import PolicyChoice
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import ROW_AUX, ROW_FIELDS, ROW_LANE, ROW_POSITION, ROW_SLOT, Stage
from depthbatch.common.messages import StageBatch
from depthbatch.frontend.llm import LLM
from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry, DecodeRows
from depthbatch.worker.attention.select import select_backend
from depthbatch.worker.build import build_runner
from depthbatch.worker.layers.blocks import Block, BlockStack
from depthbatch.worker.layers.cpu.library import Kernels, cpu_kernels
from depthbatch.worker.layers.cpu.memory import zeros_on_large_pages
from depthbatch.worker.layers.linear import BlockedProduct, GatedLinear, Linear
from depthbatch.worker.layers.rotary import Rotation

SHAPE = Shape(layers=12, hidden=512, heads=8, intermediate=1408, vocab=8192, loops=4)
PROMPT, OUTPUT = 32, 64
DEPTHS, WEIGHTS = (2, 3, 4), (0.45, 0.40, 0.15)  # mean 2.7
AUTO = "auto"
PRODUCTS = {
    "qkv": (3 * SHAPE.hidden, SHAPE.hidden),
    "out": (SHAPE.hidden, SHAPE.hidden),
    "gate_up": (2 * SHAPE.intermediate, SHAPE.hidden),
    "down": (SHAPE.hidden, SHAPE.intermediate),
}
BANDWIDTH_BYTES = 256 << 20  # well beyond any last-level cache of a desktop or a share of a server
PEAK_ROUNDS = 400_000


def add_cpu_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, each with options of its own."""
    what = parser.add_subparsers(metavar="WHAT", required=True)
    engine = what.add_parser("engine", help="the engine against a plain eager loop", allow_abbrev=False)
    engine.add_argument("--w", type=int, default=32, help="W: most active sequences")
    engine.add_argument("--rounds", type=int, default=4, help="requests per slot")
    engine.add_argument("--layouts", nargs="+", default=["last_exited", "single"])
    policies = what.add_parser("policies", help="auto against the fixed policies", allow_abbrev=False)
    policies.add_argument("--w", type=int, default=16, help="W: most active sequences")
    policies.add_argument("--requests-per-slot", type=int, default=2)
    policies.add_argument("--async-scheduling", default="lookahead")
    policies.add_argument("--seconds", type=float, default=240.0, help="no round begins after so many, start included")
    step = what.add_parser("step", help="the kernels of a core step", allow_abbrev=False)
    step.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    step.add_argument("--contexts", type=int, nargs="+", default=[64, 256])
    step.add_argument("--seconds", type=float, default=0.15, help="time for each figure")
    sums = what.add_parser("all-reduce", help="what ranks pay to add up a layer's output", allow_abbrev=False)
    add_all_reduce_arguments(sums)
    sums.add_argument("--output", metavar="FILE.json", help="where the JSON goes (default: stdout)")
    sums.set_defaults(measure=run_all_reduce)
    drafts = what.add_parser("drafts", help="speculation beside none, with a real model", allow_abbrev=False)
    add_cpu_drafts_arguments(drafts)
    drafts.add_argument("--output", metavar="FILE.json", help="where the JSON goes (default: stdout)")
    drafts.set_defaults(measure=run_cpu_drafts)
    for one, run, threads in ((engine, run_engine, None), (policies, run_policies, 1), (step, run_step, None)):
        one.add_argument(
            "--threads", type=int, default=threads, help=f"of a worker (default: {threads or 'torch decides'})"
        )
        one.add_argument("--output", metavar="FILE.json", help="where the JSON goes (default: stdout)")
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


def _kernels() -> Kernels:
    """The C kernels in use. Raises ConfigError when there are none."""
    kernels = cpu_kernels()
    if kernels is None:
        raise ConfigError("bench cpu: the C kernels are not in use; there is nothing to compare")
    return kernels


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
        result["core_step"] = core_step(directory, args.w, args.threads)
    return result


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
    config = EngineConfig(model=directory, load_format="dummy", device="cpu", max_num_seqs=w, threads=threads)
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
    """A clock in place of the C stack of the kernels in use; stacks that are fused meanwhile are timed for good."""
    kernels = _kernels().by_type[torch.bfloat16]
    plain = kernels.stack
    if plain is None:
        raise ConfigError("bench cpu: this machine has no C kernels for whole stacks in bf16")
    clock = KernelClock(plain)
    kernels.stack = clock
    try:
        yield clock
    finally:
        kernels.stack = plain


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
        config = EngineConfig(
            model=directory,
            load_format="dummy",
            device="cpu",
            dtype="bfloat16",
            policy=policy.policy,
            min_coda_batch=policy.k,
            max_num_seqs=args.w,
            max_model_len=workload.longest,
            kv_blocks=args.w * workload.longest,  # five engines share the memory; a block holds at least one token
            threads=args.threads,
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


# --- the kernels of a core step


class Machine(NamedTuple):
    """Measured limits with the threads in use."""

    bytes_per_s: float
    operations_per_s: float  # bf16 multiply-adds count two

    def bound_us(self, size_bytes: float, operations: float) -> float:
        return 1e6 * max(size_bytes / self.bytes_per_s, operations / self.operations_per_s)


class Row(NamedTuple):
    """One line of the report: a kernel at a batch size."""

    kernel: str
    batch: int
    bound_us: float
    times_us: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"of_bound": next(iter(self.times_us.values())) / self.bound_us}


def least_us(run: Callable[[], object], seconds: float) -> float:
    """Least time of a run within ``seconds``, at least three runs after a warm-up."""
    run()
    best, start, runs = float("inf"), time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
        runs += 1
    return 1e6 * best


def measure_machine(kernels: Kernels, seconds: float) -> Machine:
    """Read bandwidth of DRAM and the multiply-add rate of all threads."""
    memory = zeros_on_large_pages((BANDWIDTH_BYTES,), torch.uint8).fill_(1)
    read_us = least_us(lambda: kernels.read(memory.data_ptr(), BANDWIDTH_BYTES), seconds)
    result = torch.zeros(1)
    operations = kernels.multiply(PEAK_ROUNDS, True, result.data_ptr())
    multiply_us = least_us(lambda: kernels.multiply(PEAK_ROUNDS, True, result.data_ptr()), seconds)
    return Machine(BANDWIDTH_BYTES / read_us * 1e6, operations / multiply_us * 1e6)


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).mul_(columns**-0.5).bfloat16()


class LinearBench:
    """One of the four products of a layer, SHAPE.layers times with weights of their own, as F.linear, blocked and packed."""

    def __init__(self, name: str) -> None:
        self.name, self.shape = name, PRODUCTS[name]
        self.weights = [random_matrix(*self.shape) for _ in range(SHAPE.layers)]
        self.packed = [Linear(w) for w in self.weights]
        self.blocked = [BlockedProduct(w) for w in self.weights] if hasattr(torch.ops, "mkldnn") else []

    def row(self, batch: int, machine: Machine, seconds: float) -> Row:
        x = torch.randn(batch, self.shape[1]).bfloat16()
        times = {
            "ours": least_us(lambda: [f(x) for f in self.packed], seconds) / SHAPE.layers,
            "F.linear": least_us(lambda: [F.linear(x, w) for w in self.weights], seconds) / SHAPE.layers,
        }
        if self.blocked:
            times["oneDNN blocked"] = least_us(lambda: [f(x) for f in self.blocked], seconds) / SHAPE.layers
        rows, columns = self.shape
        size = 2 * (rows * columns + batch * (rows + columns))
        return Row(self.name, batch, machine.bound_us(size, 2 * rows * columns * batch), times)


class StepBench:
    """KV memory and a stack of SHAPE.layers blocks for up to ``batch`` rows at context ``context``."""

    def __init__(self, batch: int, context: int) -> None:
        self.batch, self.context = batch, context
        blocks = context // 16 + 1
        geometry = CacheGeometry(
            batch * blocks + 1,
            16,
            SHAPE.heads,
            SHAPE.heads,
            SHAPE.head_dim,
            (SHAPE.loops,) * SHAPE.layers,
            torch.bfloat16,
            torch.device("cpu"),
        )
        self.ours, self.oracle = select_backend(geometry), select_backend(geometry, "sdpa")
        tables = torch.zeros(batch + 1, blocks, dtype=torch.int32)
        tables[1:] = 1 + torch.randperm(batch * blocks).int().view(batch, blocks)
        slots = torch.arange(1, batch + 1, dtype=torch.int32)
        self.rows = DecodeRows(slots, torch.full_like(slots, context - 1), slots % SHAPE.loops, tables)
        self.rotation = Rotation(
            False, torch.randn(batch, SHAPE.head_dim // 2), torch.randn(batch, SHAPE.head_dim // 2)
        )
        self.kv_bytes = 4 * batch * context * SHAPE.heads * SHAPE.head_dim  # of one layer: K and V, bf16
        self.kv_operations = 4 * batch * context * SHAPE.heads * SHAPE.head_dim

    def attention(self, machine: Machine, seconds: float) -> Row:
        qkv = torch.randn(self.batch, 3 * SHAPE.hidden).bfloat16()

        def run(backend: AttentionBackend) -> None:
            for layer in range(SHAPE.layers):
                backend.decode_qkv(layer, qkv, self.rotation, self.rows)

        times = {
            "ours": least_us(lambda: run(self.ours), seconds) / SHAPE.layers,
            "gather + SDPA": least_us(lambda: run(self.oracle), seconds) / SHAPE.layers,
        }
        bound = machine.bound_us(self.kv_bytes, self.kv_operations)
        return Row(f"attention at {self.context}", self.batch, bound, times)

    def step(self, stack: BlockStack, machine: Machine, seconds: float) -> Row:
        x = torch.randn(self.batch, SHAPE.hidden).bfloat16()
        context = StackContext(self.ours, self.rows)
        weights = SHAPE.layers * sum(rows * columns for rows, columns in PRODUCTS.values())
        times = {
            "one call": least_us(lambda: stack(x, self.rotation, context), seconds),
            "by operator": least_us(lambda: stack.plain(x, self.rotation, context), seconds),
        }
        size, operations = (
            2 * weights + SHAPE.layers * self.kv_bytes,
            2 * weights * self.batch + SHAPE.layers * self.kv_operations,
        )
        return Row(f"core step at {self.context}", self.batch, machine.bound_us(size, operations), times)


class StackContext:
    """AttentionContext of decode rows."""

    def __init__(self, backend: AttentionBackend, rows: DecodeRows) -> None:
        self.backend, self.rows = backend, rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.backend.decode(layer, q, k, v, self.rows)

    def from_qkv(self, layer: int, qkv: Tensor, rotation: Rotation, qk_bias: Tensor | None = None) -> Tensor:
        return self.backend.decode_qkv(layer, qkv, rotation, self.rows, qk_bias)

    def run_stack(self, stack: BlockStack, x: Tensor, rotation: Rotation) -> Tensor | None:
        return self.backend.decode_stack(stack, x, rotation, self.rows)


def make_stack() -> BlockStack:
    """SHAPE.layers Ouro blocks with random weights."""

    def norm() -> Tensor:
        return torch.ones(SHAPE.hidden, dtype=torch.bfloat16)

    blocks = tuple(
        Block(
            norm_in=norm(),
            qkv=Linear(random_matrix(*PRODUCTS["qkv"])),
            qk_bias=None,
            out=Linear(random_matrix(*PRODUCTS["out"])),
            norm_out=norm(),
            norm_mlp_in=norm(),
            gate_up=GatedLinear(random_matrix(*PRODUCTS["gate_up"])),
            down=Linear(random_matrix(*PRODUCTS["down"])),
            norm_mlp_out=norm(),
        )
        for _ in range(SHAPE.layers)
    )
    return BlockStack(blocks, 0, norm_on_sum=False, eps=1e-6, final_norm=norm())


def print_row(row: Row) -> None:
    times = "  ".join(f"{name} {us:8.0f} us ({us / row.bound_us:4.2f} x)" for name, us in row.times_us.items())
    print(f"{row.kernel:18} B {row.batch:3}  bound {row.bound_us:7.0f} us   {times}", file=sys.stderr)


def run_step(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    machine = measure_machine(_kernels(), args.seconds)
    print(
        f"{torch.get_num_threads()} threads: reads {machine.bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies {machine.operations_per_s / 1e9:.0f} GFLOP/s in bf16",
        file=sys.stderr,
    )
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        print_row(row)

    for name in PRODUCTS:
        bench = LinearBench(name)
        for batch in args.batches:
            report(bench.row(batch, machine, args.seconds))
    stack = make_stack()
    for context in args.contexts:
        for batch in args.batches:
            step = StepBench(batch, context)
            report(step.attention(machine, args.seconds))
            report(step.step(stack, machine, args.seconds))
    return {"threads": torch.get_num_threads(), **machine._asdict(), "rows": [row.as_json() for row in rows]}
