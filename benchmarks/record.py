"""One benchmark result under the keys of names.md, from the scheduler's counters, and its comparison with ``cb``.

Bounds (paper, equations 1 and 2): S_dec = (F0 + r_max Fr) / (F0 + d Fr) with d the mean depth of decode tokens;
S_e2e = 1 / (a + (1 - a) / S_dec) with a the share of the baseline's time that goes into prefill.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from depthbatch.common.arguments import output_file
from depthbatch.common.frames import Stage
from depthbatch.common.messages import SchedulerStats
from depthbatch.common.stats import CoreStats, StageStats
from depthbatch.worker.device_profile import StageFlops

STAGES = tuple(stage.label for stage in Stage)


@dataclass(frozen=True)
class Setting:
    """What was measured."""

    policy: str
    w: int
    k: int | None  # of refill; None where it plays no part
    r_max: int


@dataclass
class Record:
    """One measured policy. Fields are the JSON keys of names.md."""

    policy: str
    w: int
    k: int | None
    tokens_per_s: float
    prefill_share: float  # of the run's time
    stage_share: dict[str, float]  # the same of every stage
    idle_share: float  # time in which work existed and the device waited for the scheduler
    mean_depth: float  # of decode tokens
    s_dec: float
    mean_batch: dict[str, float]
    stage_steps: dict[str, int]
    scheduler_us_per_stage: dict[str, float | None]
    requests_finished: int
    preemptions: int
    duration_s: float
    acceptance: float | None = None  # share of the drafts that were right, of those whose token is known
    draft_lanes_mean: float = 0.0  # rows of core steps that ran on a guess, for each that did not
    cb_tokens_per_s: float | None = None
    relative_to_cb: float | None = None
    s_e2e: float | None = None
    realized: float | None = None

    def compare_with(self, baseline: "Record") -> None:
        """Fills in what is relative to ``cb``, measured in the same run."""
        a = baseline.prefill_share
        self.cb_tokens_per_s = baseline.tokens_per_s
        self.relative_to_cb = self.tokens_per_s / baseline.tokens_per_s
        self.s_e2e = 1.0 / (a + (1.0 - a) / self.s_dec)
        self.realized = self.relative_to_cb / self.s_e2e

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def decode_speedup(flops: StageFlops, r_max: int, mean_depth: float) -> float:
    """S_dec."""
    return (flops.boundary + r_max * flops.core) / (flops.boundary + mean_depth * flops.core)


def make_record(
    setting: Setting, before: SchedulerStats, after: SchedulerStats, duration_s: float, flops: StageFlops
) -> Record:
    """The record of what happened between two readings of the scheduler's counters, ``duration_s`` apart."""

    then, now = before.core or CoreStats(), after.core or CoreStats()
    steps = {stage: _stage(now, stage).steps - _stage(then, stage).steps for stage in STAGES}
    rows = {stage: _stage(now, stage).rows.sum - _stage(then, stage).rows.sum for stage in STAGES}
    shares = {s: (_stage(now, s).seconds - _stage(then, s).seconds) / duration_s for s in STAGES}
    idle_s = [0.0 if stats.worker is None else stats.worker.idle_scheduler_s for stats in (before, after)]
    finished = sum(now.finished.get(r, 0) - then.finished.get(r, 0) for r in ("stop", "length"))
    # every delivered token is in the histogram; the first of each request that was admitted came of prefill, at r_max
    tokens = now.exit_depth.count - then.exit_depth.count
    decoded = tokens - (now.queue_time_s.count - then.queue_time_s.count)
    depth_sum = now.exit_depth.sum - then.exit_depth.sum - (tokens - decoded) * setting.r_max
    depth = depth_sum / decoded if decoded else float(setting.r_max)
    return Record(
        policy=setting.policy,
        w=setting.w,
        k=setting.k,
        tokens_per_s=(now.generation_tokens - then.generation_tokens) / duration_s,
        prefill_share=shares["prefill"],
        stage_share=shares,
        idle_share=(idle_s[1] - idle_s[0]) / duration_s,
        mean_depth=depth,
        s_dec=decode_speedup(flops, setting.r_max, depth),
        mean_batch={stage: rows[stage] / steps[stage] if steps[stage] else 0.0 for stage in STAGES},
        stage_steps=steps,
        scheduler_us_per_stage=_scheduler_us(before, after, sum(steps.values())),
        requests_finished=finished,
        preemptions=now.preemptions - then.preemptions,
        duration_s=duration_s,
        acceptance=acceptance(then, now),
        draft_lanes_mean=draft_lanes_mean(now.draft_rows - then.draft_rows, rows["core"]),
    )


def acceptance(then: CoreStats, now: CoreStats) -> float | None:
    """Share of the drafts that were right between two readings, of those whose token is known; None without any."""
    right = sum(s.right for s in now.drafts.values()) - sum(s.right for s in then.drafts.values())
    wrong = sum(s.wrong for s in now.drafts.values()) - sum(s.wrong for s in then.drafts.values())
    return right / (right + wrong) if right + wrong else None


def draft_lanes_mean(draft_rows: int, core_rows: float) -> float:
    """Rows of core steps that ran on a guess, for each that did not."""
    certain = core_rows - draft_rows
    return draft_rows / certain if certain else 0.0


def _stage(core: CoreStats, label: str) -> StageStats:
    return core.stages.get(label, StageStats())


def _scheduler_us(before: SchedulerStats, after: SchedulerStats, stages: float) -> dict[str, float | None]:
    """Microseconds of the scheduler a stage: the mean over the run, and p50 and p99 where the scheduler reports them."""
    verbs = ("complete", "schedule", "dispatch")
    spent_s = sum(after.verb_seconds.get(verb, 0.0) - before.verb_seconds.get(verb, 0.0) for verb in verbs)
    quantiles = {f"p{q}": after.us_per_stage.get(f"0.{q}") for q in (50, 99)}
    return quantiles | {"mean": 1e6 * spent_s / stages if stages else None}


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Where ``write_json`` writes."""
    parser.add_argument("--output", type=output_file, metavar="FILE.json", help="where the JSON goes (default: stdout)")


def write_json(value: Any, output: str | None) -> None:
    """JSON to a file, or to stdout."""
    text = json.dumps(value, indent=2)
    if output is None:
        print(text)
    else:
        Path(output).write_text(text + "\n")


COLUMNS = """\
w: sequences at a time. k: exited rows that coda waits for. x cb: tokens/s over those of cb. S_e2e: the most that exits at
these depths could give over cb, by FLOPs. realized: how much of it x cb is. prefill, idle: share of the time. depth: mean
loops of a decoded token. core, coda: mean rows of a step."""  # of the table, for those who see it first


def print_table(records: Sequence[Record]) -> None:
    """A table for people, on stderr."""
    head = ("policy", "w", "k", "tokens/s", "x cb", "S_e2e", "realized", "prefill", "idle", "depth", "core", "coda")
    lines = [head, *(_row(record) for record in records)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), file=sys.stderr)


def _row(record: Record) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        record.policy,
        str(record.w),
        number(record.k, "d"),
        number(record.tokens_per_s, ".1f"),
        number(record.relative_to_cb, ".3f"),
        number(record.s_e2e, ".3f"),
        number(record.realized, ".1%"),
        number(record.prefill_share, ".1%"),
        number(record.idle_share, ".1%"),
        number(record.mean_depth, ".2f"),
        number(record.mean_batch["core"], ".1f"),
        number(record.mean_batch["coda"], ".1f"),
    )
