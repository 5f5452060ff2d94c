"""``depthbatch bench trace``: the schedule of a workload as data, one JSON object a stage (scheduling.md, Trace).

Runs the scheduler core in lock-step with a worker that answers at once; there is no clock, so all requests are
submitted at the start, in order of arrival.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from depthbatch.benchmarks.workload import Workload
from depthbatch.common.config import POLICIES, EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import ROW_AUX, Stage
from depthbatch.common.gates import Gate
from depthbatch.common.messages import EngineInfo, StageResult
from depthbatch.scheduler.assembly import ScheduledStage
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler

BLOCK_SIZE = 16


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench trace``."""
    parser.add_argument("workload", metavar="WORKLOAD.json")
    parser.add_argument("--policy", choices=POLICIES, default="refill")
    parser.add_argument("--w", type=int, default=64, help="most active sequences")
    parser.add_argument("--m", type=int, default=8192, help="most prompt tokens in one prefill batch")
    parser.add_argument("--k", type=int, default=None, help="minimum coda batch under refill (default 1)")
    parser.add_argument("--s", type=int, default=None, help="free slots a prefill waits for (default max(1, W // 8))")
    parser.add_argument("--r-max", type=int, default=4, help="loops of a full-depth token")
    parser.add_argument("--steps", type=int, default=None, help="stages to print (default: all)")
    parser.add_argument("--kv-blocks", type=int, default=None, help="KV blocks of 16 tokens (default: never binding)")


def run_trace(args: argparse.Namespace) -> int:
    """Prints the trace. Raises ConfigError on a bad workload or bad options."""
    if args.steps is not None and args.steps < 1:
        raise ConfigError(f"steps must be at least 1, not {args.steps}")
    workload = Workload.read(args.workload)
    options = EngineConfig(
        policy=args.policy,
        max_num_seqs=args.w,
        max_num_batched_tokens=args.m,
        min_free_slots=args.s,
        min_coda_batch=args.k,
        preemption="off",
    )
    info = virtual_engine(workload, args.w, args.r_max, args.kv_blocks)
    for count, line in enumerate(trace(workload, SchedulerConfig.resolve(options, info)), start=1):
        print(json.dumps(line))
        if count == args.steps:
            break
    return 0


def trace(workload: Workload, config: SchedulerConfig) -> Iterator[dict[str, Any]]:
    """One object a stage, in launch order, until every request is finished. Raises ConfigError when a request can
    never be served."""
    scheduler = Scheduler(config)
    for index in sorted(range(len(workload.requests)), key=lambda i: workload.requests[i].arrival_s):
        rejected = scheduler.submit(workload.requests[index].submit(index, config.r_max))
        if rejected is not None:
            raise ConfigError(f"request {index} cannot be served: {rejected.reason}")
    while True:
        exited = scheduler.view.q_c
        stage = scheduler.next_stage(0.0)
        if stage is None:
            return
        scheduler.complete(blank_result(stage, 0.0, 0.0), 0.0)
        yield _describe(stage, scheduler, exited)


def blank_result(stage: ScheduledStage, start_s: float, end_s: float) -> StageResult:
    """What a worker without weights answers: token 0 for every sampled row."""
    header = stage.header
    sampled = 0
    if header.stage == Stage.CODA:
        sampled = header.rows
    elif header.stage == Stage.PREFILL:
        sampled = int(stage.frame[3 * header.rows : 4 * header.rows].sum())
    return StageResult(header.step_id, start_s, end_s, token_ids=bytes(4 * sampled))


def virtual_engine(
    workload: Workload, width: int, r_max: int, kv_blocks: int | None, boundary_layers: int = 0
) -> EngineInfo:
    """An engine without a device, long enough for the workload. kv_blocks None: enough for W of the longest."""
    if width < 1:
        raise ConfigError(f"w must be at least 1, not {width}")
    per_sequence = -(-workload.longest // BLOCK_SIZE)
    return EngineInfo(
        model="virtual",
        architecture="virtual",
        vocab_size=np.iinfo(np.int32).max,
        r_max=r_max,
        r_min=1,
        default_gate=Gate.REPLAY,
        gates=(Gate.NONE, Gate.FIXED, Gate.REPLAY),
        default_threshold=1.0,
        kv_layout="single",
        block_size=BLOCK_SIZE,
        num_blocks=1 + width * per_sequence if kv_blocks is None else kv_blocks,
        kv_bytes_per_token=0,
        max_model_len=max(workload.longest, 2),
        boundary_layers=boundary_layers,
        buckets=(width,),
        device="virtual",
        dtype="none",
    )


def _describe(stage: ScheduledStage, scheduler: Scheduler, exited_before: int) -> dict[str, Any]:
    header, view = stage.header, scheduler.view
    line: dict[str, Any] = {"stage": Stage(header.stage).label, "batch": header.rows}
    if header.stage == Stage.PREFILL:
        line["prompt_tokens"] = header.n_tokens
    if header.stage == Stage.CORE:
        loops, rows = np.unique(stage.frame[ROW_AUX, : header.rows], return_counts=True)
        line["depths"] = {str(loop): int(count) for loop, count in zip(loops.tolist(), rows.tolist(), strict=True)}
        line["exits"] = view.q_c - exited_before
    if scheduler.config.policy in ("cb", "no-refill"):
        return line | {"q_d": view.q_d, "q_p": view.q_p}
    return line | {"q_r": view.q_r, "q_c": view.q_c, "q_p": view.q_p}
