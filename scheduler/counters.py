"""What the core has counted since its start."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from depthbatch.common.frames import Stage
from depthbatch.common.messages import FinishReason, StageResult
from depthbatch.common.stats import CoreStats, HistogramStats, StageStats
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
        self.recomputed_tokens = 0  # prefilled or decoded a second time
        self.draft_rows = 0  # of core steps
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

    def depths(self, depths: Sequence[int]) -> None:
        self._depths += np.bincount(np.asarray(depths, np.int64), minlength=self._depths.size)

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

    def stats(self) -> CoreStats:
        """All counters; what is a gauge is left out."""
        waits = tuple(accumulate(self._waits))
        return CoreStats(
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            draft_rows=self.draft_rows,
            lookahead_wasted_steps=self.lookahead_wasted_steps,
            stale_results=self.stale_results,
            dropped_tokens=self.dropped_tokens,
            finished={str(reason): count for reason, count in self._finished.items()},
            rejected=dict(self._rejected),
            stages={stage.label: self._stage(stage) for stage in STAGES},
            queue_time_s=HistogramStats(WAIT_BUCKETS_S, waits[:-1], waits[-1], self._wait_sum_s),
            exit_depth=_histogram(self._depths),
        )

    def _stage(self, stage: Stage) -> StageStats:
        rows = self._rows[stage]
        return StageStats(int(rows.sum()), self._seconds[stage], self._padded[stage], _histogram(rows))


def _histogram(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> HistogramStats:
    """Of values 0, 1, ... that came ``counts`` times; bounds are powers of two (all values when there are few)."""
    last = counts.size - 1
    bounds = range(1, last + 1) if last <= 16 else [1 << i for i in range(last.bit_length()) if 1 << i < last] + [last]
    cumulative = np.cumsum(counts).tolist()
    total = float((counts * np.arange(counts.size)).sum())
    return HistogramStats(tuple(bounds), tuple(cumulative[bound] for bound in bounds), cumulative[-1], total)
