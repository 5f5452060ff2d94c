"""Sweeps run the product they name, once each; their figures and claims follow from the rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from depthbatch.benchmarks import sweep as module
from depthbatch.benchmarks import sweep_runs, throughput
from depthbatch.benchmarks.made_up_profiles import profile_by_name, random_profile, relative_exits
from depthbatch.benchmarks.sweep import add_sweep_arguments, read_sweep, run_settings, run_sweep
from depthbatch.benchmarks.sweep_runs import Policy, exit_weights, steady_requests, window_of, with_boundary_layers
from depthbatch.benchmarks.tables import Cell, auto_ratios, auto_table, memory_table, slots_table
from depthbatch.benchmarks.workload import Window, Workload
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.deploy.cli.main import OneLineParser
from depthbatch.worker.device_profile import StageFlops
from depthbatch.worker.simulated import find_profile

BENCHMARKS = Path(module.__file__).resolve().parent
SWEEPS = sorted([*BENCHMARKS.glob("paper/*.toml"), *BENCHMARKS.glob("sweeps/*.toml")])
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
bounds = ["s_e2e", "s_dec"]
x_line = "saturation_batch"
[[figures]]
file = "g.png"
x = "k_share"
y = "mean_batch.core"
lines = "policy"
where = { exits = ["full"], policy = ["refill", "no-refill"] }
"""


