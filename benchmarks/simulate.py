"""``depthbatch bench simulate``: the production scheduler core in virtual time, on a device that is a JSON profile.

Everything but the device is real: the same Scheduler, policies, frames and results. The device runs stages in order,
each for its profile's time; the scheduler itself takes no virtual time, so idle time is time without work, and what
``launch_us`` says that a launch takes. What the core costs in real time is measured beside it
(``scheduler_us_per_stage``).
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from depthbatch.benchmarks.record import (
    STAGES,
    Record,
    acceptance,
    add_output_argument,
    decode_speedup,
    draft_lanes_mean,
    print_table,
    write_json,
)
from depthbatch.benchmarks.sources import add_workload_arguments, workload_from_arguments
from depthbatch.benchmarks.trace import (
    PolicyChoice,
    add_scheduling_arguments,
    blank_result,
    chosen_policies,
    scheduling_options,
    virtual_engine,
)
from depthbatch.benchmarks.virtual_drafts import VirtualDrafts, parse_acceptance, with_known_depths
from depthbatch.benchmarks.workload import Window, Workload
from depthbatch.common.arguments import positive, seed
from depthbatch.common.config import ASYNC_MODES, POLICIES, PREEMPTION, EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import MOVE_FIELDS, ROW_POSITION, Stage
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import StageResult, TokenEvent
from depthbatch.common.stats import CoreStats
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.stage_batch import ScheduledStage
from depthbatch.worker.device_profile import DeviceProfile
from depthbatch.worker.simulated import find_profile


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench simulate``."""
    add_workload_arguments(parser)
    parser.add_argument("--profile", required=True, help="device profile: a file, or the name of a shipped one")
    parser.add_argument(
        "--policy", action="append", help=f"{', '.join(POLICIES)}, or refill:K; may be given several times"
    )
    add_scheduling_arguments(parser)
    parser.add_argument(
        "--kv-blocks", type=positive, default=None, help="KV blocks of 16 tokens (default: never binding)"
    )
    parser.add_argument(
        "--launch-us",
        type=float,
        default=0.0,
        help="microseconds that the device waits before each captured graph: of cb one a token step, of others one a stage",
    )
    parser.add_argument("--preemption", choices=PREEMPTION, default="recompute")
    parser.add_argument("--async-scheduling", choices=ASYNC_MODES, default="off")
    parser.add_argument("--speculation", default="off", help="draft lanes of refill and auto: off, auto or N")
    parser.add_argument(
        "--draft-depth", type=positive, default=None, help="loops after which a token is read for a draft"
    )
    parser.add_argument(
        "--acceptance",
        "--draft-acceptance",
        dest="draft_acceptance",
        default=None,
        help="share of the drafts that are right, or a JSON map of draft depth to share (default: the workload's)",
    )
    parser.add_argument("--seed", type=seed, default=0)
    add_output_argument(parser)


def run_simulate(args: argparse.Namespace) -> int:
    """Simulates cb and the policies asked for. Raises ConfigError on bad options, profile or workload."""
    profile = find_profile(args.profile)
    workload = workload_from_arguments(args, profile.r_max, args.seed)
    if args.draft_acceptance is not None:
        if args.speculation == "off":
            raise ConfigError("--draft-acceptance needs --speculation")
        shares = parse_acceptance(args.draft_acceptance)
        workload = with_known_depths(workload, shares, profile.r_max, args.seed)
    asked = chosen_policies(args.policy or ["refill"], args.k)
    if not 0.0 <= args.launch_us < float("inf"):
        raise ConfigError(f"launch-us must be a time of at least 0, not {args.launch_us}")
    choices = [PolicyChoice("cb", None), *(choice for choice in asked if choice.policy != "cb")]
    configs = [_config(args, choice, workload, profile) for choice in choices]
    runs = [simulate(workload, profile, config, launch_us=args.launch_us) for config in configs]
    reports = [report(run, runs[0], profile, workload) for run in runs]
    print_table(reports)
    write_json([line.as_json() for line in reports] if len(asked) > 1 else reports[-1].as_json(), args.output)
    return 0


