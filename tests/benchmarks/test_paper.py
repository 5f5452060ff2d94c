"""The report that holds ours against the paper: verdicts follow from results, and the committed page from committed results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from depthbatch.benchmarks import cpu_step, paper_cpu, paper_judges, paper_judges_rest, paper_report
from depthbatch.benchmarks.paper_claims import CLAIMS, claims_report
from depthbatch.benchmarks.paper_judges import AGREES, CONTRADICTS, NOT_HERE, Answer, Results, capacity, counted
from depthbatch.benchmarks.plain_loop import Shape
from depthbatch.common.errors import ConfigError
from depthbatch.deploy.cli.main import OneLineParser

ROOT = Path(paper_report.__file__).resolve().parent.parent
COMMITTED = ROOT / "benchmarks" / "results" / "paper"


def made_up(tmp_path: Path, **sweeps: list[dict[str, Any]]) -> Results:
    """Results of sweeps with these rows; axes that a row lacks are at their default."""
    for name, rows in sweeps.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"title": name, "rows": rows}))
    return Results(tmp_path, COMMITTED.parent)


def test_committed_page_says_what_committed_results_say() -> None:
    """No figure of the table is typed by hand: all of it comes out of the JSON beside it."""
    results = Results(COMMITTED, COMMITTED.parent)
    assert claims_report(results) in (COMMITTED / "README.md").read_text()
    for claim in CLAIMS:
        if not isinstance(claim.answer, Answer):
            assert claim.answer(results).verdict != NOT_HERE, claim


def test_tests_that_hold_claims_exist() -> None:
    """A row may point at a test in place of a figure; that test must be there."""
    pointed = [c.answer.ours for c in CLAIMS if isinstance(c.answer, Answer) and c.answer.verdict == AGREES]
    assert len(pointed) >= 4
    for text in pointed:
        path, _, name = text[text.index("(`") + 2 : text.index("`)")].partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), text


def test_every_judge_is_asked() -> None:
    """A judge that no claim asks would be dead, and one that is asked in two rows would count twice."""
    modules = (paper_judges, paper_judges_rest)
    judges = {
        name
        for module in modules
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and getattr(value, "__annotations__", {}).get("return") is Answer
        and not name.startswith("_")
    }
    asked = [getattr(c.answer, "func", c.answer).__name__ for c in CLAIMS if not isinstance(c.answer, Answer)]
    assert judges == set(asked)
    assert len({(claim.place, claim.claim) for claim in CLAIMS}) == len(CLAIMS)


def test_part_of_the_cases_is_said() -> None:
    assert counted([True, True]) == AGREES and counted([False]) == CONTRADICTS
    assert counted([True, False, True]) == "agrees in 2 of 3"


def test_missing_results_are_not_judged(tmp_path: Path) -> None:
    """A sweep that has not run agrees with nothing."""
    text = claims_report(made_up(tmp_path))
    assert "`fig07_k_huginn.json` is not there" in text and text.startswith(f"{len(CLAIMS)} rows: ")


@pytest.mark.parametrize(("best", "verdict"), [(0.25, AGREES), (0.75, CONTRADICTS)])
def test_quarter_of_w_is_judged_by_throughput(tmp_path: Path, best: float, verdict: str) -> None:
    """Where another K gives 2 % more, W/4 is not best, whatever the paper found."""
    rows = [
        {"axis_w": w, "axis_k_share": share, "tokens_per_s": 102.0 if share == best else 100.0}
        for w in (16, 64)
        for share in (0.0, 0.25, 0.75)
    ]
    answer = paper_judges_rest.quarter_of_w(made_up(tmp_path, fig07_k_huginn=rows))
    assert answer.verdict == verdict
    assert f"W = 16: best {best:g} W" in answer.ours


def test_capacity_is_where_latency_has_doubled(tmp_path: Path) -> None:
    """CB doubles its latency at 2 requests/s, refill at 4, no-refill at 3: half the gain."""

    def curve(policy: str, limit: float) -> list[dict[str, Any]]:
        return [
            {
                "axis_policy": policy,
                "axis_exits": "q=0.2",
                "axis_rate": rate,
                "normalized_latency_s": 0.01 if rate < limit else 0.02 if rate == limit else 9.0,
            }
            for rate in (1.0, 2.0, 3.0, 4.0, 5.0)
        ]

    rows = [
        row
        for policy, limit in (("cb", 2), ("refill", 4), ("no-refill", 3), ("auto", 4))
        for row in curve(policy, limit)
    ]
    assert capacity([row for row in rows if row["axis_policy"] == "refill"], 0.02) == pytest.approx(4.0)
    answer = paper_judges.half_the_gain(made_up(tmp_path, fig12_sharegpt_ouro=rows))
    assert answer == Answer("refill +100 %, no-refill +50 %: 0.50 of it", AGREES)


def test_full_depth_agrees_at_some_launch_cost_or_not_at_all(tmp_path: Path) -> None:
    """At 0 us CDB is CB, above the paper's range; the paper's shares are those of some launch cost, if of any."""

    def rows(*shares: float) -> list[dict[str, Any]]:
        return [
            {"axis_policy": "no-refill", "axis_launch_us": launch, "relative_to_cb": share}
            for launch, share in zip((0.0, 50.0), shares, strict=True)
        ]

    assert paper_judges.full_depth_by_launch(made_up(tmp_path, full_depth=rows(1.0, 0.97))).verdict == AGREES
    assert paper_judges.full_depth_by_launch(made_up(tmp_path, full_depth=rows(1.0, 0.80))).verdict == CONTRADICTS


def report(tmp_path: Path, *options: str) -> str:
    parser = OneLineParser()
    paper_report.add_paper_report_arguments(parser)
    assert paper_report.run_paper_report(parser.parse_args(["--output-dir", str(tmp_path), *options])) == 0
    return (tmp_path / "README.md").read_text()


def test_report_keeps_what_was_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: ``--only`` wrote a page of the sweeps asked for alone, over the page of all. A second run draws from the kept
    rows and simulates nothing, and axes at their default come back as they were."""
    sweeps = tmp_path / "sweeps"
    (sweeps / "paper").mkdir(parents=True)
    axes = 'profile = ["h100-ouro-1.4b"]\nworkload = ["alpaca"]\npolicy = ["refill"]\nw = [2]\n'
    for name in ("one", "two"):
        (sweeps / "paper" / f"{name}.toml").write_text(f'title = "{name}"\nrequests = 4\n[axes]\n{axes}')
    monkeypatch.setattr(paper_report, "HERE", sweeps)
    monkeypatch.setattr(paper_report, "measure_cpu", lambda: pytest.fail("of this machine nothing is asked"))
    first = report(tmp_path, "--only", "one", "--jobs", "1")
    assert "## one" in first and "## two" not in first
    both = report(tmp_path, "--only", "two", "--jobs", "1")
    assert "## one" in both and "## two" in both
    monkeypatch.setattr(paper_report, "run_settings", lambda *args, **kw: pytest.fail("nothing is left to run"))
    assert report(tmp_path, "--only", "two", "--jobs", "1") == both
    (row,) = Results(tmp_path, tmp_path).rows("one", policy="refill")
    assert row["axis_seed"] is None and row["axis_launch_us"] == 0.0 and "scheduler_us_per_stage" not in row
    with pytest.raises(ConfigError, match="--only three: in the name of no sweep; there are one, two, "):
        report(tmp_path, "--only", "three")


