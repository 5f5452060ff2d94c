"""``depthbatch bench trace``: the schedule of a workload as data, one JSON object a stage (scheduling.md, Trace).

Runs the scheduler core in lock-step with a worker that answers at once; there is no clock, so all requests are
submitted at the start, in order of arrival. ``--live`` runs the same through the real processes with a simulated
device, and prints what they launched. A file that ``--stage-trace`` has written is read instead of run. ``--html`` and
``--chrome`` write pictures in place of the text.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from depthbatch.benchmarks.trace_pictures import chrome_trace, deepest_loop, is_stage_trace, read_stages, schedule_html
from depthbatch.benchmarks.workload import Workload
from depthbatch.common.arguments import loops, output_file, positive, width
from depthbatch.common.config import ASYNC_MODES, POLICIES, EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import Stage, split_prefill_frame
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import EngineInfo, StageResult
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.stage_batch import ScheduledStage
from depthbatch.scheduler.stage_trace import describe_stage
from depthbatch.worker.runner.stage_input import most_rows

BLOCK_SIZE = 16
LIVE_PROFILE = "h100-ouro-1.4b"
PICTURE_STAGES = 400  # columns of --html that still read well


class PolicyChoice(NamedTuple):
    """A policy, and K where one was given with it."""

    policy: str
    k: int | None

    @classmethod
    def parse(cls, text: str) -> "PolicyChoice":
        """``refill``, or ``refill:16`` for K = 16. Raises ConfigError."""
        name, _, k = text.partition(":")
        if name not in POLICIES:
            raise ConfigError(f"policy {name!r} is not one of {', '.join(POLICIES)}")
        if not k:
            return cls(name, None)
        if name != "refill" or not k.isdecimal() or int(k) < 1:
            raise ConfigError(f"policy {text!r}: only refill takes a K, a whole number of at least 1")
        return cls(name, int(k))


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench trace``."""
    parser.add_argument("file", metavar="FILE", help="a workload, or what --stage-trace of an engine has written")
    parser.add_argument("--policy", default="refill", help=f"{', '.join(POLICIES)}, or refill:K")
    add_scheduling_arguments(parser)
    parser.add_argument("--r-max", type=loops, default=4, help="loops of a full-depth token")
    parser.add_argument("--steps", type=positive, default=None, help="stages to print (default: all)")
    parser.add_argument(
        "--kv-blocks", type=positive, default=None, help="KV blocks of 16 tokens (default: never binding)"
    )
    parser.add_argument(
        "--last", type=positive, default=None, help="of them, only so many last ones (default: all; --html 400)"
    )
    parser.add_argument(
        "--html", type=output_file, metavar="OUT.html", help="write a page with the schedule as a picture"
    )
    parser.add_argument(
        "--chrome", type=output_file, metavar="OUT.json", help="write a trace for Perfetto and chrome://tracing"
    )
    parser.add_argument("--live", action="store_true", help="through the real processes, with a simulated device")
    parser.add_argument("--profile", help=f"device profile of --live (default {LIVE_PROFILE})")
    parser.add_argument("--async-scheduling", choices=ASYNC_MODES, help="of --live (default lookahead)")


def add_scheduling_arguments(parser: argparse.ArgumentParser) -> None:
    """W, M, K, S by their symbols."""
    parser.add_argument("--w", type=width, default=64, help="W: most active sequences")
    parser.add_argument("--m", type=positive, default=8192, help="M: most prompt tokens in one prefill batch")
    parser.add_argument(
        "--k", type=positive, default=None, help="K: minimum coda batch of refill (default: the model's)"
    )
    parser.add_argument(
        "--s", type=positive, default=None, help="S: free slots a prefill waits for (default max(1, W // 8))"
    )


def chosen_policies(texts: Sequence[str], k: int | None) -> list[PolicyChoice]:
    """What several --policy name, each once. Raises ConfigError for a name that is none, or a --k that none of them takes."""
    choices = list(dict.fromkeys(PolicyChoice.parse(text) for text in texts))
    if k is not None and all(choice.policy != "refill" for choice in choices):
        raise ConfigError("--k needs --policy refill")
    return choices


def scheduling_options(args: argparse.Namespace, k: int | None) -> dict[str, Any]:
    """The engine's options that W, M, S and ``k`` are; a K is refill's alone."""
    return {
        "max_num_seqs": args.w,
        "max_num_batched_tokens": args.m,
        "min_free_slots": args.s,
        "min_coda_batch": k,
    }


def run_trace(args: argparse.Namespace) -> int:
    """Prints or draws the trace. Raises ConfigError on a bad file or bad options."""
    lines = islice(_recorded(args) if is_stage_trace(args.file) else _made(args), args.steps)
    if args.html is not None or args.chrome is not None:
        _draw(list(lines), args)
        return 0
    for line in lines if args.last is None else list(lines)[-args.last :]:
        print(json.dumps(line))
    return 0


