"""``depthbatch bench cpu all-reduce``: what the ranks of a tensor-parallel worker pay to add up a layer's output."""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

from depthbatch.common.arguments import positive
from depthbatch.worker.models.loader import DTYPES
from depthbatch.worker.models.tensor_parallel import TensorParallel

WARM_UP, TIMED = 50, 400
LAYERS, LOOPS = 24, 4  # of Ouro-1.4B, for the figure a token


def add_all_reduce_arguments(parser: argparse.ArgumentParser) -> None:
    """Ranks and shapes."""
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--hidden", type=positive, default=2048, help="numbers of a row")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 64], help="rows of a step")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def run_all_reduce(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of an all-reduce [batch, hidden] by batch; on stderr also the time of the 2 x layers x loops of a token."""
    directory = tempfile.mkdtemp(prefix="depthbatch-ranks-")
    shape = [str(args.ranks), str(args.hidden), args.dtype, ",".join(map(str, args.batches))]
    command = [sys.executable, "-P", "-m", "depthbatch.benchmarks.all_reduce", f"{directory}/store", *shape]
    others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, args.ranks)]
    try:
        times = measure(f"{directory}/store", 0, args.ranks, args.hidden, args.dtype, args.batches)
    finally:
        for other in others:
            other.kill()
            other.wait()
        shutil.rmtree(directory)
    rows, count = [], 2 * LAYERS * LOOPS
    for batch, (least_us, median_us) in times.items():
        rows.append({"batch": batch, "least_us": least_us, "median_us": median_us})
        print(
            f"{args.ranks} ranks, [{batch}, {args.hidden}] {args.dtype}: least {least_us:.0f} us, median {median_us:.0f} us; "
            f"{count} of them ({LAYERS} layers, {LOOPS} loops): {count * least_us / 1e3:.1f}, {count * median_us / 1e3:.1f} ms",
            file=sys.stderr,
        )
    return {"ranks": args.ranks, "hidden": args.hidden, "dtype": args.dtype, "rows": rows}


def measure(
    store: str, rank: int, ranks: int, hidden: int, dtype: str, batches: list[int]
) -> dict[int, tuple[float, float]]:
    """Least and median time in microseconds, by batch. Every rank runs this."""
    from depthbatch.worker.ranks import join
    from depthbatch.worker.runner.ranked import all_reduce

    torch.set_num_threads(1)
    join(store, TensorParallel(rank, ranks), torch.device("cpu"))
    result = {}
    for batch in batches:
        x, times = torch.zeros(batch, hidden, dtype=DTYPES[dtype]), []
        for _ in range(WARM_UP + TIMED):
            start_s = time.perf_counter()
            all_reduce(x)
            times.append(1e6 * (time.perf_counter() - start_s))
        result[batch] = (min(times[WARM_UP:]), float(np.median(times[WARM_UP:])))
    return result


if __name__ == "__main__":
    store, ranks, hidden, dtype, batches, rank = sys.argv[1:]
    measure(store, int(rank), int(ranks), int(hidden), dtype, [int(batch) for batch in batches.split(",")])
    time.sleep(60)  # rank 0, whose last all-reduce may still be under way, ends this process
