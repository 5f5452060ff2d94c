"""``depthbatch bench cpu all-reduce``: what the ranks of a tensor-parallel worker pay to add up a layer's output."""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from depthbatch.common.arguments import positive
from depthbatch.worker.models.loader import DTYPES
from depthbatch.worker.models.tensor_parallel import TensorParallel

WARM_UP, TIMED, IN_A_GRAPH = 50, 400, 200
LAYERS, LOOPS = 24, 4  # of Ouro-1.4B, for the figure a token


def add_all_reduce_arguments(parser: argparse.ArgumentParser) -> None:
    """Ranks and shapes."""
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--hidden", type=positive, default=2048, help="numbers of a row")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 64], help="rows of a step")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def run_all_reduce(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of an all-reduce [batch, hidden] by batch; on stderr also the time of the 2 x layers x loops of a token."""
    times = all_reduce_times(args.ranks, args.hidden, args.dtype, args.batches)
    rows, count = [], 2 * LAYERS * LOOPS
    for batch, (least_us, median_us, _) in times.items():
        rows.append({"batch": batch, "least_us": least_us, "median_us": median_us})
        print(
            f"{args.ranks} ranks, [{batch}, {args.hidden}] {args.dtype}: least {least_us:.0f} us, median {median_us:.0f} us; "
            f"{count} of them ({LAYERS} layers, {LOOPS} loops): {count * least_us / 1e3:.1f}, {count * median_us / 1e3:.1f} ms",
            file=sys.stderr,
        )
    return {"ranks": args.ranks, "hidden": args.hidden, "dtype": args.dtype, "rows": rows}


class Times(NamedTuple):
    """Of one all-reduce in microseconds."""

    least_us: float  # from the call to its end
    median_us: float
    replayed_us: float | None = None  # one of many in a captured graph; None on a CPU


def all_reduce_times(
    ranks: int, hidden: int, dtype: str, batches: Sequence[int], device: str = "cpu"
) -> dict[int, Times]:
    """By batch, with processes of their own for the other ranks, which are gone afterwards, as is a group on CPUs."""
    directory = tempfile.mkdtemp(prefix="depthbatch-ranks-")
    shape = [str(ranks), str(hidden), dtype, ",".join(map(str, batches)), device]
    command = [sys.executable, "-P", "-m", "depthbatch.benchmarks.all_reduce", f"{directory}/store", *shape]
    others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, ranks)]
    try:
        return measure(f"{directory}/store", 0, ranks, hidden, dtype, batches, device)
    finally:
        for other in others:
            other.kill()
            other.wait()
        shutil.rmtree(directory)
        if device == "cpu" and dist.is_initialized():  # one over NCCL may wait for its peers
            dist.destroy_process_group()


def measure(
    store: str, rank: int, ranks: int, hidden: int, dtype: str, batches: Sequence[int], device: str
) -> dict[int, Times]:
    """By batch. Every rank runs this."""
    from depthbatch.worker.device import resolve_device
    from depthbatch.worker.ranks import join
    from depthbatch.worker.runner.ranked import all_reduce

    torch.set_num_threads(1)
    on = resolve_device(device, ranks, rank=rank)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    join(store, TensorParallel(rank, ranks), on)
    result = {}
    for batch in batches:
        x, times = torch.zeros(batch, hidden, dtype=DTYPES[dtype], device=on), []
        for _ in range(WARM_UP + TIMED):
            start_s = time.perf_counter()
            all_reduce(x)
            if on.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - start_s))
        replayed_us = _replayed_us(x, all_reduce) if on.type == "cuda" else None
        result[batch] = Times(min(times[WARM_UP:]), float(np.median(times[WARM_UP:])), replayed_us)
    return result


def _replayed_us(x: torch.Tensor, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """One of IN_A_GRAPH in a graph, the median of ten replays."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            all_reduce(x)
    took = []
    for _ in range(11):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        took.append(1e6 * (time.perf_counter() - start_s) / IN_A_GRAPH)
    return float(np.median(took[1:]))


if __name__ == "__main__":
    store, ranks, hidden, dtype, batches, device, rank = sys.argv[1:]
    measure(store, int(rank), int(ranks), int(hidden), dtype, [int(batch) for batch in batches.split(",")], device)
    time.sleep(60)  # rank 0, whose last all-reduce may still be under way, ends this process
