"""A core step on this machine's CPU against batch size and context (the paper's figures 4 and 9), and how linear a decode step
is in its depth. Measured on one core, also at the width of Ouro-1.4B's layers, with the cost model fitted, by the processor time
that steps take, the least of several, so that other work on the machine tells little.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from depthbatch.benchmarks.cpu_step import SHAPES, StepBench, kernels_in_use, make_stack
from depthbatch.benchmarks.latency import add_latency_arguments, fit_linear, run_latency
from depthbatch.worker.layers.blocks import BlockStack

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048)
DTYPE = torch.float32  # the one that all processors multiply at full speed
MOST_KV_TOKENS = 16_384  # of one step
_RUNS, _SECONDS = 3, 0.3  # of each point: so many runs, and more within the time
_DEPTHS = "demo --batch 1 16 --context 64 --loops 1 2 3 4 --rounds 5 --threads 1"


def least_ms(run: Callable[[], object]) -> float:
    """Processor time of the cheapest run, after a warm-up."""
    run()
    times: list[float] = []
    while len(times) < _RUNS or sum(times) < _SECONDS:
        begin_s = time.process_time()
        run()
        times.append(time.process_time() - begin_s)
    return 1e3 * min(times)


def _step_ms(shape_name: str, batch: int, context: int, stack: BlockStack) -> float:
    return least_ms(StepBench(shape_name, batch, context, beside=False, dtype=DTYPE).core_step(stack))


def measure_core_steps(shape_name: str) -> dict[str, Any]:
    """``points`` [{``batch``, ``context``, ``core_ms``}], ``core`` (delta, gamma, alpha, ms) and ``r_squared`` of the fit.
    Raises ConfigError without the C kernels."""
    kernels_in_use()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stack = make_stack(SHAPES[shape_name], lambda weight: weight.float(), DTYPE)
        points = [
            {"batch": b, "context": c, "core_ms": _step_ms(shape_name, b, c, stack)}
            for c in CONTEXTS
            for b in BATCHES
            if b * c <= MOST_KV_TOKENS
        ]
    finally:
        torch.set_num_threads(threads)
    work = np.array([[1.0, p["batch"], p["batch"] * p["context"]] for p in points])
    fit = fit_linear(work, np.array([p["core_ms"] for p in points]))
    core = dict(zip(("delta_ms", "gamma_ms", "alpha_ms"), fit.coefficients, strict=True))
    return {
        "model": f"{shape_name} layers",
        "device": "CPU",
        "points": points,
        "core": core,
        "r_squared": fit.r_squared,
    }


def measure_depths() -> list[dict[str, Any]]:
    """tau_0, tau_r and R^2 of decode steps of the model ``demo`` by batch, through the real processes (equation 3)."""
    parser = argparse.ArgumentParser()
    add_latency_arguments(parser)
    with TemporaryDirectory() as directory:
        path = Path(directory, "latency.json")
        run_latency(parser.parse_args([*_DEPTHS.split(), "--output", str(path)]))
        tau: list[dict[str, Any]] = json.loads(path.read_text())["tau"]
    return tau


def measure_cpu(shapes: Sequence[str] = tuple(SHAPES)) -> dict[str, Any]:
    """What the report keeps of this machine."""
    return {"steps": [measure_core_steps(name) for name in shapes], "depths": measure_depths()}
