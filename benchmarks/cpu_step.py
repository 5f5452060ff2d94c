"""``python -m depthbatch.benchmarks.cpu_step``: the CPU kernels of one core step against what the machine can do.

Bounds are measured in the same run: bytes over the read bandwidth of DRAM, operations over the multiply-add rate;
a kernel's bound is the larger. Every kernel is timed over all layers in turn, so weights and KV come from DRAM as they
do in a step, beside the plain way to compute the same: F.linear, oneDNN's blocked weights, gather + SDPA, operator by
operator. Times are the least of several rounds.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.worker.attention.interface import AttentionBackend, CacheGeometry, DecodeRows
from depthbatch.worker.attention.select import select_backend
from depthbatch.worker.layers.blocks import Block, BlockStack
from depthbatch.worker.layers.cpu.library import Kernels, load_kernels
from depthbatch.worker.layers.cpu.memory import zeros_on_large_pages
from depthbatch.worker.layers.linear import BlockedProduct, GatedLinear, Linear
from depthbatch.worker.layers.rotary import Rotation

LAYERS, HIDDEN, HEADS, HEAD_DIM, INNER, PLANES = 12, 512, 8, 64, 1408, 4
SHAPES = {"qkv": (3 * HIDDEN, HIDDEN), "out": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
BANDWIDTH_BYTES = 256 << 20  # well beyond any last-level cache of a desktop or a share of a server
PEAK_ROUNDS = 400_000


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
    """One of the four products of a layer, LAYERS times with weights of their own, as F.linear, blocked and packed."""

    def __init__(self, name: str) -> None:
        self.name, self.shape = name, SHAPES[name]
        self.weights = [random_matrix(*self.shape) for _ in range(LAYERS)]
        self.packed = [Linear(w) for w in self.weights]
        self.blocked = [BlockedProduct(w) for w in self.weights] if hasattr(torch.ops, "mkldnn") else []

    def row(self, batch: int, machine: Machine, seconds: float) -> Row:
        x = torch.randn(batch, self.shape[1]).bfloat16()
        times = {
            "ours": least_us(lambda: [f(x) for f in self.packed], seconds) / LAYERS,
            "F.linear": least_us(lambda: [F.linear(x, w) for w in self.weights], seconds) / LAYERS,
        }
        if self.blocked:
            times["oneDNN blocked"] = least_us(lambda: [f(x) for f in self.blocked], seconds) / LAYERS
        rows, columns = self.shape
        size = 2 * (rows * columns + batch * (rows + columns))
        return Row(self.name, batch, machine.bound_us(size, 2 * rows * columns * batch), times)


class StepBench:
    """KV memory and a stack of LAYERS blocks for up to ``batch`` rows at context ``context``."""

    def __init__(self, batch: int, context: int) -> None:
        self.batch, self.context = batch, context
        blocks = context // 16 + 1
        geometry = CacheGeometry(
            batch * blocks + 1, 16, HEADS, HEADS, HEAD_DIM, (PLANES,) * LAYERS, torch.bfloat16, torch.device("cpu")
        )
        self.ours, self.oracle = select_backend(geometry), select_backend(geometry, "sdpa")
        tables = torch.zeros(batch + 1, blocks, dtype=torch.int32)
        tables[1:] = 1 + torch.randperm(batch * blocks).int().view(batch, blocks)
        slots = torch.arange(1, batch + 1, dtype=torch.int32)
        self.rows = DecodeRows(slots, torch.full_like(slots, context - 1), slots % PLANES, tables)
        self.rotation = Rotation(False, torch.randn(batch, HEAD_DIM // 2), torch.randn(batch, HEAD_DIM // 2))
        self.kv_bytes = 4 * batch * context * HEADS * HEAD_DIM  # of one layer: K and V, bf16
        self.kv_operations = 4 * batch * context * HEADS * HEAD_DIM

    def attention(self, machine: Machine, seconds: float) -> Row:
        qkv = torch.randn(self.batch, 3 * HIDDEN).bfloat16()

        def run(backend: AttentionBackend) -> None:
            for layer in range(LAYERS):
                backend.decode_qkv(layer, qkv, self.rotation, self.rows)

        times = {
            "ours": least_us(lambda: run(self.ours), seconds) / LAYERS,
            "gather + SDPA": least_us(lambda: run(self.oracle), seconds) / LAYERS,
        }
        bound = machine.bound_us(self.kv_bytes, self.kv_operations)
        return Row(f"attention at {self.context}", self.batch, bound, times)

    def step(self, stack: BlockStack, machine: Machine, seconds: float) -> Row:
        x = torch.randn(self.batch, HIDDEN).bfloat16()
        context = StackContext(self.ours, self.rows)
        weights = LAYERS * sum(rows * columns for rows, columns in SHAPES.values())
        times = {
            "one call": least_us(lambda: stack(x, self.rotation, context), seconds),
            "by operator": least_us(lambda: stack.plain(x, self.rotation, context), seconds),
        }
        size, operations = 2 * weights + LAYERS * self.kv_bytes, 2 * weights * self.batch + LAYERS * self.kv_operations
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
    """LAYERS Ouro blocks with random weights."""

    def norm() -> Tensor:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    blocks = tuple(
        Block(
            norm_in=norm(),
            qkv=Linear(random_matrix(*SHAPES["qkv"])),
            qk_bias=None,
            out=Linear(random_matrix(*SHAPES["out"])),
            norm_out=norm(),
            norm_mlp_in=norm(),
            gate_up=GatedLinear(random_matrix(*SHAPES["gate_up"])),
            down=Linear(random_matrix(*SHAPES["down"])),
            norm_mlp_out=norm(),
        )
        for _ in range(LAYERS)
    )
    return BlockStack(blocks, 0, norm_on_sum=False, eps=1e-6, final_norm=norm())


def print_row(row: Row) -> None:
    times = "  ".join(f"{name} {us:8.0f} us ({us / row.bound_us:4.2f} x)" for name, us in row.times_us.items())
    print(f"{row.kernel:18} B {row.batch:3}  bound {row.bound_us:7.0f} us   {times}", file=sys.stderr)


def main() -> int:
    """Prints a table to stderr and one JSON object to stdout (or --output)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--threads", type=int, default=None, help="default: torch's")
    parser.add_argument("--seconds", type=float, default=0.15, help="time for each figure")
    parser.add_argument("--output", help="where the JSON goes (default: stdout)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    kernels = load_kernels("c")
    assert kernels is not None
    machine = measure_machine(kernels, args.seconds)
    print(
        f"{torch.get_num_threads()} threads: reads {machine.bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies {machine.operations_per_s / 1e9:.0f} GFLOP/s in bf16",
        file=sys.stderr,
    )
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        print_row(row)

    for name in SHAPES:
        bench = LinearBench(name)
        for batch in args.batches:
            report(bench.row(batch, machine, args.seconds))
    stack = make_stack()
    for context in args.contexts:
        for batch in args.batches:
            step = StepBench(batch, context)
            report(step.attention(machine, args.seconds))
            report(step.step(stack, machine, args.seconds))
    result = {"threads": torch.get_num_threads(), **machine._asdict(), "rows": [row.as_json() for row in rows]}
    text = json.dumps(result, indent=1)
    if args.output:
        with open(args.output, "w") as file:
            file.write(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