def _config(
    args: argparse.Namespace, choice: PolicyChoice, workload: Workload, profile: DeviceProfile
) -> SchedulerConfig:
    policy, k = choice.policy, args.k if choice.k is None else choice.k
    speculates = policy not in ("cb", "no-refill")
    options = EngineConfig(
        policy=policy,
        speculation=args.speculation if speculates else "off",
        draft_depth=args.draft_depth if speculates else None,
        preemption=args.preemption,
        prefix_caching="off",  # prompts of workloads without token ids are all alike
        async_scheduling=args.async_scheduling,
        **scheduling_options(args, k if policy == "refill" else None),
    )
    return _resolve(options, workload, profile, args.kv_blocks)


def _resolve(
    options: EngineConfig, workload: Workload, profile: DeviceProfile, kv_blocks: int | None
) -> SchedulerConfig:
    lanes = options.draft_lanes_under(KVLayout.LAST_EXITED, profile.r_max)
    width = options.max_num_seqs
    layout = KVLayout(options.kv_layout or KVLayout.LAST_EXITED)
    info = virtual_engine(workload, width, profile.r_max, kv_blocks, profile.boundary_layers, lanes, layout)
    bytes_per_token = profile.bytes_per_kv_token * layout.num_planes(profile.r_max)
    host_blocks = options.swap_bytes // (info.block_size * bytes_per_token)
    info = msgspec.structs.replace(info, kv_bytes_per_token=bytes_per_token, host_blocks=host_blocks)
    return SchedulerConfig.resolve(options, info)


@dataclass
class Run:
    """What one policy did with a workload, or within a window of it; virtual seconds."""

    config: SchedulerConfig
    start_s: float = 0.0
    duration_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    context_tokens: int = 0  # read by core steps
    prompt_tokens: int = 0  # prefilled, recomputation included
    tokens: int = 0  # generated
    finished: int = 0
    loops: int = 0  # of generated tokens, those of prefill apart
    before: CoreStats = field(default_factory=CoreStats)  # of the scheduler, at the start of what counts
    stats: CoreStats = field(default_factory=CoreStats)  # at its end
    scheduler_us: list[float] = field(default_factory=list)  # real time, complete + next_stage a stage
    first_token_s: dict[int, float] = field(default_factory=dict)  # by index of the request in the workload
    last_token_s: dict[int, float] = field(default_factory=dict)  # of requests that have finished
    gaps_s: list[float] = field(default_factory=list)  # between a request's successive tokens
    victim_gaps_s: list[float] = field(default_factory=list)  # those in which it was preempted
    peak_blocks: int = 0  # most KV blocks in use
    moved_s: float = 0.0  # the device waited for copies between KV and host memory

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s

    @property
    def mean_depth(self) -> float:
        """Of decode tokens."""
        return self.loops / max(self.tokens - len(self.first_token_s), 1)


