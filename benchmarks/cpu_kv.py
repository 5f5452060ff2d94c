"""``depthbatch bench cpu kv``: a core step with K and V as they are computed, as int8 and as fp8, side by side.

One line a shape, context and number of rows: the bytes of K and V that attention reads, its time, and that of the core step
as the engine runs it, with bf16 weights. Times are the least of several rounds in turn, on one thread of
its processor time; bounds are those of benchmarks/cpu_step.py.
"""

import argparse
import sys
from typing import Any

import torch

from depthbatch.benchmarks.cpu_step import (
    SHAPES,
    StepBench,
    in_turns,
    kernels_in_use,
    make_stack,
    measure_machine,
    steadiest_clock,
)
from depthbatch.common.arguments import positive, seconds
from depthbatch.common.kv_cache_dtype import KVCacheDtype

GIB = 1 << 30


def add_cpu_kv_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["12x512"])
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=positive, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--seconds", type=seconds, default=1.0, help="time for each figure")
    parser.add_argument("--threads", type=positive, default=None, help="of a worker (default: torch decides)")


def run_cpu_kv(args: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError without C kernels."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    machine = measure_machine(kernels_in_use(), args.seconds, steadiest_clock())
    rows = [
        _measure(shape, batch, context, machine.bytes_per_s, args.seconds)
        for shape in args.shapes
        for context in args.contexts
        for batch in args.batches
    ]
    return {"threads": torch.get_num_threads(), **machine._asdict(), "rows": rows}


def _measure(shape_name: str, batch: int, context: int, bytes_per_s: float, seconds: float) -> dict[str, Any]:
    shape = SHAPES[shape_name]
    stack, clock = make_stack(shape, lambda weight: weight), steadiest_clock()
    benches = {kind: StepBench(shape_name, batch, context, beside=False, kind=kind) for kind in KVCacheDtype}
    attention = in_turns({kind: bench.attend for kind, bench in benches.items()}, seconds, clock=clock)
    steps = in_turns({kind: bench.core_step(stack) for kind, bench in benches.items()}, seconds, clock=clock)
    kv_bytes = {kind: shape.layers * bench.kv_bytes for kind, bench in benches.items()}
    auto = KVCacheDtype.AUTO
    said = "   ".join(
        f"{kind} {kv_bytes[kind] / GIB:.3f} GiB, attention {attention[kind] / 1000:.2f} ms ({attention[auto] / attention[kind]:.2f}), "
        f"step {steps[kind] / 1000:.2f} ms ({steps[auto] / steps[kind]:.2f})"
        for kind in benches
    )
    print(f"{shape_name} context {context:5} rows {batch:3}   {said}", file=sys.stderr)
    by_kind = {
        str(kind): {
            "kv_bytes": kv_bytes[kind],
            "read_us": 1e6 * kv_bytes[kind] / bytes_per_s,
            "attention_us": attention[kind],
            "core_step_us": steps[kind],
            "attention_speedup": attention[auto] / attention[kind],
            "core_step_speedup": steps[auto] / steps[kind],
        }
        for kind in benches
    }
    return {"shape": shape_name, "context": context, "batch": batch, "by_kv_cache_dtype": by_kind}
