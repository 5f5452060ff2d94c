"""``depthbatch bench scheduler``: what the scheduler core costs.

Real seconds of complete + next_stage (assembly included, sockets apart) on a steady full engine with recorded depths,
lock-step. ``core_us`` is a core stage alone; ``loop_us`` is everything between two core stages: the completions and
assemblies of core, coda, prelude and prefill. ``waiting`` compares 100 with 100,000 waiting requests.
"""

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable
from itertools import cycle

import numpy as np

from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.benchmarks.trace import blank_result, virtual_engine
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.arguments import positive
from depthbatch.common.config import ASYNC_MODES, EngineConfig
from depthbatch.common.frames import Stage
from depthbatch.common.messages import StageResult
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler

OUTPUT_TOKENS = 311  # ShareGPT's mean
PROMPT_TOKENS = 267
DEPTHS = (2, 3, 4)
WARM_UP_STEPS = 100
WEIGHTS = (0.5, 0.4, 0.1)


def measure(
    width: int, waiting: int, core_steps: int, mode: str, policy: str = "refill", draft_lanes: int = 0
) -> dict[str, object]:
    """Percentiles in microseconds over ``core_steps`` core stages of a full engine; of its drafts, if it has any, all
    are right, so that chains are as long as they can be."""
    rng = np.random.default_rng(0)
    shapes = [
        WorkloadRequest(
            PROMPT_TOKENS,
            int(rng.integers(20, 2 * OUTPUT_TOKENS)),
            exit_depths=tuple(rng.choice(DEPTHS, 2 * OUTPUT_TOKENS, p=WEIGHTS).tolist()),
        )
        for _ in range(256)
    ]
    workload = Workload(tuple(shapes))
    speculation = str(draft_lanes or "off")
    options = EngineConfig(
        policy=policy, max_num_seqs=width, async_scheduling=mode, speculation=speculation, prefix_caching="off"
    )
    info = virtual_engine(workload, width, 4, None, draft_lanes=draft_lanes)
    scheduler = Scheduler(SchedulerConfig.resolve(options, info))
    messages = cycle([shape.submit(0, 4) for shape in shapes])
    submitted = 0

    def top_up() -> None:
        nonlocal submitted
        while scheduler.num_waiting < waiting:
            message = next(messages)
            scheduler.submit(type(message)(submitted, message.prompt, message.params))
            submitted += 1

    top_up()
    gc.collect()
    gc.freeze()
    core_us, all_us, results = _run(scheduler, core_steps, top_up)
    rows = scheduler.stats().stages[Stage.CORE.label].rows.sum
    gc.unfreeze()
    return {
        "w": width,
        "draft_lanes": draft_lanes,
        "waiting": waiting,
        "mode": mode,
        "stages_per_core": round(results / len(all_us), 3),
        "rows_per_core": round(rows / len(all_us), 1),
        "core_us": _percentiles(core_us),
        "loop_us": _percentiles(all_us[WARM_UP_STEPS:]),
    }


def _run(scheduler: Scheduler, core_steps: int, top_up: Callable[[], None]) -> tuple[list[float], list[float], int]:
    clock = time.perf_counter
    in_flight: deque[tuple[StageResult, float, bool]] = (
        deque()
    )  # with what its assembly took, and whether it is a core stage
    core_us: list[float] = []
    loop_us: list[float] = []
    spent = stages = 0.0
    while len(loop_us) < core_steps + WARM_UP_STEPS:
        start = clock()
        stage = scheduler.next_stage(0.0)
        took = clock() - start
        spent += took
        if stage is not None:
            stages += 1
            in_flight.append((blank_result(stage, 0.0, 1e-3), took, stage.header.stage == Stage.CORE))
            if stage.header.stage == Stage.CORE:
                loop_us.append(1e6 * spent)
                spent = 0.0
            continue
        result, assembled, is_core = in_flight.popleft()
        start = clock()
        scheduler.complete(result, 0.0)
        took = clock() - start
        spent += took
        if is_core:
            core_us.append(1e6 * (took + assembled))
        top_up()
    return core_us[WARM_UP_STEPS:], loop_us, int(stages)


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 1) for q in (50, 90, 99)}


def add_scheduler_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """Length and mode."""
    parser.add_argument("--core-steps", type=positive, default=2000, help="measured, after 100 more")
    parser.add_argument("--async-scheduling", choices=ASYNC_MODES, default="lookahead")
    add_output_argument(parser)


def run_scheduler_cost(args: argparse.Namespace) -> int:
    """W = 8, 64, 512 with 100 waiting requests, then W = 64 with 100,000, then W = 64 with chains of 1 + 3 lanes."""
    rows = [measure(width, 100, args.core_steps, args.async_scheduling) for width in (8, 64, 512)]
    rows.append(measure(64, 100_000, args.core_steps, args.async_scheduling))
    rows.append(measure(64, 100, args.core_steps, args.async_scheduling, draft_lanes=3))
    write_json(rows, args.output)
    return 0