def simulate(
    workload: Workload,
    profile: DeviceProfile,
    config: SchedulerConfig,
    progress: bool = True,
    window: Window | None = None,
    launch_us: float = 0.0,
) -> Run:
    """Runs a workload in virtual time, to its end or that of the window. ``launch_us`` is what the device waits before each
    captured graph. Raises ConfigError when a request can never be served, or the workload ends before the window."""
    scheduler, run = Scheduler(config), Run(config, min(request.arrival_s for request in workload.requests))
    drafts = VirtualDrafts(workload) if config.draft_lanes else None
    arrivals = deque(sorted(enumerate(workload.requests), key=lambda item: item[1].arrival_s))
    tokens = _Tokens(scheduler)
    skips = window is not None
    in_flight: deque[StageResult] = deque()
    now = device_free = spent = 0.0
    clock = time.perf_counter
    with tqdm(
        total=len(arrivals), desc=config.policy, unit="req", disable=not (progress and sys.stderr.isatty())
    ) as bar:
        while True:
            while arrivals and arrivals[0][1].arrival_s <= now:
                index, request = arrivals.popleft()
                rejected = scheduler.submit(request.submit(index, config.r_max, seed=index), request.arrival_s)
                if rejected is not None:
                    raise ConfigError(f"request {index} cannot be served: {rejected.reason}")
            while True:
                start = clock()
                stage = scheduler.next_stage(now)
                spent += clock() - start
                if stage is None:
                    break
                run.scheduler_us.append(1e6 * spent)
                spent = 0.0
                moved_s = _moved_s(stage, profile, config)
                begin = max(now, device_free) + moved_s + 1e-6 * launch_us * _launches(stage, config)
                device_free = begin + _book(run, stage, profile)
                answer = blank_result(stage, begin, device_free)
                if moved_s:
                    answer = msgspec.structs.replace(answer, moved_s=moved_s)
                run.moved_s += moved_s
                run.peak_blocks = max(run.peak_blocks, config.usable_blocks - scheduler.admission.blocks.free)
                in_flight.append(answer if drafts is None else drafts.answer(stage, answer))
            next_arrival = arrivals[0][1].arrival_s if arrivals else np.inf
            if in_flight and in_flight[0].end_s <= next_arrival:
                now = in_flight[0].end_s
                start = clock()
                events = scheduler.complete(in_flight.popleft(), now)
                spent += clock() - start
                bar.update(tokens.count(run, events, now))
                if window is not None and run.tokens >= (window.skip if skips else window.tokens):
                    if not skips:
                        break
                    run, skips = Run(config, now, before=scheduler.stats()), False
            elif arrivals:
                now = next_arrival
            elif window is not None:
                raise ConfigError(f"the workload ends before a window of {window.tokens} tokens after {window.skip}")
            else:
                break
    run.duration_s = now - run.start_s
    run.stats = scheduler.stats()
    return run


class _Tokens:
    """Counts tokens as they come."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._latest_s: dict[int, float] = {}  # token, of requests that run
        self._preemptions: dict[int, int] = {}  # before it

    def count(self, run: Run, events: Sequence[TokenEvent], now: float) -> int:
        """Returns how many requests have finished."""
        before = run.finished
        for event in events:
            before_s = self._latest_s.get(event.request_id)
            self._latest_s[event.request_id] = now
            if before_s is None:
                run.first_token_s[event.request_id] = now
            else:
                run.gaps_s.append(now - before_s)
                count = self._scheduler.preemptions_of(event.request_id)
                if count > self._preemptions.get(event.request_id, 0):
                    run.victim_gaps_s.append(now - before_s)
                    self._preemptions[event.request_id] = count
                run.loops += event.exit_depths[0]
            if event.finish_reason is not None:
                del self._latest_s[event.request_id]
                run.last_token_s[event.request_id] = now
                run.finished += 1
        run.tokens += len(events)
        return run.finished - before


def run_policy(
    profile: DeviceProfile,
    workload: Workload,
    w: int,
    kv_blocks: int | None = None,
    window: Window | None = None,
    launch_us: float = 0.0,
    **options: Any,
) -> Run:
    """A run at width ``w`` under engine options (policy, min_coda_batch, ...); without ``kv_blocks`` KV memory never
    binds."""
    defaults = {"preemption": "off", "async_scheduling": "off", "prefix_caching": "off"}
    config = EngineConfig(**defaults | options | {"max_num_seqs": w})
    resolved = _resolve(config, workload, profile, kv_blocks)
    return simulate(workload, profile, resolved, progress=False, window=window, launch_us=launch_us)


def _launches(stage: ScheduledStage, config: SchedulerConfig) -> int:
    """Captured graphs that begin with a stage: one, but under cb a graph is a whole token step (paper, A.5)."""
    return int(config.policy != "cb" or Stage(stage.header.stage) in (Stage.PREFILL, Stage.PRELUDE))


def _moved_s(stage: ScheduledStage, profile: DeviceProfile, config: SchedulerConfig) -> float:
    """Seconds of the copies between KV and host memory that a stage waits for."""
    extra = stage.header.extra
    if extra is None or not config.host_blocks:
        return 0.0
    blocks = (len(extra.offloads) + len(extra.restores)) // (4 * MOVE_FIELDS)
    return profile.move_seconds(blocks * config.block_bytes)


def _book(run: Run, stage: ScheduledStage, profile: DeviceProfile) -> float:
    """Counts a stage; returns its seconds."""
    header = stage.header
    kind = Stage(header.stage)
    context = 0
    if kind is Stage.CORE:
        context = int(stage.frame[ROW_POSITION].sum()) + header.rows  # padding is zero
    seconds = profile.stage_seconds(kind, header.rows, context, header.n_tokens)
    label = kind.label
    run.busy_s[label] += seconds
    run.steps[label] += 1
    run.rows[label] += header.rows
    run.context_tokens += context
    run.prompt_tokens += header.n_tokens
    return seconds


@dataclass
class SimulatedRecord(Record):
    """A record in virtual time, beside what the hardware could do at most. ``k`` is the scheduler's K under any policy."""

    profile: str = ""
    bound_tokens_per_s: float = 0.0
    of_bound: float = 0.0
    mean_context: float = 0.0  # tokens that a row of a core step reads
    saturation_batch: float = 0.0  # B* there


