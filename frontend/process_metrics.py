"""The counters of scheduler and worker as Prometheus text. Reads what they report under its final name; counts nothing.

SchedulerStats holds ``name{label="value"}`` -> number, names as in names.md without the prefix. Here each series
gets its prefix, the process it comes from, a type and a help text.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from depthbatch.frontend.health import EngineHealth
from depthbatch.frontend.metrics import PREFIX


class Described(NamedTuple):
    """A metric of another process."""

    kind: str  # "counter", "gauge", "histogram"
    process: str
    help: str


METRICS = {
    "num_requests_running": Described("gauge", "scheduler", "Sequences that hold a slot."),
    "num_requests_waiting": Described("gauge", "scheduler", "Sequences that wait for a slot."),
    "kv_cache_usage_perc": Described("gauge", "scheduler", "Share of the KV blocks in use, 0 to 1."),
    "num_preemptions_total": Described("counter", "scheduler", "Sequences that lost their slot."),
    "request_queue_time_seconds": Described("histogram", "scheduler", "Arrival at the scheduler to first prefill."),
    "prefix_cache_queries_total": Described("counter", "scheduler", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits_total": Described("counter", "scheduler", "Prompt tokens found in the prefix cache."),
    "admission_rejections_total": Described("counter", "scheduler", "Requests refused, by reason."),
    "stage_batch_size": Described("histogram", "scheduler", "Rows of a stage."),
    "stage_seconds_total": Described("counter", "scheduler", "Device time of a stage."),
    "stage_steps_total": Described("counter", "scheduler", "Times a stage ran."),
    "padded_rows_total": Described("counter", "scheduler", "Rows computed for nothing, to fill a bucket."),
    "queue_length": Described("gauge", "scheduler", "Rows in a queue."),
    "scheduler_stage_seconds_total": Described("counter", "scheduler", "Time of the scheduler's own loop, by verb."),
    "lookahead_wasted_steps_total": Described("counter", "scheduler", "Rows run for requests that had ended."),
    "stale_results_total": Described("counter", "scheduler", "Results of steps that were given up."),
    "dropped_tokens_total": Described("counter", "scheduler", "Tokens sampled for requests that had ended."),
    "worker_idle_seconds_total": Described(
        "counter", "worker", "Device idle: no work, or work that the scheduler had not sent."
    ),
    "worker_busy_seconds_total": Described("counter", "worker", "Device busy."),
    "decode_errors_total": Described("counter", "scheduler", "Bytes on a socket that were no message."),
}

# the frontend counts these itself, for every request it takes: one series a name is enough
COUNTED_BY_FRONTEND = frozenset(
    {"prompt_tokens_total", "generation_tokens_total", "request_success_total", "exit_depth"}
)

_KEY = re.compile(r"^([a-z_]+?)(_bucket|_count|_sum)?(?:\{(.*)\})?$")


def process_metrics_text(stats: Mapping[str, float], health: EngineHealth) -> bytes:
    """Exposition text of everything but the frontend's own registry."""
    families: dict[str, list[str]] = {}
    for key, value in stats.items():
        found = _KEY.match(key)
        if found is None:
            continue
        name, suffix, labels = found[1], found[2] or "", found[3]
        if name not in METRICS or METRICS[name].kind != "histogram":
            name, suffix = name + suffix, ""
        if name not in METRICS or name in COUNTED_BY_FRONTEND:
            continue
        label = f'process="{METRICS[name].process}"' + (f",{labels}" if labels else "")
        families.setdefault(name, []).append(f"{PREFIX}{name}{suffix}{{{label}}} {float(value)!r}")
    lines: list[str] = []
    for name, samples in families.items():
        lines += [f"# HELP {PREFIX}{name} {METRICS[name].help}", f"# TYPE {PREFIX}{name} {METRICS[name].kind}"]
        lines += [line for sample in samples for line in _with_inf(sample, samples)]
    lines += [f"# HELP {PREFIX}process_restarts_total Times a process was started again."]
    lines += [f"# TYPE {PREFIX}process_restarts_total counter"]
    for process, state in health.processes.items():
        lines.append(f'{PREFIX}process_restarts_total{{process="{process}"}} {float(state.restarts)!r}')
    return ("\n".join(lines) + "\n").encode()


def _with_inf(sample: str, samples: list[str]) -> list[str]:
    """A histogram's count is also its last bucket, which Prometheus wants and the scheduler does not send."""
    if "_count{" not in sample:
        return [sample]
    name, _, rest = sample.partition("_count{")
    labels, _, value = rest.rpartition("} ")
    infinite = f'{name}_bucket{{{labels},le="+Inf"}} {value}'
    return [sample] if infinite in samples else [infinite, sample]
