"""``depthbatch bench cpu step``: the kernels of one core step against what the machine can do.

Bounds are measured: bytes over the read bandwidth of DRAM, operations over the multiply-add rate of their type; a kernel's
bound is the larger. Every kernel is timed over all layers in turn, so weights and KV come from DRAM as they do in a step,
beside the plain way to compute the same: F.linear, oneDNN's blocked weights, gather + SDPA, operator by operator. Rows
that begin with int8 have int8 weights, and bf16 beside them. Times are the least of several rounds in turn.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.benchmarks.plain_loop import Shape
from depthbatch.common.arguments import positive, seconds
from depthbatch.common.errors import ConfigError
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry, DecodeRows
from depthbatch.worker.attention.cpu import CpuAttention
from depthbatch.worker.attention.select import select_backend
from depthbatch.worker.layers.blocks import Block, BlockStack
from depthbatch.worker.layers.cpu.library import Kernels, cpu_kernels
from depthbatch.worker.layers.cpu.memory import zeros_on_large_pages
from depthbatch.worker.layers.int8 import Weight, quantize
from depthbatch.worker.layers.linear import BlockedProduct, GatedLinear, Linear, blocks_bf16
from depthbatch.worker.layers.rotary import Rotation

SHAPES = {
    "12x512": Shape(layers=12, hidden=512, heads=8, intermediate=1408, vocab=8192, loops=4),
    "4x2048": Shape(layers=4, hidden=2048, heads=16, intermediate=5632, vocab=49152, loops=4),  # of Ouro-1.4B's 24
}
BANDWIDTH_BYTES = 256 << 20  # well beyond any last-level cache of a desktop or a share of a server
PEAK_ROUNDS = 400_000
TURNS = 3
LONGEST_WITH_ORACLE = 1024  # tokens of context; beyond there is one plane, and no gather + SDPA beside ours
MULTIPLY_BF16, MULTIPLY_INT8 = 1, 2  # bounds.c
Run = Callable[[], object]
Clock = Callable[[], float]  # seconds
Name = TypeVar("Name")


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["12x512"])
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=positive, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=seconds, default=0.15, help="time for each figure")


def kernels_in_use() -> Kernels:
    """The C kernels. Raises ConfigError when there are none."""
    kernels = cpu_kernels()
    if kernels is None:
        raise ConfigError("bench cpu: the C kernels are not in use; there is nothing to compare")
    return kernels


class Machine(NamedTuple):
    """Measured limits with the threads in use."""

    bytes_per_s: float
    operations_per_s: float  # bf16 multiply-adds count two
    int8_operations_per_s: float  # likewise

    def bound_us(self, size_bytes: float, operations: float, int8_operations: float = 0.0) -> float:
        multiply_s = operations / self.operations_per_s + int8_operations / self.int8_operations_per_s
        return 1e6 * max(size_bytes / self.bytes_per_s, multiply_s)


class Row(NamedTuple):
    """One line of the report: a kernel at a batch size. The first of its times is the one that is held to the bound."""

    kernel: str
    shape: str
    batch: int
    bound_us: float
    times_us: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """With how far the first time is from the bound, and the others from it."""
        ours, *others = self.times_us.values()
        relative = dict(zip(list(self.times_us)[1:], (other / ours for other in others), strict=True))
        return self._asdict() | {"of_bound": ours / self.bound_us, "relative_to_ours": relative}

    def print(self) -> None:
        times = "  ".join(f"{name} {us:8.0f} us ({us / self.bound_us:4.2f} x)" for name, us in self.times_us.items())
        print(
            f"{self.shape} {self.kernel:22} B {self.batch:3}  bound {self.bound_us:7.0f} us   {times}", file=sys.stderr
        )


def steadiest_clock() -> Clock:
    """Processor time of the one thread in use, which other processes do not lengthen; with more threads the time that passes."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def least_us(run: Callable[[], object], seconds: float, clock: Clock = time.perf_counter) -> float:
    """Least time of a run within ``seconds``, at least three runs after a warm-up."""
    run()
    best, start, runs = float("inf"), clock(), 0
    while runs < 3 or clock() - start < seconds:
        begin = clock()
        run()
        best = min(best, clock() - begin)
        runs += 1
    return 1e6 * best


def in_turns(
    runs: Mapping[Name, Run], seconds: float, count: int = 1, clock: Clock = time.perf_counter
) -> dict[Name, float]:
    """Least time of each run, over turns in which each has the machine for a while; divided by ``count``."""
    turns = [{name: least_us(run, seconds / TURNS, clock) for name, run in runs.items()} for _ in range(TURNS)]
    return {name: min(turn[name] for turn in turns) / count for name in runs}