def _recorded(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of an engine that has run: there is nothing to choose any more."""
    parser = argparse.ArgumentParser()
    add_trace_arguments(parser)
    for name in ("policy", "w", "m", "k", "s", "r_max", "kv_blocks", "live", "profile", "async_scheduling"):
        if getattr(args, name) != parser.get_default(name):
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} has no effect: {args.file} is the trace of a schedule that has run")
    return iter(read_stages(args.file))


def _made(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of a workload."""
    if not args.live and (args.profile or args.async_scheduling):
        raise ConfigError("--profile and --async-scheduling need --live: there is no device and no clock without")
    workload = Workload.read(args.file)
    choice = PolicyChoice.parse(args.policy)
    k = args.k if choice.k is None else choice.k
    # Prompts of workloads without token ids are all alike: no prefix cache.
    given = scheduling_options(args, k)
    options = EngineConfig(policy=choice.policy, preemption="off", prefix_caching="off", **given)
    info = virtual_engine(workload, args.w, args.r_max, args.kv_blocks)
    if not args.live:
        return trace(workload, SchedulerConfig.resolve(options, info))
    live = msgspec.structs.replace(
        options,
        device=f"simulated:{args.profile or LIVE_PROFILE}",
        async_scheduling=args.async_scheduling or "lookahead",
        kv_layout=info.kv_layout,
        max_loops=args.r_max,
    )
    return live_trace(workload, live, info.num_blocks - 1)


def _draw(lines: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if not lines:
        raise ConfigError(f"{args.file}: no stage in it")
    if args.html is not None:
        shown = lines[-(args.last or PICTURE_STAGES) :]
        page = schedule_html(shown, Path(args.file).name, len(lines), deepest_loop(lines))
        _write(args.html, page, f"{len(shown)} of {len(lines)} stages")
    if args.chrome is not None:
        shown = lines[-args.last :] if args.last else lines
        _write(args.chrome, json.dumps(chrome_trace(shown)), f"{len(shown)} of {len(lines)} stages")


def _write(path: str, text: str, what: str) -> None:
    Path(path).write_text(text, encoding="utf-8")
    print(f"depthbatch: {path}: {what}", file=sys.stderr)


def live_trace(workload: Workload, options: EngineConfig, kv_blocks: int) -> Iterator[dict[str, Any]]:
    """One object a stage, as the scheduler process launched them, with the times of the worker. Raises ConfigError,
    RequestError, EngineDeadError."""
    from depthbatch.frontend.llm import LLM

    order = sorted(workload.requests, key=lambda request: request.arrival_s)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "stages.jsonl")
        config = msgspec.structs.replace(
            options, stage_trace=str(path), kv_blocks=kv_blocks, max_model_len=max(workload.longest, 2)
        )
        with LLM.from_config(config, quiet=True) as llm:
            params = [request.sampling() for request in order]
            prompts = [request.prompt(index, llm.info.vocab_size).tolist() for index, request in enumerate(order)]
            llm.generate(prompts, params)
        for line in path.read_text().splitlines():
            yield json.loads(line)


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
        yield describe_stage(stage, scheduler, exited)


def blank_result(stage: ScheduledStage, start_s: float, end_s: float) -> StageResult:
    """What a worker without weights answers: token 0 for every sampled row."""
    header = stage.header
    sampled = 0
    if header.stage == Stage.CODA:
        sampled = header.rows
    elif header.stage == Stage.PREFILL:
        chunks = split_prefill_frame(stage.frame, header.rows, header.n_tokens, header.n_updates)
        sampled = int(chunks.sample.sum())
    return StageResult(header.step_id, start_s, end_s, token_ids=bytes(4 * sampled))


def virtual_engine(
    workload: Workload,
    width: int,
    r_max: int,
    kv_blocks: int | None,
    boundary_layers: int = 0,
    draft_lanes: int = 0,
    layout: KVLayout = KVLayout.LAST_EXITED,
) -> EngineInfo:
    """An engine without a device, long enough for the workload. kv_blocks None: enough for W of the longest, and the next
    block of each for its drafts. Under the default layout a prompt may be cut anywhere, as the paper cuts."""
    per_sequence = -(-workload.longest // BLOCK_SIZE) + (draft_lanes > 0)
    return EngineInfo(
        model="virtual",
        architecture="virtual",
        vocab_size=np.iinfo(np.int32).max,
        r_max=r_max,
        r_min=1,
        default_gate=Gate.REPLAY,
        gates=(Gate.NONE, Gate.FIXED, Gate.REPLAY),
        default_threshold=1.0,
        kv_layout=layout,
        block_size=BLOCK_SIZE,
        num_blocks=1 + width * per_sequence if kv_blocks is None else kv_blocks,
        kv_bytes_per_token=0,
        max_model_len=max(workload.longest, 2),
        boundary_layers=boundary_layers,
        buckets=(most_rows(width, 1 + draft_lanes),),
        device="virtual",
        dtype="none",
        draft_lanes=draft_lanes,
        coda_layers=boundary_layers,
    )
