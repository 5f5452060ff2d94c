"""The soak, for seconds, on the simulated device."""

import json
from pathlib import Path

import pytest

from depthbatch.benchmarks.soak import memory_growth, requests_of
from depthbatch.common.errors import ConfigError
from depthbatch.deploy.cli.main import main

SHORT = (
    "bench", "soak", "demo", "--serve-option=--device=simulated:h100-ouro-1.4b", "--minute-s", "1.5", "--minutes", "2",
    "--capacity-requests", "12", "--max-num-seqs", "8", "--most-tokens", "24",
)  # fmt: skip


def test_every_minute_has_its_figures_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the server counted is what the clients got, minute by minute."""
    assert main([*SHORT, "--output", str(tmp_path / "soak.json")]) == 0
    figures = json.loads((tmp_path / "soak.json").read_text())
    rows = figures["rows"]
    assert [row["minute"] for row in rows] == [1, 2]
    assert figures["completed"] == figures["counted_by_server"] == sum(row["completed"] for row in rows) > 0
    assert figures["arrivals_per_s"] == pytest.approx(0.8 * figures["capacity_requests_per_s"])
    assert [row["completed"] for row in rows] == [max(1, round(1.5 * figures["arrivals_per_s"]))] * 2
    assert not any(figures["left"].values()) and not any(figures["restarts"].values())
    assert set(figures["memory_growth"]) == {"frontend", "scheduler", "worker"}
    for row in rows:
        assert row["median_ttft_ms"] <= row["p99_ttft_ms"] and row["output_throughput"] > 0
        for use in row["processes"].values():
            assert use["resident_mib"] > 1 and use["descriptors"] > 3 and 0 <= use["cores"] < 4
    assert capsys.readouterr().err.count("minute ") == 2


def test_a_lost_token_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Answers that the server cuts off are no answers."""
    assert main([*SHORT, "--serve-option=--default-timeout-s=0.05"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["lost_tokens"] > 0
    assert " 0 tokens lost" not in captured.err


def test_growth_is_from_the_end_of_the_warm_minutes() -> None:
    """The first sixth of the minutes does not count."""
    rows = [{"processes": {"worker": {"resident_mib": mib}}} for mib in (50.0, 100.0, 120.0, 90.0, 100.0, 110.0)]
    assert memory_growth(rows) == {"worker": pytest.approx(0.1)}
    assert memory_growth(rows[-1:]) == {"worker": 0.0}


def test_requests_fit() -> None:
    """Lengths of the workload, none longer than asked; the same for the same seed; what cannot be drawn is refused."""
    requests = requests_of("alpaca", 50, 64, 3).requests
    assert len(requests) == 50 and all(r.total_tokens <= 64 for r in requests)
    assert requests_of("alpaca", 50, 64, 3).requests == requests != requests_of("alpaca", 50, 64, 4).requests
    with pytest.raises(ConfigError, match="--most-tokens 7"):
        requests_of("alpaca", 50, 7, 3)


def test_times_of_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, before a server starts."""
    assert main([*SHORT, "--minute-s", "0"]) == 2
    assert "--minute-s" in capsys.readouterr().err