FIGURE = "[axes]\nprofile = ['x']\n[[figures]]\n{}\ny = 's_dec'\nlines = '{}'\n"


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
    for name in ("f.png", "g.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("\n") == 2 + len(rows)


def test_rows_are_simulated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cb is the same for all exits and no-refill for all K: 1 + 2 * (2 + 1) runs, not 12."""
    path = tmp_path / "s.toml"
    path.write_text(SWEEP)
    calls = []
    real = sweep_runs.run_policy
    monkeypatch.setattr(sweep_runs, "run_policy", lambda *args, **kw: calls.append(1) or real(*args, **kw))
    run_settings(read_sweep(path))
    assert len(calls) == 7


def test_scarce_memory_is_a_share_of_the_need(tmp_path: Path) -> None:
    """Blocks for all that the setting uses preempt nothing; a quarter of them does. With ``off`` nothing is preempted, and
    with offload a victim's tokens are not computed again under one plane, where that costs most."""
    path = tmp_path / "scarce.toml"
    path.write_text(
        """requests = 40
summary = "memory"
[axes]
profile = ["h100-ouro-1.4b"]
exits = ["q=0.2"]
w = [16]
kv_layout = ["single"]
kv_capacity = [1.0, 0.25]
preemption = ["off", "recompute", "recompute:0.1", "offload"]
"""
    )
    rows = [row for row in run_settings(read_sweep(path)) if row["axis_policy"] != "cb"]
    by = {(row["axis_kv_capacity"], row["axis_preemption"]): row for row in rows}
    for name in ("off", "recompute", "offload"):
        assert by[1.0, name]["preemptions"] == by[0.25, "off"]["preemptions"] == 0
    scarce, copied, roomy = (by[0.25, name] for name in ("recompute", "offload", "recompute:0.1"))
    assert 4 * scarce["kv_blocks"] == pytest.approx(by[1.0, "recompute"]["kv_blocks"], abs=4)
    assert scarce["preemptions"] > roomy["preemptions"] and scarce["recomputed_tokens"] > 0 == scarce["moved_gib"]
    assert copied["moved_gib"] > 0 == copied["recomputed_tokens"]
    assert copied["tokens_per_s"] > scarce["tokens_per_s"] > by[0.25, "off"]["tokens_per_s"]
    assert 0 < copied["mean_next_token_s"] < scarce["mean_next_token_s"]
    text = memory_table(rows)
    assert text.count("\n") == 1 + 8 and "| single | 0.25 | recompute:0.1 |" in text


def test_slots_are_held_against_the_default() -> None:
    """S = 8 of W = 64 is 1.000; cb, which ran with each S, has no line."""
    rows = [
        {
            "axis_profile": "p",
            "axis_workload": "alpaca",
            "axis_policy": policy,
            "axis_w": 64,
            "axis_s": s,
            "tokens_per_s": 100.0 + s,
            "p99_itl_s": 0.01 * s,
        }
        for policy in ("cb", "refill")
        for s in (1, 8)
    ]
    assert slots_table(rows).endswith("|---|---|---|---|\n| p | alpaca | 0.935 (10 ms) | 1.000 (80 ms) |")


def test_blocks_can_be_counted(tmp_path: Path) -> None:
    """Of 64 sequences of arXiv 1,300 blocks hold about three; without preemption the others wait."""
    axes = 'profile = ["h100-ouro-1.4b"]\nworkload = ["arxiv"]\npolicy = ["refill"]\nkv_blocks = [1300]\n'
    (row,) = (
        r
        for r in rows_of(tmp_path, f'requests = 8\n[axes]\n{axes}preemption = ["off"]\n')
        if r["axis_policy"] == "refill"
    )
    assert 1 < row["mean_batch"]["core"] < 4 and row["preemptions"] == 0 and row["kv_blocks"] == 1300


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
        ("axes = 3", r"Expected `object`, got `int` - at `\$.axes`"),
        ("[axes]\nw = [4]", "no axis profile"),
        ("[axes]\nprofile = ['x']\nwidth = [4]", "unknown axis 'width'"),
        ("[axes]\nprofile = 'x'", "Expected `array`"),
        ("[axes]\nprofile = []", "length >= 1"),
        ("colour = 1\n[axes]\nprofile = ['x']", "unknown field `colour`"),
        ("runner = 'walk'\n[axes]\nprofile = ['x']", r"Invalid enum value 'walk' - at `\$.runner`"),
        ("summary = 'all'\n[axes]\nprofile = ['x']", r"Invalid enum value 'all' - at `\$.summary`"),
        ("requests = -3\n[axes]\nprofile = ['x']", r"`int` >= 1 - at `\$.requests`"),
        ("seed = -1\n[axes]\nprofile = ['x']", r"`int` >= 0 - at `\$.seed`"),
        ("[axes]\nprofile = [3]", "axis profile: Expected `str`, got `int`, 3"),
        ("[axes]\nprofile = ['x']\nw = [4, 0]", "axis w: Expected `int` >= 1, 0"),
        ("[axes]\nprofile = ['x']\nrate = [0]", "axis rate: Expected `float` > 0.0, 0"),
        ("[axes]\nprofile = ['x']\nitl_target_ms = [50]", "are given together"),
        ("[axes]\nprofile = ['x']\nswap_space = [4]", "need kv_capacity"),
        ("w_by_workload = {alpaca = 3}\n[axes]\nprofile = ['x']\nw = [4]", "one of them"),
        (FIGURE.format("file = 'f.png'", "w"), "missing required field `x`"),
        (FIGURE.format("file = 'f.png'\nx = 'w'", "width"), "figure f.png: width is no axis"),
        (FIGURE.format("file = 'f.foo'\nx = 'w'", "w"), "ends with .pdf, .png, .svg"),
        (FIGURE.format("file = 'no/f.png'\nx = 'w'", "w"), "is not the name of a file"),
        (FIGURE.format("file = 'f.png'\nx = 'w'\ncolour = 'red'", "w"), "unknown field `colour`"),
        ("not toml", "not TOML"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    """Bugs: numbers, figures and axes of other types were found out in the middle of a run, by a traceback."""
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_sweep(path)
    assert "bad.toml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("kv_capacity = [0.5]\npreemption = ['recompute:x']", "preemption 'recompute:x': 'x' is not a number"),
        ("kv_capacity = [0.5]\npreemption = ['recompute:2']", "kv_headroom must be between 0.0 and 0.9, not 2.0"),
        ("kv_capacity = [0.5]\npreemption = ['walk']", "preemption must be one of off, recompute, offload, not 'walk'"),
        ("speculation = ['2:x']", "speculation '2:x' is not N:D"),
        ("speculation = ['2:0']", "draft_depth must be at least 1, not 0"),
        ("policy = ['refill', 'fast']", "policy 'fast' is not one of"),
        ("exits = ['q=7']", "exits 'q=7' is not"),
        ("draft_acceptance = [{1 = 0.9, 2 = 0.1}]", "do not fall with depth"),
        ("kv_layout = ['flat']", "kv_layout must be one of"),
    ],
)
def test_no_setting_is_run_before_all_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axes: str, message: str
) -> None:
    """Bugs: a headroom or draft depth that was no number ended in a traceback, and a bad policy hours after the start."""
    path = tmp_path / "bad.toml"
    path.write_text(f"requests = 4\n[axes]\nprofile = ['h100-ouro-1.4b']\n{axes}\n")
    monkeypatch.setattr(sweep_runs, "run_policy", None)  # nothing may get as far
    with pytest.raises(ConfigError, match=message):
        run_settings(read_sweep(path))