def measure_machine(kernels: Kernels, seconds: float, clock: Clock = time.perf_counter) -> Machine:
    """Read bandwidth of DRAM and the multiply-add rates of all threads."""
    memory = zeros_on_large_pages((BANDWIDTH_BYTES,), torch.uint8).fill_(1)
    read_us = least_us(lambda: kernels.read(memory.data_ptr(), BANDWIDTH_BYTES), seconds, clock)
    result = torch.zeros(1)

    def rate(kind: int) -> float:
        operations = kernels.multiply(PEAK_ROUNDS, kind, result.data_ptr())
        return (
            operations / least_us(lambda: kernels.multiply(PEAK_ROUNDS, kind, result.data_ptr()), seconds, clock) * 1e6
        )

    return Machine(BANDWIDTH_BYTES / read_us * 1e6, rate(MULTIPLY_BF16), rate(MULTIPLY_INT8))


def products_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """[out, in] of the four products of a layer."""
    return {
        "qkv": (3 * shape.hidden, shape.hidden),
        "out": (shape.hidden, shape.hidden),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).mul_(columns**-0.5).bfloat16()


class LinearBench:
    """One of the four products of a layer, once a layer with weights of its own: as F.linear, blocked, packed and int8."""

    def __init__(self, shape_name: str, name: str) -> None:
        self.name, self.shape_name = name, shape_name
        self.layers, self.shape = SHAPES[shape_name].layers, products_of(SHAPES[shape_name])[name]
        self.weights = [random_matrix(*self.shape) for _ in range(self.layers)]
        self.packed = [Linear(w) for w in self.weights]
        self.int8 = [Linear(quantize(w)) for w in self.weights]
        self.blocked = [BlockedProduct(w) for w in self.weights] if blocks_bf16() else []

    def rows(self, batch: int, machine: Machine, seconds: float) -> list[Row]:
        x = torch.randn(batch, self.shape[1]).bfloat16()
        runs: dict[str, Callable[[], object]] = {
            "ours": lambda: [f(x) for f in self.packed],
            "F.linear": lambda: [F.linear(x, w) for w in self.weights],
            "int8": lambda: [f(x) for f in self.int8],
        }
        if self.blocked:
            runs["oneDNN blocked"] = lambda: [f(x) for f in self.blocked]
        times = in_turns(runs, seconds, self.layers)
        int8 = {"ours": times.pop("int8"), "bf16": times["ours"]}
        rows, columns = self.shape
        activations, operations = 2 * batch * (rows + columns), 2 * rows * columns * batch
        bound = machine.bound_us(2 * rows * columns + activations, operations)
        int8_bound = machine.bound_us(rows * columns + activations, 0, operations)
        return [
            Row(self.name, self.shape_name, batch, bound, times),
            Row(f"int8 {self.name}", self.shape_name, batch, int8_bound, int8),
        ]


