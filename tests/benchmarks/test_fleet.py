"""``bench fleet``: one replica against the simulator, deaths, routers, and the search for the smallest fleet."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from depthbatch.benchmarks import fleet, fleet_sweep
from depthbatch.benchmarks.fleet import Fleet, Run, fewest_replicas, report, scheduler_config
from depthbatch.benchmarks.fleet_traffic import Traffic, TrafficOptions, make_traffic
from depthbatch.benchmarks.simulate import simulate
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.errors import ConfigError
from depthbatch.worker.simulated import find_profile

PROFILE = find_profile("h100-ouro-1.4b")
OPTIONS = TrafficOptions(rate=60.0, exits="0.1,1.0", seed=3)


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return make_traffic(OPTIONS, 150, PROFILE.r_max)


def run(fleet: Fleet, traffic: Traffic) -> dict[str, Any]:
    result = Run(fleet, traffic, PROFILE).run(progress=False)
    assert all(not len(each.scheduler._requests) for each in result.replicas if each.up)
    return report(fleet, traffic, result) | {"first_s": result.first_s, "last_s": result.last_s, "lost": result.victims}


def test_one_replica_is_the_simulator(traffic: Traffic) -> None:
    """The same scheduler, device and requests: first and last token of each come at the same virtual times."""
    fleet = Fleet(1, width=16)
    requests = [
        WorkloadRequest(int(p), int(o), exit_depths=tuple(d), arrival_s=float(a))
        for p, o, d, a in zip(
            traffic.prompt_tokens, traffic.output_tokens, traffic.depths, traffic.arrivals_s, strict=True
        )
    ]
    alone = simulate(Workload(tuple(requests)), PROFILE, scheduler_config(fleet, traffic, PROFILE), progress=False)
    result = Run(fleet, traffic, PROFILE).run(progress=False)
    for times, own in ((alone.first_token_s, result.first_s), (alone.last_token_s, result.last_s)):
        assert np.allclose([times[i] for i in range(150)], own + traffic.arrivals_s, rtol=0, atol=1e-9)


@pytest.mark.parametrize("router", ["round-robin", "requests", "loops", "prefix"])
def test_every_request_ends_whatever_dies(router: str) -> None:
    """Two of three replicas die while they work, and one more life begins: every request has its tokens; those that were
    lost wait for detection, and without resumption for all of their tokens again."""
    traffic = make_traffic(replace(OPTIONS, prefixes=5, prefix_tokens=64), 150, PROFILE.r_max)
    fleet = Fleet(3, router, prefix_caching=True, failures=2, fail_at_s=1.0, detect_s=0.5, restart_s=1.0)
    undisturbed = run(replace(fleet, failures=0), traffic)
    resumed, anew = run(fleet, traffic), run(replace(fleet, resume=False), traffic)
    lost = resumed["lost"]
    assert resumed["victims"] == lost.sum() > 10 and resumed["victims_longest_gap_ms"]["p50"] >= 500
    assert np.array_equal(
        resumed["first_s"][traffic.arrivals_s < 0.5], undisturbed["first_s"][traffic.arrivals_s < 0.5]
    )
    assert anew["last_s"][lost].mean() > resumed["last_s"][lost].mean() > undisturbed["last_s"][lost].mean() + 0.4


def test_routers_know_what_they_are_told() -> None:
    """Requests of one beginning stay together under ``prefix``, which hits more; bad settings are refused by name."""
    traffic = make_traffic(replace(OPTIONS, prefixes=8, prefix_tokens=256), 150, PROFILE.r_max)
    hits = {
        router: run(Fleet(4, router, prefix_caching=True), traffic)["prefix_hit_rate"]
        for router in ("round-robin", "prefix")
    }
    assert hits["prefix"] > hits["round-robin"] + 0.05
    with pytest.raises(ConfigError, match="router must be one of"):
        Fleet(1, "random")
    with pytest.raises(ConfigError, match="one has to be left"):
        Fleet(2, failures=2)
    with pytest.raises(ConfigError, match="are not thresholds among 0"):
        make_traffic(replace(OPTIONS, exits="0.15"), 10, 4)


def test_traffic_is_the_same_for_every_fleet(traffic: Traffic) -> None:
    """And what a router expects of a request follows from its threshold alone: two values here."""
    again = make_traffic(OPTIONS, 150, PROFILE.r_max)
    assert again.depths == traffic.depths and np.array_equal(again.arrivals_s, traffic.arrivals_s)
    low, high = np.unique(traffic.expected_loops)
    assert high / low == pytest.approx(4 / 2.30)
    full = [set(depths) == {4} for depths in traffic.depths]
    assert np.array_equal(traffic.expected_loops == high, full)


def test_the_smallest_fleet_is_found() -> None:
    """By halves, with few probes; none that is large enough is an error."""
    asked: list[int] = []

    def probe(replicas: int) -> dict[str, Any]:
        asked.append(replicas)
        return {"replicas": replicas, "ttft_ms": {"p99": 7000 / replicas}, "tpot_ms": {"p99": 20.0}}

    assert fewest_replicas(probe, (100.0, 30.0), 1, 128)["replicas"] == 70 and len(asked) <= 9
    with pytest.raises(ConfigError, match="128 replicas do not meet the goal"):
        fewest_replicas(probe, (10.0, 30.0), 1, 128)


def test_a_search_begins_with_one_replica_more_than_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the search asked for fleets in which none was left, which ended it with an error."""
    parser = argparse.ArgumentParser()
    fleet.add_fleet_arguments(parser)
    words = ["--replicas", "3", "--failures", "1", "--requests", "30", "--rate", "5", "--goal", "1e9", "1e9"]
    assert fleet.run_fleet(parser.parse_args(words)) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["replicas"] == 2 and [row.split()[0] for row in told.err.splitlines()] == ["3", "2"]


def test_a_sweep_that_cannot_be_drawn_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="figures need matplotlib"):
        fleet_sweep.run_fleet_sweep(argparse.Namespace(directory=tmp_path, only=None))
    assert not list(tmp_path.iterdir())


def test_a_sweep_goes_on_where_its_file_ends(tmp_path: Path) -> None:
    """Rows that are there are not run again."""
    todo = [
        fleet_sweep.Case("router", Fleet(2, router), replace(OPTIONS, rate=30.0), 20)
        for router in ("loops", "round-robin")
    ]
    said: list[str] = []
    fleet_sweep.sweep(tmp_path, todo[:1], said.append)
    rows = fleet_sweep.sweep(tmp_path, todo, said.append)
    assert len(said) == 2 and [row["router"] for row in rows] == ["loops", "round-robin"]
    assert fleet_sweep.read_rows(tmp_path) == rows
    fleet_sweep.draw(rows, tmp_path)
    assert (tmp_path / "routers.png").stat().st_size > 1000 and (tmp_path / "goal.png").exists()
    assert fleet_sweep.tables(rows).count("| 2 | 64 | ") == 2
    assert len({case.key for case in fleet_sweep.cases()}) == len(list(fleet_sweep.cases()))
