"""Sweeps run the product they name, once each; their figures and claims follow from the rows."""

import json
from pathlib import Path

import pytest

from depthbatch.benchmarks import sweep as module
from depthbatch.benchmarks.paper_report import claims_table
from depthbatch.benchmarks.policy_grid import exit_distributions, find_profiles, random_profile, run_grid, summary
from depthbatch.benchmarks.sweep import (
    add_sweep_arguments,
    exit_weights,
    read_sweep,
    run_settings,
    run_sweep,
    with_boundary_layers,
)
from depthbatch.common.errors import ConfigError
from depthbatch.deploy.cli.main import OneLineParser
from depthbatch.worker.simulated import find_profile

PAPER = Path(module.__file__).resolve().parent / "paper"
SWEEP = """
title = "small"
requests = 12
[axes]
profile = ["h100-huginn-3.5b"]
workload = ["alpaca"]
exits = ["q=0.28", "full"]
policy = ["refill", "no-refill"]
w = [4]
k_share = [0.0, 1.0]
[[figures]]
file = "f.png"
x = "k_share"
y = "relative_to_cb"
lines = "policy"
panels = "exits"
bounds = ["s_e2e"]
"""


def test_sweep_writes_rows_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SWEEP)
    parser = OneLineParser()
    add_sweep_arguments(parser)
    assert run_sweep(parser.parse_args([str(path), "--output-dir", str(tmp_path)])) == 0
    rows = json.loads((tmp_path / "small.json").read_text())["rows"]
    assert len(rows) == 2 + 8  # cb once for each exits, and the product
    by = {(r["axis_exits"], r["axis_policy"], r["axis_k_share"]): r["tokens_per_s"] for r in rows}
    assert by["full", "cb", None] == by["q=0.28", "cb", None]  # cb does not depend on exits
    assert by["full", "no-refill", 0.0] == pytest.approx(by["full", "cb", None])
    assert by["q=0.28", "refill", 0.0] < by["q=0.28", "refill", 1.0]  # K = 1 is wrong for Huginn
    assert by["q=0.28", "no-refill", 0.0] == by["q=0.28", "no-refill", 1.0]  # K plays no part
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("\n") == 2 + len(rows)


