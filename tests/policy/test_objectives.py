"""The objectives of ``auto`` in virtual time: each is best at what it aims at, and throughput is what it was."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import depthbatch.benchmarks as benchmarks
from depthbatch.benchmarks.made_up_profiles import profile_by_name
from depthbatch.benchmarks.simulate import run_policy
from depthbatch.benchmarks.sources import load_workload
from depthbatch.benchmarks.sweep import read_sweep, run_settings
from depthbatch.benchmarks.sweep_runs import exit_weights
from depthbatch.benchmarks.tables import Cell
from depthbatch.common.gates import Gate
from depthbatch.scheduler.policy.prefill_pacing import DecodeForecast, LatencyTargets, Pacing, PrefillCost
from depthbatch.scheduler.requests import Request, State, WaitingQueue

BENCHMARKS = Path(benchmarks.__path__[0])
RECORDED = BENCHMARKS / "results" / "policy_grid.jsonl"
SAMPLE = (
    Cell("h100-ouro-1.4b", "q=0.2", "alpaca", 64),
    Cell("h100-huginn-3.5b", "q=0.28", "alpaca", 64),
    Cell("random-1", "middle", "alpaca", 64),
)


@pytest.mark.parametrize("cell", SAMPLE)
def test_throughput_decides_as_it_did_when_the_grid_was_run(cell: Cell) -> None:
    """Virtual time depends on every decision and on nothing else, so tokens/s to five digits are the same schedule."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    (line,) = [line for line in lines if Cell(*(line[key] for key in Cell._fields)) == cell]
    profile = profile_by_name(cell.profile)
    workload = load_workload(cell.workload, line["requests"], exit_weights(cell.exits, profile), profile.r_max)
    assert round(run_policy(profile, workload, cell.w, policy="auto").tokens_per_s, 2) == line["auto"]


@cache
def served(rate: float, objective: str) -> dict[str, Any]:
    """160 requests of ShareGPT lengths to the Ouro profile, W = 64, TTFT 1,000 ms and ITL 50 ms."""
    sweep = read_sweep(BENCHMARKS / "sweeps" / "objectives_ouro.toml")
    policy = "auto" if objective == "throughput" else f"auto:{objective}"
    axes = sweep["axes"] | {"rate": [rate], "policy": [policy]}
    return run_settings(sweep | {"requests": 160, "axes": axes})[-1]


def test_latency_keeps_the_itl_target_where_throughput_does_not() -> None:
    """Below saturation: p99.9 ITL near its target (throughput: a third above it), for less than 1 % of the tokens."""
    plain, paced = served(6.0, "throughput"), served(6.0, "latency")
    assert plain["p99.9_itl_ms"] > 1.3 * 50.0
    assert paced["p99.9_itl_ms"] < 1.2 * 50.0
    assert paced["tokens_per_s"] > 0.99 * plain["tokens_per_s"]


def test_goodput_serves_those_who_can_still_be_in_time() -> None:
    """At half more than the device can do nearly all requests are late in arrival order; goodput keeps most of what the
    device can do, and nobody is left out in the end (all requests of the run finish)."""
    plain, aimed = served(12.0, "throughput"), served(12.0, "goodput")
    assert aimed["goodput_tokens_per_s"] > 1.3 * plain["goodput_tokens_per_s"]
    assert aimed["tokens_per_s"] > 0.9 * plain["tokens_per_s"]


def make_request(request_id: int, priority: int = 0, client: int = 0) -> Request:
    params: Any = SimpleNamespace(priority=priority)
    return Request(request_id, np.zeros(1, np.int32), params, Gate.NONE, 1, request_id, frozenset(), client=client)


def test_overdue_requests_wait_behind_all_others_whatever_their_priority() -> None:
    queue = WaitingQueue()
    requests = [make_request(0, priority=9), make_request(1), make_request(2, priority=-9)]
    for request in requests:
        queue.push(request)
    queue.set_overdue(requests[0])
    order = []
    while (head := queue.head()) is not None:
        order.append(head.request_id)
        queue.remove(head)
        head.state = State.DONE
    assert order == [1, 2, 0] and len(queue) == 0


def order_of(queue: WaitingQueue) -> list[int]:
    """Request ids as they are admitted."""
    order = []
    while (head := queue.head()) is not None:
        assert queue.head() is head
        order.append(head.request_id)
        queue.remove(head)
    assert len(queue) == 0
    return order


def test_clients_take_turns() -> None:
    """Bug: who had sent a thousand requests was served with all of them before anybody who came then. Within a priority a
    client waits for one request of each other; its own go in order. Priorities come first all the same, a preempted
    request before all of its priority, and one that is aborted costs nobody a turn."""
    queue = WaitingQueue()
    for request_id in range(6):
        queue.push(make_request(request_id, client=1))
    queue.push(make_request(10, client=2))
    queue.push(make_request(20, client=3))
    queue.push(make_request(11, client=2))
    gone = make_request(21, client=3)
    queue.push(gone)
    queue.push(make_request(30, priority=5, client=1))
    queue.push_front(make_request(12, client=2))
    queue.remove(gone)
    assert order_of(queue) == [30, 12, 0, 20, 10, 1, 11, 2, 3, 4, 5]


def test_before_costs_are_known_nothing_is_limited() -> None:
    """The first prefills of an engine must not wait for a model of themselves."""
    pacing = Pacing("latency", LatencyTargets(0.1, 0.01), 4, 512)
    view: Any = SimpleNamespace(can_prefill=lambda s: s <= 2)
    forecast = DecodeForecast(np.zeros(5), 0.0)
    assert pacing.limit(view, 0.0, 2, None, forecast) == (512, 4)
    assert pacing.limit(view, 0.0, 3, None, forecast) is None
    assert pacing.limit(view, 0.0, 2, PrefillCost(0.01, 0.0), forecast) == (512, 4)  # no core step has run yet