def test_acceptance_reaches_the_processes(tmp_path: Path) -> None:
    """Bug: under runner "throughput" the axis was ignored, and the device took its own default."""
    path = tmp_path / "t.toml"
    axes = 'profile = ["h100-ouro-1.4b"]\nworkload = ["alpaca"]\nw = [4]\nspeculation = ["2:1"]\n'
    start = f'runner = "throughput"\nrequests = 4\n[axes]\n{axes}'
    path.write_text(start + "draft_acceptance = [0.0, 1.0]\n")
    rows = run_settings(read_sweep(path))
    assert {row["axis_draft_acceptance"]: row["acceptance"] for row in rows} == {None: None, 0.0: 0.0, 1.0: 1.0}
    path.write_text(start + "draft_acceptance = [{1 = 0.5}]\n")
    with pytest.raises(ConfigError, match="draft_acceptance by depth needs runner 'simulate'"):
        run_settings(read_sweep(path))


def test_processes_are_measured_in_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: runner "throughput" knew no window, and figure 3 was that of ends of runs."""
    given: list[tuple[int, Window | None]] = []

    def measure(config: EngineConfig, workload: Workload, flops: StageFlops, window: Window | None) -> Any:
        given.append((len(workload.requests), window))
        raise ConfigError("enough")

    monkeypatch.setattr(throughput, "measure", measure)
    path = tmp_path / "t.toml"
    axes = '[axes]\nprofile = ["h100-ouro-1.4b"]\nworkload = ["alpaca"]\nw = [32]\n'
    for requests in ('"short window"', '"window"', "7"):
        path.write_text(f'runner = "throughput"\nrequests = {requests}\n{axes}')
        with pytest.raises(ConfigError, match="enough"):
            run_settings(read_sweep(path))
    short, long, plain = given
    assert short[1] == (32 * 60, 2 * 32 * 60) and short[0] > (1 + 2 + 2) * 32
    assert long[1] == (2 * 32 * 60, 4 * 32 * 60) and long[0] > short[0]
    assert plain == (7, None)


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


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_shipped_sweeps_are_sound(path: Path) -> None:
    """Every file names profiles, exits, policies and figure columns that exist; a typo would cost an hour's run."""
    sweep = read_sweep(path)
    for setting in module.settings(sweep):
        profile = profile_by_name(setting["profile"])
        exit_weights(setting["exits"], profile)
        Policy.parse(setting["policy"], setting["w"])
    for figure in sweep.get("figures", []):
        assert {figure["lines"], figure.get("panels", "w")} <= set(module.AXES)


