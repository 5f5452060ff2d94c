"""The counters of scheduler and worker as Prometheus metrics: the one home of their names. Counts nothing itself.

Names are those of docs/names.md, with the prefix and the process that each comes from.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from depthbatch.common.messages import EngineInfo, SchedulerStats
from depthbatch.common.stats import CoreStats, HistogramStats, StageStats
from depthbatch.frontend.health import EngineHealth
from depthbatch.frontend.metrics import PREFIX

# the frontend counts these itself, for every request it takes: one series a name is enough
COUNTED_BY_FRONTEND = frozenset(
    PREFIX + n for n in ("prompt_tokens", "generation_tokens", "request_success", "exit_depth")
)
UNEXPORTED = COUNTED_BY_FRONTEND | {PREFIX + "stale_worker_results", PREFIX + "scheduler_us_per_stage"}

T = TypeVar("T")
Values = float | Mapping[str, float]  # one, or one for each value of a label


class ProcessCollector:
    """For a registry: what scheduler and worker last told, and how often each process was started again."""

    def __init__(self, health: Callable[[], EngineHealth], info: EngineInfo) -> None:
        self.stats: SchedulerStats | None = None
        self._health = health
        self._info = info

    def collect(self) -> Iterator[Metric]:
        if self.stats is not None:
            yield from (family for family in scheduler_families(self.stats) if family.name not in UNEXPORTED)
        blocks = {"block_size": str(self._info.block_size), "num_gpu_blocks": str(self._info.num_blocks - 1)}
        cache = GaugeMetricFamily(
            PREFIX + "cache_config_info", "The KV cache, as labels; always 1.", labels=["process", *blocks]
        )
        cache.add_metric(["worker", *blocks.values()], 1)
        yield cache
        restarts = CounterMetricFamily(
            PREFIX + "process_restarts", "Times a process was started again.", labels=["process"]
        )
        for process, state in self._health().processes.items():
            restarts.add_metric([process], state.restarts)
        yield restarts


def flat_stats(stats: SchedulerStats) -> dict[str, float]:
    """As one map of ``name{label="value"}``, without the prefix and the process: what the Python and ZMQ APIs give."""
    out: dict[str, float] = {}
    for family in scheduler_families(stats):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "process"}
            if labels.get("le") == "+Inf":
                continue  # the count
            inner = ",".join(f'{name}="{value}"' for name, value in labels.items())
            out[sample.name.removeprefix(PREFIX) + (f"{{{inner}}}" if inner else "")] = float(sample.value)
    return out


def scheduler_families(stats: SchedulerStats) -> Iterator[Metric]:
    """Every family with a sample."""
    if stats.core is not None:
        yield from filter(lambda family: family.samples, _core_families(stats.core))
    if stats.worker is not None:
        idle = {"scheduler": stats.worker.idle_scheduler_s, "no_work": stats.worker.idle_no_work_s}
        what = "Device idle: no work, or work that the scheduler had not sent."
        yield _counter("worker_idle_seconds", what, idle, "cause", "worker")
        yield _counter("worker_busy_seconds", "Device busy.", stats.worker.busy_s, process="worker")
    yield _counter("scheduler_stage_seconds", "Time of the scheduler's own loop, by verb.", stats.verb_seconds, "verb")
    if stats.us_per_stage:
        yield _gauge("scheduler_us_per_stage", "The scheduler's own time a stage.", stats.us_per_stage, "quantile")
    yield _counter("stale_worker_results", "Results of a worker that was replaced.", stats.stale_worker_results)
    yield _counter("decode_errors", "Bytes on a socket that were no message.", stats.decode_errors)


def _core_families(core: CoreStats) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Sequences that hold a slot.", core.running)
    yield _gauge("num_requests_waiting", "Sequences that wait for a slot.", core.waiting)
    yield _gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", core.kv_usage)
    yield _gauge("queue_length", "Rows in a queue.", core.queue_lengths, "queue")
    yield _counter("prompt_tokens", "Prompt tokens of requests that were started.", core.prompt_tokens)
    yield _counter("generation_tokens", "Tokens generated.", core.generation_tokens)
    yield _counter("request_success", "Requests finished, by reason.", core.finished, "finished_reason")
    yield _counter("admission_rejections", "Requests refused, by reason.", core.rejected, "reason")
    yield _counter("num_preemptions", "Sequences that lost their slot.", core.preemptions)
    yield _counter("recomputed_tokens", "Tokens computed again after a preemption or a death.", core.recomputed_tokens)
    yield _counter("kv_offload_bytes", "K/V copied to host memory.", core.offloaded_bytes)
    yield _counter("kv_restore_bytes", "K/V copied back from host memory.", core.restored_bytes)
    yield _counter("lookahead_wasted_steps", "Rows run for requests that had ended.", core.lookahead_wasted_steps)
    yield _counter("stale_results", "Results of steps that were given up.", core.stale_results)
    yield _counter("dropped_tokens", "Tokens sampled for requests that had ended.", core.dropped_tokens)
    if core.drafts:
        yield from _draft_families(core)
    if core.prefix_cache is not None:
        cache = core.prefix_cache
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.queries)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", cache.hits)
    yield _histogram("request_queue_time_seconds", "Arrival at the scheduler to first prefill.", core.queue_time_s)
    yield _histogram("exit_depth", "Loops an output token ran.", core.exit_depth)
    yield from _stage_families(core.stages)


def _draft_families(core: CoreStats) -> Iterator[Metric]:
    started = {loops: own.started for loops, own in core.drafts.items()}
    right = {loops: own.right for loops, own in core.drafts.items()}
    wrong = {loops: own.wrong for loops, own in core.drafts.items()}
    yield _counter("spec_decode_num_draft_tokens", "Drafts, by the loops they were read after.", started, "depth")
    yield _counter("spec_decode_num_accepted_tokens", "Drafts that were the token they stood for.", right, "depth")
    yield _counter("spec_decode_num_rejected_tokens", "Drafts that were not.", wrong, "depth")
    yield _counter("draft_rows", "Rows of core steps whose input was a guess.", core.draft_rows)


def _stage_families(stages: Mapping[str, StageStats]) -> Iterator[Metric]:
    steps = {stage: own.steps for stage, own in stages.items()}
    seconds = {stage: own.seconds for stage, own in stages.items()}
    padded = {stage: own.padded_rows for stage, own in stages.items()}
    yield _counter("stage_steps", "Times a stage ran.", steps, "stage")
    yield _counter("stage_seconds", "Device time of a stage.", seconds, "stage")
    yield _counter("padded_rows", "Rows computed for nothing, to fill a bucket.", padded, "stage")
    yield _histogram(
        "stage_batch_size", "Rows of a stage.", {stage: own.rows for stage, own in stages.items()}, "stage"
    )


def _counter(name: str, text: str, values: Values, label: str = "", process: str = "scheduler") -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=["process", label] if label else ["process"])
    for labels, value in _labelled(values, process):
        family.add_metric(labels, value)
    return family


def _gauge(name: str, text: str, values: Values, label: str = "") -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=["process", label] if label else ["process"])
    for labels, value in _labelled(values, "scheduler"):
        family.add_metric(labels, value)
    return family


def _histogram(name: str, text: str, values: HistogramStats | Mapping[str, HistogramStats], label: str = "") -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=["process", label] if label else ["process"])
    for labels, value in _labelled(values, "scheduler"):
        buckets = [(str(bound), float(count)) for bound, count in zip(value.bounds, value.cumulative, strict=True)]
        family.add_metric(labels, [*buckets, ("+Inf", float(value.count))], value.sum)
    return family


def _labelled(values: T | Mapping[str, T], process: str) -> Iterator[tuple[list[str], T]]:
    """Values with their labels."""
    if isinstance(values, Mapping):
        yield from (([process, key], value) for key, value in values.items())
    else:
        yield [process], values