def test_core_steps_of_this_machine_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch at every context that memory is allowed for, and a fit of them; the number of threads stays."""
    tiny = Shape(layers=1, hidden=64, heads=2, intermediate=64, vocab=8, loops=2)
    monkeypatch.setattr(paper_cpu, "SHAPES", {"tiny": tiny})
    monkeypatch.setattr(cpu_step, "SHAPES", {"tiny": tiny})
    monkeypatch.setattr(paper_cpu, "MOST_KV_TOKENS", 2048)
    monkeypatch.setattr(paper_cpu, "_SECONDS", 0.0)
    threads = torch.get_num_threads()
    found = paper_cpu.measure_core_steps("tiny")
    assert torch.get_num_threads() == threads
    points = {(point["batch"], point["context"]) for point in found["points"]}
    assert points == {(b, 128) for b in (1, 2, 4, 8, 16)} | {(b, 512) for b in (1, 2, 4)} | {(1, 2048)}
    assert min(point["core_ms"] for point in found["points"]) > 0
    assert set(found["core"]) == {"delta_ms", "gamma_ms", "alpha_ms"} and found["r_squared"] <= 1.0


@pytest.mark.parametrize(
    ("batches", "ours"),
    [
        ((1, 2, 4, 8, 16, 32), "takes 1.11 to 1.2 times as long well below B*, 1.67 well above"),
        ((4, 8, 16, 32), "takes 1.67 times as long well above B*; none is well below"),
        ((1, 2, 4, 8), "no batch well above B*"),
    ],
)
def test_regimes_are_judged_on_either_side_of_saturation(batches: tuple[int, ...], ours: str, tmp_path: Path) -> None:
    """delta 8, gamma 1: B* is 8. From 1 to 4 rows a doubling is cheap, from 16 on it is dear; between the two it says
    nothing. Bug: where kernels are so fast that B* is below 4, nothing was judged at all."""
    step = {
        "model": "made up",
        "points": [{"batch": b, "context": 1, "core_ms": 8.0 + b} for b in batches],
        "core": {"delta_ms": 8.0, "gamma_ms": 1.0, "alpha_ms": 0.0},
        "r_squared": 1.0,
    }
    (tmp_path / "fig09_cpu.json").write_text(json.dumps({"steps": [step], "depths": []}))
    answer = paper_judges.two_regimes(made_up(tmp_path))
    assert answer.ours.endswith(ours)
    assert answer.verdict == ("agrees in 1 of 2" if 1 not in batches else AGREES if 32 in batches else NOT_HERE)