def test_figures_of_shipped_sweeps_name_columns_that_exist(tmp_path: Path) -> None:
    """Of axes or of rows with targets; drawn from one small row each."""
    axes = 'profile = ["h100-ouro-1.4b"]\nrate = [2]\nw = [4]\nttft_target_ms = [500]\nitl_target_ms = [50]\nkv_capacity = [1.0]\n'
    (tmp_path / "one.toml").write_text(f'requests = 4\n[axes]\nworkload = ["alpaca"]\n{axes}')
    row = run_settings(read_sweep(tmp_path / "one.toml"))[-1]
    figures = [figure for path in SWEEPS for figure in read_sweep(path).get("figures", [])]
    assert len(figures) > 15
    for figure in figures:
        assert {figure["y"].partition(".")[0], *figure.get("bounds", ()), figure.get("x_line", "w")} <= set(row)
        assert f"axis_{figure['x']}" in row or figure["x"] in row


def test_random_profiles_are_seeded_and_span_the_range() -> None:
    assert random_profile(3) == random_profile(3) != random_profile(4)
    profiles = [random_profile(index) for index in range(40)]
    ratios = [(p.prelude.delta_ms + p.coda.delta_ms) / p.core.delta_ms for p in profiles]
    assert max(ratios) / min(ratios) > 10 and max(p.core.delta_ms for p in profiles) > 10 * min(
        p.core.delta_ms for p in profiles
    )
    assert {2 <= p.r_max <= 32 for p in profiles} == {True}
    for profile in profiles:
        assert profile_by_name(profile.name) == profile
        for name, weights in relative_exits(profile.r_max).items():
            assert min(weights) >= 1 and max(weights) <= profile.r_max and sum(weights.values()) > 0
            assert exit_weights(name, profile) == weights
    with pytest.raises(ConfigError, match="early, middle, wide, two peaks"):
        exit_weights("q=0.2", profiles[0])


def test_policies_of_a_sweep_file() -> None:
    """K as a share of W must be the K of that W, and an objective must not be lost on the way to the engine."""
    assert [Policy.parse("refill:3W/4", w).k for w in (8, 64, 1)] == [6, 48, 1]
    assert Policy.parse("refill:W/4", 8) == ("refill", 2, "throughput") and Policy.parse("refill:5", 8).k == 5
    assert Policy.parse("auto:goodput", 8) == ("auto", None, "goodput")
    for bad in ("auto:speed", "refill:W/0", "no-refill:W/2", "fast"):
        with pytest.raises(ConfigError, match="policy"):
            Policy.parse(bad, 8)


def test_steady_runs_are_long_enough_at_every_width() -> None:
    """The counts that the recorded grid was run with, but for one width of Alpaca, which then took more."""
    lines = (BENCHMARKS / "results" / "policy_grid.jsonl").read_text().splitlines()
    counts = {(row["workload"], row["w"]): row["requests"] for row in map(json.loads, lines)}
    assert len(counts) == 18
    assert {cell for cell, count in counts.items() if steady_requests(*cell) != count} == {("alpaca", 16)}
    with pytest.raises(ConfigError, match="steady"):
        steady_requests("mine.json", 8)


