"""What a user names becomes the workload meant, with the exits asked for."""

import json
from pathlib import Path

import numpy as np
import pytest

from depthbatch.benchmarks import synthetic
from depthbatch.benchmarks.sources import default_exits, load_workload, parse_exits, with_exits
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.errors import ConfigError


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in workload.requests]


def test_thresholds_are_compared_on_the_same_requests() -> None:
    """Exits must not disturb the draw of lengths, else a threshold sweep compares different work."""
    one = load_workload("alpaca", 50, synthetic.OURO_EXITS[0.1], 4, seed=4)
    other = load_workload("alpaca", 50, synthetic.HUGINN_EXITS[0.28], 16, seed=4)
    assert lengths(one) == lengths(other)
    assert one != other
    assert [len(r.exit_depths or ()) for r in one.requests] == [r.output_tokens - 1 for r in one.requests]
    assert lengths(load_workload("alpaca", 50, {4: 1.0}, 4, seed=5)) != lengths(one)


def test_file_keeps_its_recorded_depths_unless_exits_are_given(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    Workload((WorkloadRequest(5, 3, exit_depths=(2, 3)), WorkloadRequest(6, 2))).write(path)
    assert load_workload(str(path), 9, None, 4) == Workload.read(path)
    assert load_workload(str(path), 1, {}, 4).requests == (WorkloadRequest(5, 3),)
    assert load_workload(str(path), 9, {4: 1.0}, 4).requests[0].exit_depths == (4, 4)


def test_data_set_files_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "say it", "output": "a b c d"}, {"instruction": "x", "output": "y z"}]))
    loaded = load_workload(f"alpaca:{path}", 9, {}, 4, count=lambda text: 4 * len(text.split()))
    assert lengths(loaded) == [(8, 16), (4, 8)]


@pytest.mark.parametrize(
    ("source", "exits", "message"),
    [
        ("alpacca", None, "alpacca"),
        ("gone.json", None, "gone.json"),
        ("alpaca:gone", None, "gone"),
        ("alpaca", {5: 1.0}, "depth 5, above r_max 4"),
    ],
)
def test_errors_name_the_thing(source: str, exits: dict[int, float] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(source, 3, exits, 4)


def test_parse_exits() -> None:
    assert parse_exits(None) is None
    assert parse_exits("full") == {}
    assert parse_exits('{"2": 1, "3": 3}') == {2: 1.0, 3: 3.0}
    with pytest.raises(ConfigError, match="neither 'full' nor"):
        parse_exits("2:1")


@pytest.mark.parametrize("r_max", [1, 2, 4, 6, 16, 32])
def test_default_exits_fit_any_model(r_max: int) -> None:
    exits = default_exits(r_max)
    assert min(exits) >= 1 and max(exits) <= r_max
    assert sum(exits.values()) == pytest.approx(1.0)


def test_with_exits_is_seeded() -> None:
    base = Workload(tuple(WorkloadRequest(4, 200) for _ in range(20)))
    exits = {2: 0.5, 4: 0.5}
    assert with_exits(base, exits, 1) == with_exits(base, exits, 1) != with_exits(base, exits, 2)
    depths = np.concatenate([r.exit_depths for r in with_exits(base, exits, 1, 0.0).requests])
    assert np.mean(depths == 2) == pytest.approx(0.5, abs=0.05)
