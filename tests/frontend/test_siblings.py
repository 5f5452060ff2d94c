"""Frontends of one scheduler: ids that never meet, and metrics that add up."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from depthbatch.common.config import EngineConfig
from depthbatch.deploy.supervise.attached import AttachedProcesses
from depthbatch.frontend.engine_client import _requests_of
from depthbatch.frontend.http.settings import HttpConfig
from depthbatch.frontend.live_requests import LiveRequest
from depthbatch.frontend.metrics import FrontendMetrics
from depthbatch.frontend.siblings import SharedMetrics


class NoSupervisor:
    def exit_code(self, name: str) -> int | None:
        return None

    def start(self, name: str) -> None: ...


def test_ids_of_frontends_never_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug in waiting: ids began at the start time in microseconds and grew by one, so one of two frontends that start 10 ms apart
    came to the other's after 10,000 requests. Here both start at once."""
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_000_000_000)
    given: list[set[int]] = []
    for number in (0, 1, 63):
        processes = AttachedProcesses(tmp_path, EngineConfig(), NoSupervisor(), number)
        requests = _requests_of(processes)
        live = LiveRequest.begin([1], None)  # type: ignore[arg-type]
        given.append({requests.add(live) for _ in range(200)})
    assert len(set.union(*given)) == 600 and max(map(max, given)) < 1 << 62


def scraped(metrics: SharedMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


def test_metrics_are_of_all_and_never_fall(tmp_path: Path) -> None:
    """Counters, labels that only one has, histogram buckets: what one frontend tells is the sum. Of one that died, what it had
    written stays, also when its successor counts from nought."""
    own, other = FrontendMetrics(4), FrontendMetrics(4)
    for metrics, tokens, reason in ((own, 2, "stop"), (other, 3, "length")):
        with metrics.sequence(5) as timer:
            timer.tokens([4] * tokens, reason, 0.0)
    shared, its = (SharedMetrics(m.registry, tmp_path, number, 2) for number, m in enumerate((own, other)))
    its.write()
    text = scraped(shared)
    for line in (
        'generation_tokens_total{process="frontend"} 5.0',
        'prompt_tokens_total{process="frontend"} 10.0',
        'request_success_total{finished_reason="stop",process="frontend"} 1.0',
        'request_success_total{finished_reason="length",process="frontend"} 1.0',
        'exit_depth_bucket{le="4.0",process="frontend"} 5.0',
        'exit_depth_count{process="frontend"} 5.0',
        'exit_depth_sum{process="frontend"} 20.0',
    ):
        assert f"depthbatch:{line}\n" in text, line
    assert text.count("# TYPE depthbatch:exit_depth histogram") == 1
    successor = SharedMetrics(FrontendMetrics(4).registry, tmp_path, 1, 2)
    assert scraped(shared) == text, "it has not written yet"
    successor.write()
    assert scraped(shared) == text
    shared.write()
    assert 'generation_tokens_total{process="frontend"} 5.0\n' in scraped(successor)


def test_places_are_shared_out() -> None:
    """All frontends together take about what one would, and none takes nothing."""
    assert HttpConfig(max_requests=100, frontends=3).places == 34
    assert HttpConfig(max_requests=2, frontends=8).places == 1
    keys = HttpConfig(max_requests=100, frontends=2, api_key="a,b")
    assert (keys.places, keys.places_per_key) == (50, 25)
    assert HttpConfig(max_requests=100, frontends=2, max_requests_per_key=10).places_per_key == 5