def test_targets_reach_the_objective_and_no_other_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fixed policy is judged by the targets, but the engine refuses them without an objective."""
    path = tmp_path / "t.toml"
    axes = 'profile = ["h100-ouro-1.4b"]\nworkload = ["alpaca"]\npolicy = ["refill", "auto:latency"]\nw = [4]\nrate = [4]\n'
    path.write_text("requests = 20\n[axes]\n" + axes + "ttft_target_ms = [1e9]\nitl_target_ms = [1, 1e9]\n")
    seen: list[dict[str, Any]] = []
    real = sweep_runs.run_policy
    monkeypatch.setattr(sweep_runs, "run_policy", lambda *args, **kw: seen.append(kw) or real(*args, **kw))
    rows = [row for row in run_settings(read_sweep(path)) if row["axis_policy"] != "cb"]
    assert [kw.get("itl_target_ms") for kw in seen if kw["objective"] == "latency"] == [1, 1e9]
    assert {kw.get("itl_target_ms") for kw in seen if kw["objective"] != "latency"} == {None}
    by = {(row["axis_policy"], row["axis_itl_target_ms"]): row for row in rows}
    assert by["refill", 1]["goodput_tokens_per_s"] < 0.1 * by["refill", 1e9]["goodput_tokens_per_s"]
    assert by["refill", 1e9]["good_requests"] == 1.0
    assert by["refill", 1e9]["goodput_tokens_per_s"] == pytest.approx(by["refill", 1e9]["tokens_per_s"])
    assert by["refill", 1]["p50_itl_ms"] <= by["refill", 1]["p99_itl_ms"] <= by["refill", 1]["p99.9_itl_ms"]


GRID = """
requests = 12
summary = "auto"
[axes]
profile = ["h100-ouro-1.4b"]
exits = ["q=0.1", "q=0.2"]
workload = ["alpaca"]
w = [4]
policy = ["refill:1", "refill:W/4", "refill:W/2", "no-refill", "auto"]
"""


def test_grid_resumes_and_summarises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long grid that was stopped goes on where it was: rows in the file are not run again, but for a policy that is to
    be run anew."""
    path, rows_file = tmp_path / "grid.toml", tmp_path / "grid.jsonl"
    path.write_text(GRID)
    calls: list[str] = []
    real = sweep_runs.run_policy
    monkeypatch.setattr(sweep_runs, "run_policy", lambda *args, **kw: calls.append(kw["policy"]) or real(*args, **kw))
    parser = OneLineParser()
    add_sweep_arguments(parser)

    def run(*options: str) -> list[str]:
        calls.clear()
        assert run_sweep(parser.parse_args([str(path), "--output-dir", str(tmp_path), "--resume", *options])) == 0
        return calls

    assert len(run()) == 11  # cb once, five policies for two exits
    lines = rows_file.read_text().splitlines()
    summary = capsys.readouterr().out
    assert len(lines) == 12 and "| h100-ouro-1.4b | q=0.1 | " in summary and summary.startswith("2 cells")
    rows_file.write_text("\n".join(lines[:-1]) + "\n")
    assert run() == ["cb", "auto"]
    assert capsys.readouterr().out == summary
    assert run("--again", "auto") == ["cb", "auto", "auto"]
    assert capsys.readouterr().out == summary
    assert run() == []
    rows = json.loads((tmp_path / "grid.json").read_text())["rows"]
    speed = {r["axis_policy"]: r["tokens_per_s"] for r in rows if r["axis_exits"] == "q=0.1"}
    ratios = auto_ratios(rows)[Cell("h100-ouro-1.4b", "q=0.1", "alpaca", 4)]
    assert ratios.best == speed["auto"] / max(v for name, v in speed.items() if name not in ("auto", "cb"))
    assert ratios.plain == speed["auto"] / max(speed["no-refill"], speed["refill:W/4"])
    assert f"{ratios.best:.3f} ({ratios.plain:.3f})" in auto_table(rows)
    with pytest.raises(ConfigError, match="--again needs --resume"):
        run_sweep(parser.parse_args([str(path), "--output-dir", str(tmp_path), "--again", "auto"]))


def rows_of(tmp_path: Path, text: str, jobs: int = 1) -> list[dict[str, Any]]:
    """A sweep file's rows."""
    path = tmp_path / "one.toml"
    path.write_text(text)
    return run_settings(read_sweep(path), jobs=jobs)


WINDOWED = """
requests = "window"
[axes]
profile = ["h100-ouro-1.4b"]
workload = ["alpaca"]
exits = ["q=0.2", "full"]
policy = ["refill"]
w = [4, 32]
seed = [0, 1]
"""


