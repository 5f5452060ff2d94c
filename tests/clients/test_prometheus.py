"""The Prometheus that Debian ships: it accepts the shipped files, scrapes a running server, and evaluates the rules."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.serve_process import ServeProcess, free_port, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_promtool_accepts_the_files() -> None:
    """Configuration and rules."""
    for kind, name in (("config", "prometheus.yml"), ("rules", "prometheus-rules.yml")):
        run = subprocess.run(
            ["promtool", "check", kind, str(DEPLOY / name)], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0 and "SUCCESS" in run.stdout, run.stderr


def test_promtool_accepts_the_metrics(server: ServeProcess) -> None:
    """All it has to say is that names hold a colon, which is how they are called (as vLLM's are)."""
    text = httpx.get(server.url + "/metrics").text
    run = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    complaints = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    assert complaints and all(line.endswith("metric names should not contain ':'") for line in complaints), complaints


@pytest.fixture(scope="module")
def prometheus(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with the shipped configuration; only the port and the interval are changed."""
    directory = tmp_path_factory.mktemp("prometheus")
    config = (DEPLOY / "prometheus.yml").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    config = config.replace("_interval: 5s", "_interval: 1s").replace(
        "prometheus-rules", str(DEPLOY / "prometheus-rules")
    )
    (directory / "prometheus.yml").write_text(config)
    port = free_port()
    command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def query(prometheus: str, expression: str) -> list[Any]:
    try:
        response = httpx.get(prometheus + "/api/v1/query", params={"query": expression}, timeout=5)
    except httpx.HTTPError:
        return []
    if response.status_code == 503:  # it listens before it is ready
        return []
    answer = response.json()
    assert answer["status"] == "success", answer
    result: list[Any] = answer["data"]["result"]
    return result


def test_prometheus_scrapes_and_counts(server: ServeProcess, prometheus: str) -> None:
    """The counters it has stored are those of the answers, with the process they come from."""
    wait_until(lambda: [r["value"][1] for r in query(prometheus, 'up{job="depthbatch"}')] == ["1"], "scraped")
    before = httpx.get(server.url + "/metrics").text
    start = float(re.findall(r"^depthbatch:generation_tokens_total.* (\S+)$", before, re.M)[0])
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "12+30=", "max_tokens": 16, "ignore_eos": True})
    tokens = answer.json()["usage"]["completion_tokens"]
    assert tokens == 16
    wanted = [("frontend", str(int(start + tokens)))]

    def stored() -> bool:
        found = query(prometheus, "depthbatch:generation_tokens_total")
        return [(r["metric"]["process"], r["value"][1]) for r in found] == wanted

    wait_until(stored, "the tokens are stored")
    busy = query(prometheus, 'depthbatch:worker_busy_seconds_total{process="worker"}')
    assert float(busy[0]["value"][1]) > 0


def test_rules_and_panels_are_evaluated(prometheus: str) -> None:
    """Every alert is loaded and healthy, none is firing; every panel's query is one that Prometheus accepts."""
    wait_until(lambda: _rules(prometheus) != [], "rules are loaded")
    wait_until(lambda: {rule["health"] for rule in _rules(prometheus)} == {"ok"}, "rules were evaluated")
    assert {rule["state"] for rule in _rules(prometheus)} == {"inactive"}
    dashboard = json.loads((DEPLOY / "grafana" / "depthbatch.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            query(prometheus, target["expr"].replace('"$instance"', '".*"'))


def _rules(prometheus: str) -> list[Any]:
    groups = httpx.get(prometheus + "/api/v1/rules", timeout=5).json()["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]
