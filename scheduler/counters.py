"""Counters since start, under the names of names.md (without the prefix), labels in Prometheus notation."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

import numpy as np

from depthbatch.common.frames import Stage
from depthbatch.common.messages import FinishReason, StageResult
from depthbatch.scheduler.requests import Request

STAGES = tuple(Stage)
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)


class Counters:
    """What the core counts; nothing here steers anything."""

    def __init__(self, width: int, r_max: int) -> None:
        self._rows = np.zeros((len(STAGES), width + 1), np.int64)  # stages by row count
        self._padded = [0] * len(STAGES)
        self._seconds = [0.0] * len(STAGES)
        self._depths = np.zeros(r_max + 1, np.int64)
        self._waits = [0] * (len(WAIT_BUCKETS_S) + 1)
        self._wait_sum_s = 0.0
        self._finished = Counter(dict.fromkeys((FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT), 0))
        self._rejected: Counter[str] = Counter()
        self.steps = 0  # stages completed
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.lookahead_wasted_steps = 0
        self.stale_results = 0  # answers for steps that are no longer in flight
        self.dropped_tokens = 0  # sampled for requests that had ended, or known before

    def dispatched(self, stage: Stage, rows: int, bucket: int) -> None:
        self._rows[stage, rows] += 1
        if bucket:
            self._padded[stage] += bucket - rows

    def retired(self, stage: Stage, result: StageResult) -> None:
        self.steps += 1
        self._seconds[stage] += result.end_s - result.start_s

    def depths(self, depths: tuple[int, ...]) -> None:
        self._depths += np.bincount(depths, minlength=self._depths.size)

    def waited(self, requests: Iterable[Request], now: float) -> None:
        """Books how long requests had waited when their first prefill was dispatched; once each."""
        for request in requests:
            if request.arrived_s is not None:
                wait_s = max(0.0, now - request.arrived_s)
                self._waits[bisect_left(WAIT_BUCKETS_S, wait_s)] += 1
                self._wait_sum_s += wait_s
                request.arrived_s = None

    def finished(self, reason: FinishReason) -> None:
        self._finished[reason] += 1

    def rejected(self, reason: str) -> None:
        self._rejected[reason] += 1

    def values(self) -> dict[str, float]:
        """All counters, flat."""
        out: dict[str, float] = {
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "num_preemptions_total": self.preemptions,
            "lookahead_wasted_steps_total": self.lookahead_wasted_steps,
            "stale_results_total": self.stale_results,
            "dropped_tokens_total": self.dropped_tokens,
        }
        for reason, count in self._finished.items():
            out[f'request_success_total{{finished_reason="{reason}"}}'] = count
        for cause, count in self._rejected.items():
            out[f'admission_rejections_total{{reason="{cause}"}}'] = count
        sizes = np.arange(self._rows.shape[1])
        for stage in STAGES:
            label = f'{{stage="{stage.label}"}}'
            rows = self._rows[stage]
            out[f"stage_steps_total{label}"] = float(rows.sum())
            out[f"stage_seconds_total{label}"] = self._seconds[stage]
            out[f"padded_rows_total{label}"] = self._padded[stage]
            out.update(_histogram("stage_batch_size", f'stage="{stage.label}"', rows, sizes))
        for bound, count in zip(WAIT_BUCKETS_S, accumulate(self._waits), strict=False):
            out[f'request_queue_time_seconds_bucket{{le="{bound}"}}'] = count
        out["request_queue_time_seconds_count"] = sum(self._waits)
        out["request_queue_time_seconds_sum"] = self._wait_sum_s
        out.update(_histogram("exit_depth", "", self._depths, np.arange(self._depths.size)))
        return out


def _histogram(
    name: str,
    label: str,
    counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    values: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> dict[str, float]:
    """Cumulative buckets, count and sum; upper bounds are powers of two (all values when there are few)."""
    out: dict[str, float] = {}
    last = int(values[-1])
    bounds = range(1, last + 1) if last <= 16 else [1 << i for i in range(last.bit_length()) if 1 << i < last] + [last]
    cumulative = np.cumsum(counts)
    comma = f"{label}," if label else ""
    for bound in bounds:
        out[f'{name}_bucket{{{comma}le="{bound}"}}'] = float(cumulative[bound])
    suffix = f"{{{label}}}" if label else ""
    out[f"{name}_count{suffix}"] = float(cumulative[-1])
    out[f"{name}_sum{suffix}"] = float((counts * values).sum())
    return out