def test_rows_are_simulated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cb is the same for all exits and no-refill for all K: 1 + 2 * (2 + 1) runs, not 12."""
    path = tmp_path / "s.toml"
    path.write_text(SWEEP)
    calls = []
    real = module.simulate
    monkeypatch.setattr(module, "simulate", lambda *args, **kw: calls.append(1) or real(*args, **kw))
    run_settings(read_sweep(path))
    assert len(calls) == 7


def test_higher_rate_waits_longer(tmp_path: Path) -> None:
    """Arrivals reach the simulation, and latency is measured from them."""
    path = tmp_path / "r.toml"
    axes = 'profile = ["h100-ouro-1.4b"]\nworkload = ["alpaca"]\npolicy = ["refill"]\nw = [4]\nrate = [0.2, 20.0]\n'
    path.write_text("requests = 30\n[axes]\n" + axes)
    slow, fast = (r for r in run_settings(read_sweep(path)) if r["axis_policy"] == "refill")
    assert fast["normalized_latency_s"] > 1.5 * slow["normalized_latency_s"]
    assert slow["idle_share"] > 0.3 > fast["idle_share"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes = 3", "no table"),
        ("[axes]\nw = [4]", "with a profile"),
        ("[axes]\nprofile = ['x']\nwidth = [4]", "unknown axis 'width'"),
        ("[axes]\nprofile = 'x'", "must be a list"),
        ("colour = 1\n[axes]\nprofile = ['x']", "unknown key 'colour'"),
        ("runner = 'walk'\n[axes]\nprofile = ['x']", "runner 'walk'"),
        ("not toml", "not TOML"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_sweep(path)


def test_exits_by_name() -> None:
    ouro, huginn = find_profile("h100-ouro-1.4b"), find_profile("h100-huginn-3.5b")
    assert exit_weights("q=0.2", ouro) == {2: 0.50, 3: 0.40, 4: 0.10}
    assert min(exit_weights("q=0.28", huginn) or {}) == 8
    assert exit_weights("full", ouro) == {} and exit_weights(None, ouro) is None
    assert exit_weights({"2": 1}, ouro) == {2: 1.0}
    with pytest.raises(ConfigError, match=r"q=0\.9"):
        exit_weights("q=0.9", ouro)


def test_layer_splits_scale_the_boundary() -> None:
    """Two layers a side is the profile itself; none leaves what embedding and head cost."""
    huginn = find_profile("h100-huginn-3.5b")
    same, none = with_boundary_layers(huginn, 2), with_boundary_layers(huginn, 0)
    assert same.coda.delta_ms == pytest.approx(huginn.coda.delta_ms)
    assert same.prelude.gamma_ms == pytest.approx(huginn.prelude.gamma_ms, rel=0.01)
    assert none.prelude.delta_ms == pytest.approx(0.0, abs=1e-9) and none.coda.delta_ms == pytest.approx(0.45)
    assert none.boundary_layers == 0


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.toml")), ids=lambda path: path.stem)
def test_paper_sweeps_are_sound(path: Path) -> None:
    """Every file names profiles, exits, policies and figure columns that exist; a typo would cost an hour's run."""
    sweep = read_sweep(path)
    for setting in module.settings(sweep):
        profile = find_profile(setting["profile"])
        exit_weights(setting["exits"], profile)
        module.PolicyChoice.parse(setting["policy"])
    for figure in sweep["figures"]:
        assert {figure["x"], figure["lines"], figure.get("panels", "w")} <= set(module.AXES)
    for claim in sweep.get("paper", []):
        assert claim["low"] <= claim["high"] and set(claim["where"]) <= set(module.AXES)


def test_claims_are_judged() -> None:
    rows = [{"axis_policy": "refill", "v": 1.4}, {"axis_policy": "refill", "v": 1.6}, {"axis_policy": "cb", "v": 9.0}]
    claim = {"claim": "c", "y": "v", "where": {"policy": "refill"}, "low": 1.32, "high": 1.53}
    assert claims_table(rows, [claim]).endswith("| c | 1.32 to 1.53 | 1.4 to 1.6 | reaches above |")
    assert claims_table(rows[:1], [claim]).endswith("| within |")


def test_random_profiles_are_seeded_and_span_the_range() -> None:
    assert random_profile(3) == random_profile(3) != random_profile(4)
    profiles = [random_profile(index) for index in range(40)]
    ratios = [(p.prelude.delta_ms + p.coda.delta_ms) / p.core.delta_ms for p in profiles]
    assert max(ratios) / min(ratios) > 10 and max(p.core.delta_ms for p in profiles) > 10 * min(
        p.core.delta_ms for p in profiles
    )
    assert {2 <= p.r_max <= 32 for p in profiles} == {True}
    for profile in (*profiles, *find_profiles(0).values()):
        for weights in exit_distributions(profile).values():
            assert min(weights) >= 1 and max(weights) <= profile.r_max and sum(weights.values()) > 0


def test_grid_resumes_and_summarises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long grid that was stopped goes on where it was: cells in the file are not run again."""
    monkeypatch.setattr("depthbatch.benchmarks.policy_grid.MIN_OUTPUT_TOKENS", 600)
    profiles = {"h100-ouro-1.4b": find_profile("h100-ouro-1.4b")}
    path = tmp_path / "grid.jsonl"
    run_grid(path, profiles, [2], ["alpaca"])
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and {json.loads(line)["w"] for line in lines} == {2}
    path.write_text("\n".join(lines[:3]) + "\n")
    run_grid(path, profiles, [2], ["alpaca"])
    assert (
        path.read_text().splitlines() == lines
        or json.loads(path.read_text().splitlines()[3])["auto"] == json.loads(lines[3])["auto"]
    )
    assert "| h100-ouro-1.4b | q=0.1 |" in summary(path)