def test_window_leaves_out_how_a_run_starts_and_ends(tmp_path: Path) -> None:
    """Bug: throughput at W = 64 was that of runs whose mean core batch was 17 to 40 rows, since as many as ran at once were
    all that there were. Within a window cb and K = 1 keep nine tenths of W busy; the rest waits for S."""
    rows = rows_of(tmp_path, WINDOWED)
    assert len(rows) == 2 * 2 * (2 + 2)  # cb once a label of exits
    for row in rows:
        assert 0.9 * row["axis_w"] < row["mean_batch"]["core"] <= row["axis_w"], row
    count, window = window_of("alpaca", 32)
    assert window == (2 * 32 * 60, 4 * 32 * 60) and count > (window.skip + window.tokens) / 60 + 64
    by = {(r["axis_policy"], r["axis_exits"], r["axis_w"], r["axis_seed"]): r for r in rows}
    assert by["refill", "full", 32, 0]["mean_depth"] == 4.0  # first tokens, which come of prefill, are left out
    assert by["refill", "q=0.2", 32, 0]["mean_depth"] == pytest.approx(2.6, abs=0.05)
    assert by["cb", "full", 32, 0]["tokens_per_s"] != by["cb", "full", 32, 1]["tokens_per_s"]


def test_side_by_side_gives_the_same_rows(tmp_path: Path) -> None:
    """Rows, their order, and the baseline that each is held against do not depend on how many processes simulate."""

    def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key != "scheduler_us_per_stage"} for row in rows]

    assert timeless(rows_of(tmp_path, WINDOWED)) == timeless(rows_of(tmp_path, WINDOWED, jobs=2))


def test_arrivals_within_seconds(tmp_path: Path) -> None:
    """Bug: a rate was held for as long as a number of requests took, so runs at a high rate ended before they could
    saturate. Of ``seconds`` every rate gets as many, by workload."""
    axes = 'profile = ["h100-ouro-1.4b"]\nworkload = ["alpaca", "arxiv"]\npolicy = ["refill"]\nrate = [2, 8]\nw = [8]\n'
    rows = rows_of(tmp_path, f"[seconds]\nalpaca = 20\narxiv = 2\n[axes]\n{axes}")
    got = {(r["axis_workload"], r["axis_rate"]): r["requests_finished"] for r in rows if r["axis_policy"] == "refill"}
    for (workload, rate), count in got.items():
        mean = rate * {"alpaca": 20, "arxiv": 2}[workload]
        assert abs(count - mean) <= 4 * mean**0.5 + 1, (workload, rate, count)
    for text, message in (("seconds = 5", "needs the axis rate"), ('requests = "window"', "has no rate")):
        rate = "rate = [1]\n" if "rate" in message and "no" in message else ""
        with pytest.raises(ConfigError, match=message):
            rows_of(tmp_path, f'{text}\n[axes]\nprofile = ["h100-ouro-1.4b"]\n{rate}')


def test_launches_are_paid_by_stage_but_by_token_step_under_cb(tmp_path: Path) -> None:
    """The paper's CB is one captured graph a token step; CDB launches prelude, every loop and coda. At full depth, where
    both run the same stages, the difference is r_max + 1 launches a token step, and nothing where launches are free."""
    axes = 'profile = ["h100-ouro-1.4b"]\nworkload = ["alpaca"]\nexits = ["full"]\npolicy = ["no-refill"]\nw = [8]\n'
    rows = rows_of(tmp_path, f"requests = 40\n[axes]\n{axes}launch_us = [0.0, 100.0]\n")
    cb, staged = ({r["axis_launch_us"]: r for r in rows if r["axis_policy"] == name} for name in ("cb", "no-refill"))
    steps = cb[0.0]["stage_steps"]
    assert staged[0.0]["duration_s"] == pytest.approx(cb[0.0]["duration_s"])
    graphs = steps["prefill"] + steps["prelude"]
    assert cb[100.0]["duration_s"] - cb[0.0]["duration_s"] == pytest.approx(1e-4 * graphs)
    assert staged[100.0]["duration_s"] - staged[0.0]["duration_s"] == pytest.approx(1e-4 * sum(steps.values()))
    assert staged[100.0]["relative_to_cb"] < 1.0 and staged[100.0]["idle_share"] > 0.0
