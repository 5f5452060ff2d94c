"""The GPU check without a GPU: every section on tiny models, over the accelerator that is the host.

What a lent machine has little time for must not fail on a typing mistake: all lines but those that ask CUDA run here.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from depthbatch.benchmarks.gpu import check as gpu_check
from depthbatch.benchmarks.gpu import ranks as gpu_ranks
from depthbatch.benchmarks.gpu import sections as gpu_sections
from depthbatch.benchmarks.gpu import speculation as gpu_speculation
from depthbatch.benchmarks.gpu.check import Report, Section, check
from depthbatch.benchmarks.gpu.sections import Setup
from depthbatch.benchmarks.gpu.shapes import power_of_two_sizes
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.runner.stage_input import bucket_sizes

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(True, tmp_path, ROOT / "tests" / "data" / "fidelity")


@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_steps(setup: Setup, model: str) -> None:
    """Every measured time is there and positive, at every batch that fits."""
    results = dict(gpu_sections.steps(setup, model))
    core = results[f"{model}.core_step"]
    assert {"B1.L32", "B8.L32"} < set(core) and all(core[key]["ratio"] > 0 for key in core if key.startswith("B"))
    buckets = results[f"{model}.buckets"]
    # A dry run has the CPU's sizes, which are every size; a GPU's are among them.
    assert buckets["steps_of_8"]["mean_ms"] > 0 and {"1", "2", "4", "8", "12"} <= set(buckets["ms"])
    assert results[f"{model}.launch"]["gap_us"] > 0
    assert results[f"{model}.prefill"]["40"]["pieces_ms"] > 0
    assert results[f"{model}.capture"]["pieces"] > 2


def test_fidelity_is_exact_and_can_fail(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison passes on the same processor, and raises when one answer differs."""
    results = dict(gpu_sections.fidelity(setup))
    assert len(results) == 4 and all(r["same"] == r["tokens"] > 50 for r in results.values())
    honest = gpu_sections._answers

    def wrong(built: object, config: object) -> object:
        answers = honest(built, config)  # type: ignore[arg-type]
        if config.async_scheduling == "lookahead":  # type: ignore[attr-defined]
            answers[2].tokens[1] += 1
        return answers

    monkeypatch.setattr(gpu_sections, "_answers", wrong)
    with pytest.raises(AssertionError, match="not the CPU's answers"):
        gpu_sections._compare(setup, "ouro-tiny", "float32", "sdpa")


@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_speculation(setup: Setup, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact, with drafts of both kinds; a speed at each number of streams that fits, and the warmer the draws the more
    drafts are right. The comparison can fail."""
    results = dict(gpu_speculation.speculation(setup, model))
    exact = results[f"{model}.speculation.exact"]
    assert exact["tokens"] > 50 and exact["right"] > 3 and exact["wrong"] > 3
    for streams in (1, 4):
        speed = results[f"{model}.speculation.speed.{streams}"]
        assert all(entry["speedup"] > 0 for entry in speed.values())
        assert speed["0"]["accepted"] < speed["16"]["accepted"]
    honest = gpu_speculation.serve

    def wrong(scheduler: Scheduler, *args: Any) -> Any:
        answers = honest(scheduler, *args)
        answers[2].tokens[1] += scheduler.config.draft_lanes > 0
        return answers

    monkeypatch.setattr(gpu_speculation, "serve", wrong)
    with pytest.raises(AssertionError, match="not the answers without drafts"):
        gpu_speculation.exactness(setup, gpu_speculation.FIDELITY[model])


def test_engines(setup: Setup) -> None:
    """The first two engines through real processes: replayed depths arrive, idle share and the ratio to cb are told."""
    engines = gpu_sections.engines(setup, "ouro")
    (first, cb), (second, refill) = next(engines), next(engines)
    assert (first, second) == ("ouro.engine.cb", "ouro.engine.refill")
    assert cb["mean_depth"] == 4.0 and 2.0 <= refill["mean_depth"] < 4.0
    assert refill["relative_to_cb"] > 0 and 0 <= refill["idle_share"] <= 1


def test_ranks(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo: two ranks give the tokens of one while both are killed in turn; the comparison can fail; a sum has its
    time. Bug: it had it once a process, since the group stayed."""
    monkeypatch.setattr(gpu_ranks, "OUTPUTS", 6)
    monkeypatch.setattr(gpu_ranks, "MODELS", {"demo": {0: 1, 12: 0}})
    results = gpu_ranks.ranks(setup)
    name, exact = next(results)
    assert name == "ranks.exact.demo" and exact["restarts"] == 2 and exact["tokens"] == 8 * gpu_ranks.OUTPUTS
    assert len(exact["depths"]) > 1
    for _ in range(2):
        times = gpu_ranks.all_reduce_times(2, 64, "float32", (1, 8))
        assert all(took.least_us > 0 and took.replayed_us is None for took in times.values())
    monkeypatch.setattr(gpu_ranks, "LLM", MagicMock())
    different = iter([([[5, 6]], [[1, 2]]), ([[5, 7]], [[1, 2]])])
    monkeypatch.setattr(gpu_ranks, "answers", lambda *arguments: next(different))
    with pytest.raises(AssertionError, match="not the answers of one rank"):
        gpu_ranks.exactness(setup, "demo", {})


def test_one_gpu_is_too_few_for_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The section says so and is skipped, which is no failure."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    into = tmp_path / "out.jsonl"
    assert gpu_check.run_section("ranks", False, tmp_path, into) == 0
    told = json.loads(into.read_text())
    assert told == {"name": "ranks", "status": "skipped", "values": {"reason": "1 GPU can be seen, 2 ranks need 2"}}


def test_a_section_that_fails_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through real child processes: a section that raises, one that there is no time for, and the results before and
    after them, all in the JSON; the whole is called failed."""
    report = Report(tmp_path / "out.json", True)
    check(Section("environment", 60), report, 60, tmp_path, True)
    check(Section("nonsense.steps", 60), report, 60, tmp_path, True)
    check(Section("ouro.steps", 60), report, 5, tmp_path, True)
    check(Section("tests.cpu-side", 60), report, 60, tmp_path, True)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results["environment"]["status"] == "ok" and results["bandwidth"]["copy_bytes_per_s"] > 0
    assert results["nonsense.steps"]["status"] == "failed" and "KeyError" in results["nonsense.steps"]["error"]
    assert results["ouro.steps"]["status"] == "skipped" and results["tests.cpu-side"]["status"] == "skipped"
    assert report.failed


def test_the_script(tmp_path: Path) -> None:
    """benchmarks/gpu_check.sh from another directory, without an installed package: GPU tests are skipped by reason."""
    command = ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), "--dry-run-cpu", "--only", "tests.gpu"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OUTPUT": str(tmp_path / "out.json")}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    tail = json.loads((tmp_path / "out.json").read_text())["results"]["tests.gpu"]["tail"]
    assert "no CUDA device is available" in tail and " passed" not in tail


def test_budget_is_under_eight_minutes() -> None:
    """All sections at their limits may exceed it; what is left is skipped, so the whole keeps to the budget."""
    assert gpu_check.BUDGET_S < 8 * 60
    assert all(section.limit_s <= 150 for section in gpu_check.SECTIONS)


def test_powers_of_two_are_among_the_steps() -> None:
    """Both sets are compared from one capture."""
    for rows in (1, 3, 12, 64, 200, 256):
        powers = power_of_two_sizes(rows)
        assert powers[-1] == rows and set(powers) <= set(bucket_sizes(rows))
        assert list(powers) == sorted(set(powers))
