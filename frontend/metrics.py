"""Prometheus metrics of the frontend. Knows times and counts of requests; the other processes' counters are joined
in ``frontend.process_metrics``.

Names and, where the meaning is the same, buckets are vLLM's, with the prefix ``depthbatch:``.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from depthbatch.common.errors import OverloadedError, RequestError

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every counter, which nobody here reads

PREFIX = "depthbatch:"
PROCESS = "frontend"

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
ITL_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
)  # fmt: skip
E2E_BUCKETS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip


class TokenCounter:
    """A counter that grows with every token: prometheus_client's own takes a lock each time. Read in the loop that adds."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self.value = 0
        self._name = name
        self._text = text
        registry.register(self)

    def describe(self) -> list[CounterMetricFamily]:
        return [CounterMetricFamily(self._name, self._text, labels=["process"])]

    def collect(self) -> list[CounterMetricFamily]:
        (family,) = self.describe()
        family.add_metric([PROCESS], self.value)
        return [family]


class TokenHistogram:
    """A histogram that is observed for every token: prometheus_client's own walks its buckets each time, and takes a lock
    for each of its numbers. Cumulated when it is read, in the loop that observes."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        """``bounds``: ascending, each the largest value of its bucket."""
        self._name = name
        self._text = text
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> list[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._text, labels=["process"])]

    def collect(self) -> list[HistogramMetricFamily]:
        names = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]  # type: ignore[no-untyped-call]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        (family,) = self.describe()
        family.add_metric([PROCESS], buckets, self._sum)
        return [family]


class FrontendMetrics:
    """What the frontend counts itself; ``r_max`` gives exit depth its buckets, one a loop (at most 64)."""

    def __init__(self, r_max: int) -> None:
        self.registry = CollectorRegistry()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were started.")
        self.generation_tokens = TokenCounter(PREFIX + "generation_tokens", "Tokens generated.", self.registry)
        self._success = self._labelled("request_success", "Requests finished, by reason.", "finished_reason")
        self._rejections = self._labelled("admission_rejections", "Requests refused, by reason.", "reason")
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self.itl = self._histogram("inter_token_latency_seconds", "Time between tokens.", ITL_BUCKETS_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS_S)
        self.depth = self._histogram("exit_depth", "Loops an output token ran.", tuple(range(1, min(r_max, 64) + 1)))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["process"], registry=self.registry).labels(PROCESS)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, ["process", label], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> TokenHistogram:
        return TokenHistogram(PREFIX + name, text, buckets, self.registry)

    def rejected(self, reason: str) -> None:
        self._rejections.labels(PROCESS, reason).inc()

    def sequence(self, prompt_tokens: int) -> "SequenceTimer":
        """A timer for one sequence, to be entered before it is submitted; its prompt counts with its first news."""
        return SequenceTimer(self, prompt_tokens)

    def started(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def finished(self, reason: str, duration_s: float) -> None:
        self._success.labels(PROCESS, reason).inc()
        self._e2e.observe(duration_s)


class SequenceTimer:
    """Times of one sequence. Whatever ends it without a finish reason counts as an abort, but what the engine refuses
    before any news of it was never started."""

    def __init__(self, metrics: FrontendMetrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._start_s = time.monotonic()
        self._last_s: float | None = None
        self.finish_reason: str | None = None
        self._started = False

    def __enter__(self) -> Self:
        return self

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._metrics.started(self._prompt_tokens)

    def tokens(self, exit_depths: Sequence[int], finish_reason: str | None, now_s: float) -> None:
        """News: the depths of the tokens that came at ``now_s`` (monotonic clock)."""
        self._start()
        if exit_depths:
            metrics = self._metrics
            if self._last_s is None:
                metrics.ttft.observe(now_s - self._start_s)
            else:
                metrics.itl.observe((now_s - self._last_s) / len(exit_depths))
            self._last_s = now_s
            metrics.generation_tokens.value += len(exit_depths)
            for depth in exit_depths:
                metrics.depth.observe(depth)
        self.finish_reason = finish_reason

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._started and isinstance(error, RequestError | OverloadedError):
            return
        self._start()
        self._metrics.finished(self.finish_reason or "abort", time.monotonic() - self._start_s)
