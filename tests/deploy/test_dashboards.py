"""Dashboards and alerts speak of metrics that exist: every name in them is one that a server exports."""

import json
import re
from pathlib import Path

import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from depthbatch.frontend.health import EngineHealth, ProcessHealth
from depthbatch.frontend.metrics import FrontendMetrics
from depthbatch.frontend.process_metrics import METRICS, process_metrics_text
from depthbatch.scheduler.counters import Counters

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
    return names | {f"depthbatch:{name}" for name in METRICS} | {"depthbatch:process_restarts_total"}


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
    counters = Counters(width=8, r_max=4)
    values = counters.values()
    health = EngineHealth("ok", {"worker": ProcessHealth(1, "running", 0, 0.0, 3)})
    families = {family.name: family for family in _families(process_metrics_text(values, health))}
    dropped = {
        "depthbatch:prompt_tokens",
        "depthbatch:generation_tokens",
        "depthbatch:request_success",
        "depthbatch:exit_depth",
    }
    wanted = {re.sub(r"_total$", "", SUFFIX.sub("", "depthbatch:" + key.partition("{")[0])) for key in values}
    assert set(families) == (wanted - dropped) | {"depthbatch:process_restarts"}
    sizes = families["depthbatch:stage_batch_size"]
    assert sizes.type == "histogram"
    stages = {sample.labels["stage"] for sample in sizes.samples}
    assert stages == {"prefill", "prelude", "core", "coda"}
    infinite = [sample for sample in sizes.samples if sample.labels.get("le") == "+Inf"]
    assert len(infinite) == len(stages)
    assert families["depthbatch:request_queue_time_seconds"].type == "histogram"
    restarts = families["depthbatch:process_restarts"].samples[0]
    assert restarts.labels == {"process": "worker"} and restarts.value == 3


def test_page_of_names_lists_what_is_exported() -> None:
    """docs/names.md and /metrics have the same names: a new one without a line, or a line without a series, fails here."""
    page = (DEPLOY.parent / "docs" / "names.md").read_text().split("## Prometheus\n")[1].split("\n## ")[0]
    listed = {f"depthbatch:{name}" for name in re.findall(r"^\| `(\w+)` ", page, re.MULTILINE)}
    assert listed == exported()
