"""What scheduler and worker have counted since their start, as typed numbers. The frontend alone knows how Prometheus
calls them."""

import msgspec


class _Stats(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all; a default is what nothing has been counted for."""


class HistogramStats(_Stats, frozen=True):
    bounds: tuple[int | float, ...] = ()  # upper bounds of the buckets, themselves included
    cumulative: tuple[int, ...] = ()  # observations up to each bound
    count: int = 0  # of all observations
    sum: float = 0.0


class StageStats(_Stats, frozen=True):
    """Of one stage."""

    steps: int = 0  # times it ran
    seconds: float = 0.0  # of the device
    padded_rows: int = 0
    rows: HistogramStats = HistogramStats()


class PrefixCacheStats(_Stats, frozen=True):
    """Prompt tokens."""

    queries: int
    hits: int


class DraftStats(_Stats, frozen=True):
    """Of the drafts that were read after so many loops. Those that are neither right nor wrong were dropped before the
    token they stood for was known."""

    started: int = 0
    right: int = 0
    wrong: int = 0


class CoreStats(_Stats, frozen=True):
    """Of the scheduler core. Maps go by the label of stage, queue or reason."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    offloaded_bytes: int = 0  # to host memory
    restored_bytes: int = 0  # and back
    lookahead_wasted_steps: int = 0
    stale_results: int = 0
    dropped_tokens: int = 0
    finished: dict[str, int] = {}
    rejected: dict[str, int] = {}
    stages: dict[str, StageStats] = {}
    queue_time_s: HistogramStats = HistogramStats()
    exit_depth: HistogramStats = HistogramStats()
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt and output of these
    kv_usage: float = 0.0  # share of the blocks, 0 to 1
    queue_lengths: dict[str, int] = {}
    prefix_cache: PrefixCacheStats | None = None
    draft_rows: int = 0  # of core steps: their input was not certain
    drafts: dict[str, DraftStats] = {}  # by the loops after which they were read


class WorkerStats(_Stats, frozen=True):
    """Seconds on the worker's own clock."""

    busy_s: float
    idle_scheduler_s: float  # there was work, and the scheduler had not sent it
    idle_no_work_s: float
