"""Dashboards and alerts speak of metrics that exist: every name in them is one that a server exports."""

import json
import re
from pathlib import Path

import msgspec
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from depthbatch.common.messages import SchedulerStats
from depthbatch.common.stats import DraftStats, PrefixCacheStats, WorkerStats
from depthbatch.frontend.health import EngineHealth, ProcessHealth
from depthbatch.frontend.metrics import FrontendMetrics
from depthbatch.frontend.process_metrics import UNEXPORTED, ProcessCollector, flat_stats, scheduler_families
from depthbatch.scheduler.counters import Counters
from fakes.serving_engine import fake_info

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NAME = re.compile(r"depthbatch:[a-z0-9_]+")
SUFFIX = re.compile(r"_(bucket|count|sum)$")


def exported() -> set[str]:
    """Every family that /metrics can hold, without the suffixes of histograms."""
    own = FrontendMetrics(4)
    own.rejected("queue_full")
    with own.sequence(3) as timer:
        timer.tokens((4, 2), "stop", 1.0)
    names = {
        SUFFIX.sub("", sample.name) for family in _families(generate_latest(own.registry)) for sample in family.samples
    }
    return names | {SUFFIX.sub("", sample.name) for family in told(full_stats()).collect() for sample in family.samples}


def full_stats() -> SchedulerStats:
    """Of an engine that has done everything once."""
    counters = Counters(width=8, r_max=4)
    counters.rejected("prompt")
    core = msgspec.structs.replace(
        counters.stats(),
        queue_lengths={"q_p": 0},
        prefix_cache=PrefixCacheStats(queries=3, hits=1),
        draft_rows=11,
        drafts={"1": DraftStats(started=9, right=5, wrong=2), "2": DraftStats(started=1)},
    )
    return SchedulerStats(core, WorkerStats(1.0, 2.0, 3.0), {"schedule": 0.5}, {"0.50": 40.0})


def told(stats: SchedulerStats) -> ProcessCollector:
    """What a scrape joins to the frontend's own figures."""
    health = EngineHealth("ok", {"worker": ProcessHealth(1, "running", 0, 0.0, 3)})
    collector = ProcessCollector(lambda: health, fake_info())
    collector.stats = stats
    return collector


def _families(text: bytes) -> list:
    return list(text_string_to_metric_families(text.decode()))


def _used(text: str) -> set[str]:
    return {SUFFIX.sub("", name) for name in NAME.findall(text)}


def test_grafana_uses_exported_names() -> None:
    """A panel on a name that nobody exports stays empty for ever without an error."""
    dashboard = json.loads((DEPLOY / "grafana" / "depthbatch.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = _used(" ".join(expressions))
    assert len(expressions) > 20 and used <= exported()
    assert {"depthbatch:stage_batch_size", "depthbatch:worker_idle_seconds_total", "depthbatch:exit_depth"} <= used
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_alert_rules_use_exported_names() -> None:
    """An alert on a name that nobody exports never fires."""
    rules = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())["groups"][0]["rules"]
    used = _used(" ".join(rule["expr"] for rule in rules))
    assert len(rules) >= 5 and used and used <= exported()
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert config["rule_files"] == ["prometheus-rules.yml"]


def test_scheduler_counters_become_valid_exposition() -> None:
    """What the scheduler's counters are called is what the join knows: nothing of theirs is dropped but what the
    frontend counts itself, labels and buckets survive, and the result parses."""
    stats = full_stats()
    registry = CollectorRegistry()
    registry.register(told(stats))
    families = {family.name: family for family in _families(generate_latest(registry))}
    wanted = {family.name for family in scheduler_families(stats)}
    assert set(families) == (wanted - UNEXPORTED) | {"depthbatch:process_restarts", "depthbatch:cache_config_info"}
    assert wanted > UNEXPORTED and len(wanted) == 33
    sizes = families["depthbatch:stage_batch_size"]
    assert sizes.type == "histogram"
    stages = {sample.labels["stage"] for sample in sizes.samples}
    assert stages == {"prefill", "prelude", "core", "coda"}
    infinite = [sample for sample in sizes.samples if sample.labels.get("le") == "+Inf"]
    assert len(infinite) == len(stages)
    assert families["depthbatch:request_queue_time_seconds"].type == "histogram"
    idle = {sample.labels["cause"]: sample.value for sample in families["depthbatch:worker_idle_seconds"].samples}
    assert idle == {"scheduler": 2.0, "no_work": 3.0}
    (cache,) = families["depthbatch:cache_config_info"].samples
    assert cache.labels == {"process": "worker", "block_size": "16", "num_gpu_blocks": "99"} and cache.value == 1
    restarts = families["depthbatch:process_restarts"].samples[0]
    assert restarts.labels == {"process": "worker"} and restarts.value == 3


def test_page_of_names_lists_what_is_exported() -> None:
    """docs/names.md and /metrics have the same names: a new one without a line, or a line without a series, fails here."""
    page = (DEPLOY.parent / "docs" / "names.md").read_text().split("## Prometheus\n")[1].split("\n## ")[0]
    listed = {f"depthbatch:{name}" for name in re.findall(r"^\| `(\w+)` ", page, re.MULTILINE)}
    assert listed == exported()


def test_flat_names_are_those_of_the_apis() -> None:
    """LLM.stats() and the native API give the same figures as one map: without the prefix, the process and the bucket
    that only repeats the count. These names are public."""
    values = flat_stats(full_stats())
    assert values['worker_idle_seconds_total{cause="no_work"}'] == 3.0
    assert values['scheduler_stage_seconds_total{verb="schedule"}'] == 0.5
    assert values['scheduler_us_per_stage{quantile="0.50"}'] == 40.0
    assert values['admission_rejections_total{reason="prompt"}'] == 1.0
    names = {name.partition("{")[0] for name in values}
    assert {"prefix_cache_hits_total", "num_requests_running", "kv_cache_usage_perc", "decode_errors_total"} < names
    assert values['spec_decode_num_draft_tokens_total{depth="1"}'] == 9.0 and values["draft_rows_total"] == 11.0
    assert values['spec_decode_num_accepted_tokens_total{depth="1"}'] == 5.0
    assert values['spec_decode_num_rejected_tokens_total{depth="1"}'] == 2.0
    assert values['spec_decode_num_accepted_tokens_total{depth="2"}'] == 0.0
    buckets = [name for name in values if name.startswith("stage_batch_size_bucket") and "core" in name]
    assert buckets == [f'stage_batch_size_bucket{{stage="core",le="{bound}"}}' for bound in range(1, 9)]
    assert values['stage_batch_size_count{stage="core"}'] == values["exit_depth_sum"] == 0.0
    assert 'request_queue_time_seconds_bucket{le="1.0"}' in values and not any("Inf" in name for name in values)