class StepBench:
    """KV memory for ``batch`` rows at context ``context``; without ``beside`` one plane of it, and no oracle."""

    def __init__(
        self,
        shape_name: str,
        batch: int,
        context: int,
        beside: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        kind: KVCacheDtype = KVCacheDtype.AUTO,
    ) -> None:
        self.shape_name, self.batch, self.context, self.dtype = shape_name, batch, context, dtype
        shape = self.shape = SHAPES[shape_name]
        blocks, is_long = context // 16 + 1, context > LONGEST_WITH_ORACLE or not beside
        geometry = CacheGeometry(
            batch * blocks + 1,
            16,
            shape.heads,
            shape.heads,
            shape.head_dim,
            (1 if is_long else shape.loops,) * shape.layers,
            dtype,
            torch.device("cpu"),
            kv_cache_dtype=kind,
        )
        self.ours, self.oracle = select_backend(geometry), None if is_long else select_backend(geometry, "sdpa")
        assert isinstance(self.ours, CpuAttention)
        for layer in range(shape.layers):
            for memory in self.ours.memory(layer):  # that was never written is one page, which is always in the cache
                memory.fill_(1 if memory.dtype is torch.uint8 else 0.01)
        tables = torch.zeros(batch + 1, blocks, dtype=torch.int32)
        tables[1:] = 1 + torch.randperm(batch * blocks).int().view(batch, blocks)
        slots = torch.arange(1, batch + 1, dtype=torch.int32)
        self.rows = DecodeRows(slots, torch.full_like(slots, context - 1), slots % geometry.planes[0], tables)
        self.rotation = Rotation(
            False, torch.randn(batch, shape.head_dim // 2), torch.randn(batch, shape.head_dim // 2)
        )
        vectors = 2 * batch * context * shape.heads  # of one layer: K and V
        self.kv_bytes = vectors * kind.bytes_per_vector(shape.head_dim, dtype.itemsize)
        self.qkv = torch.randn(batch, 3 * shape.hidden, dtype=dtype)
        self.kv_operations = 4 * batch * context * shape.hidden

    def input(self) -> Tensor:
        """[batch, hidden]"""
        return torch.randn(self.batch, self.shape.hidden, dtype=self.dtype)

    def core_step(self, stack: BlockStack) -> Callable[[], object]:
        """The core step as the engine runs it."""
        x, context = self.input(), StackContext(self.ours, self.rows)
        return lambda: stack(x, self.rotation, context)

    def attend(self, backend: AttentionBackend | None = None) -> None:
        """The attention of every layer, by ours unless told otherwise."""
        for layer in range(self.shape.layers):
            (backend or self.ours).decode_qkv(layer, self.qkv, self.rotation, self.rows)

    def attention(self, machine: Machine, seconds: float) -> Row:
        runs: dict[str, Callable[[], object]] = {"ours": self.attend}
        if (oracle := self.oracle) is not None:
            runs["gather + SDPA"] = lambda: self.attend(oracle)
        times = in_turns(runs, seconds, self.shape.layers)
        bound = machine.bound_us(self.kv_bytes, self.kv_operations)
        return Row(f"attention at {self.context}", self.shape_name, self.batch, bound, times)

    def steps(self, stack: BlockStack, int8: BlockStack, machine: Machine, seconds: float) -> list[Row]:
        """The core step with either kind of weights."""
        x, context = self.input(), StackContext(self.ours, self.rows)
        layers = self.shape.layers
        weights = layers * sum(rows * columns for rows, columns in products_of(self.shape).values())
        times = in_turns(
            {
                "one call": lambda: stack(x, self.rotation, context),
                "by operator": lambda: stack.plain(x, self.rotation, context),
                "int8, one call": lambda: int8(x, self.rotation, context),
                "int8, by operator": lambda: int8.plain(x, self.rotation, context),
            },
            seconds,
        )
        kv_bytes, kv_operations = layers * self.kv_bytes, layers * self.kv_operations
        bound = machine.bound_us(2 * weights + kv_bytes, 2 * weights * self.batch + kv_operations)
        int8_bound = machine.bound_us(weights + kv_bytes, kv_operations, 2 * weights * self.batch)
        of_int8 = {
            "one call": times.pop("int8, one call"),
            "by operator": times.pop("int8, by operator"),
            "bf16": times["one call"],
        }
        name = f"core step at {self.context}"
        return [
            Row(name, self.shape_name, self.batch, bound, times),
            Row(f"int8 {name}", self.shape_name, self.batch, int8_bound, of_int8),
        ]


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


def make_stack(shape: Shape, kind: Callable[[Tensor], Weight], dtype: torch.dtype = torch.bfloat16) -> BlockStack:
    """Ouro blocks with random weights of a kind, the rest in ``dtype``."""
    products = products_of(shape)

    def norm() -> Tensor:
        return torch.ones(shape.hidden, dtype=dtype)

    def weight(name: str) -> Weight:
        return kind(random_matrix(*products[name]))

    blocks = tuple(
        Block(
            norm_in=norm(),
            qkv=Linear(weight("qkv")),
            qk_bias=None,
            out=Linear(weight("out")),
            norm_out=norm(),
            norm_mlp_in=norm(),
            gate_up=GatedLinear(weight("gate_up")),
            down=Linear(weight("down")),
            norm_mlp_out=norm(),
        )
        for _ in range(shape.layers)
    )
    return BlockStack(blocks, 0, norm_on_sum=False, eps=1e-6, final_norm=norm())


def run_step(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    machine = measure_machine(kernels_in_use(), args.seconds)
    print(
        f"{torch.get_num_threads()} threads: reads {machine.bytes_per_s / 1e9:.1f} GB/s, multiplies "
        f"{machine.operations_per_s / 1e9:.0f} Gop/s in bf16, {machine.int8_operations_per_s / 1e9:.0f} in int8",
        file=sys.stderr,
    )
    rows: list[Row] = []

    def report(*more: Row) -> None:
        rows.extend(more)
        for row in more:
            row.print()

    for name in args.shapes:
        for product in products_of(SHAPES[name]):
            bench = LinearBench(name, product)
            for batch in args.batches:
                report(*bench.rows(batch, machine, args.seconds))
        stack, int8 = make_stack(SHAPES[name], lambda weight: weight), make_stack(SHAPES[name], quantize)
        for context in args.contexts:
            for batch in args.batches:
                step = StepBench(name, batch, context)
                report(step.attention(machine, args.seconds), *step.steps(stack, int8, machine, args.seconds))
    return {"threads": torch.get_num_threads(), **machine._asdict(), "rows": [row.as_json() for row in rows]}