def report(run: Run, baseline: Run, profile: DeviceProfile, workload: Workload) -> SimulatedRecord:
    """The record of a run. ``baseline`` is cb on the same workload."""
    record = record_run(run, profile, workload)
    record.compare_with(record_run(baseline, profile, workload))
    return record


def record_run(run: Run, profile: DeviceProfile, workload: Workload) -> SimulatedRecord:
    """The record of a run, not compared with any other yet."""
    busy = sum(run.busy_s.values())
    shares = {label: run.busy_s[label] / busy for label in STAGES}
    bound = hardware_bound(run, profile, workload)
    context = run.context_tokens / max(run.rows["core"], 1)
    return SimulatedRecord(
        policy=run.config.policy,
        w=run.config.max_num_seqs,
        k=run.config.min_coda_batch,
        tokens_per_s=run.tokens_per_s,
        prefill_share=shares["prefill"],
        stage_share=shares,
        idle_share=max(0.0, 1.0 - busy / run.duration_s),
        mean_depth=run.mean_depth,
        s_dec=decode_speedup(profile.flops, profile.r_max, run.mean_depth),
        mean_batch={label: run.rows[label] / run.steps[label] if run.steps[label] else 0.0 for label in STAGES},
        stage_steps=run.steps,
        scheduler_us_per_stage={f"p{q}": float(np.percentile(run.scheduler_us, q)) for q in (50, 99)},
        requests_finished=run.finished,
        preemptions=run.stats.preemptions - run.before.preemptions,
        duration_s=run.duration_s,
        acceptance=acceptance(run.before, run.stats),
        draft_lanes_mean=draft_lanes_mean(run.stats.draft_rows - run.before.draft_rows, run.rows["core"]),
        profile=profile.name,
        bound_tokens_per_s=bound,
        of_bound=run.tokens_per_s / bound,
        mean_context=context,
        saturation_batch=profile.core.delta_ms / (profile.core.gamma_ms + profile.core.alpha_ms * context),
    )


def hardware_bound(run: Run, profile: DeviceProfile, workload: Workload) -> float:
    """Tokens per second that no order of stages can exceed with W slots under the cost model: every stage is full (W
    rows and those of drafts, M prompt tokens), all row and context costs of the work done are paid, and nothing waits."""
    width = run.config.buckets[-1]
    core_rows, preludes, codas = (run.rows[label] for label in ("core", "prelude", "coda"))
    prompt_tokens = min(
        sum(request.prompt_tokens for request in workload.requests), run.prompt_tokens
    )  # once, in the window
    core, prefill = profile.core, profile.prefill
    milliseconds = (
        core.delta_ms * core_rows / width
        + core.gamma_ms * core_rows
        + core.alpha_ms * run.context_tokens
        + (profile.prelude.delta_ms / width + profile.prelude.gamma_ms) * preludes
        + (profile.coda.delta_ms / width + profile.coda.gamma_ms) * codas
        + prefill.delta_ms * prompt_tokens / run.config.max_num_batched_tokens
        + prefill.gamma_ms * prompt_tokens
    )
    return run.tokens / (1e-3 * milliseconds)
