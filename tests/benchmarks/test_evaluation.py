"""``bench eval``: settings reach every request, scores and depths come back, and what is missing is said by name.

The server and both suites are stand-ins here; tests/clients runs the real ones."""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from depthbatch.benchmarks.evaluation import add_eval_arguments, run_eval
from depthbatch.common.errors import ConfigError, DepthbatchError


class Stand:
    """A server that is right from two loops on, or at a threshold from 0.9 on."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.loops = 100.0  # of 50 tokens that others had asked for before
        self.tokens = 50.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "stand"}]})
        if request.url.path == "/metrics":
            name = "depthbatch:exit_depth"
            lines = [
                f'{name}_bucket{{le="1.0"}} 7',
                f'{name}_sum{{process="1"}} {self.loops}',
                f"{name}_count {self.tokens}",
            ]
            return httpx.Response(200, text="\n".join(lines) + "\n")
        body = json.loads(request.content)
        self.bodies.append(body)
        self.tokens += 10
        self.loops += 10 * body.get("num_loops", 3)
        right = body.get("num_loops", 0) >= 2 or body.get("exit_threshold", 0) >= 0.9
        if request.url.path == "/v1/chat/completions":
            text = str(int(body["messages"][0]["content"].split()[0]) + right)
            return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})
        return httpx.Response(200, json={"choices": [{"text": str(int(body["prompt"].split()[0]) + right)}]})


class Sums(list[dict[str, str]]):
    """Questions N, to be answered with N + 1."""

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        return float(answer == entry["answer"])


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand, client = Stand(), httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(transport=httpx.MockTransport(stand), **options))
    gym = ModuleType("reasoning_gym")

    def create_dataset(name: str, size: int, seed: int) -> Sums:
        if name != "sums":
            raise ValueError(f"Dataset {name!r} not registered")
        return Sums({"question": f"{seed + n} +", "answer": str(seed + n + 1)} for n in range(size))

    gym.create_dataset = create_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    return stand


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_eval_arguments(parser)
    return run_eval(parser.parse_args(["http://stand", *arguments]))


@pytest.mark.parametrize("chat", [True, False])
def test_every_task_is_asked_at_every_depth(
    stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str], chat: bool
) -> None:
    """Fields of the setting in every request, and no others; the mean depth is of this setting's tokens alone."""
    output, picture = tmp_path / "eval.json", tmp_path / "eval.png"
    depths = [
        "--num-loops",
        "1",
        "--num-loops",
        "4",
        "--exit-threshold",
        "0.5",
        "--exit-threshold",
        "0.95",
        "--gate",
        "own",
    ]
    files = ["--output", str(output), "--figure", str(picture)]
    assert run("--reasoning-gym", "sums", "--size", "5", *depths, *files, *(["--chat"] if chat else [])) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["num_loops"], row["exit_threshold"], row["score"]) for row in rows] == [
        (1, None, 0.0),
        (4, None, 1.0),
        (None, 0.5, 0.0),
        (None, 0.95, 1.0),
    ]
    assert [row["mean_depth"] for row in rows] == [1, 4, 3, 3]
    asked = {(b.get("num_loops"), b.get("exit_threshold"), b.get("gate")) for b in stand.bodies}
    assert asked == {(1, None, None), (4, None, None), (None, 0.5, "own"), (None, 0.95, "own")}
    assert all(body["temperature"] == 0 and body["max_tokens"] == 512 for body in stand.bodies)
    assert picture.stat().st_size > 1000
    assert "threshold 0.95" in capsys.readouterr().err


def test_lm_eval_gets_the_setting_and_gives_its_metrics(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        calls.append(options)
        kind = "generate_until" if options["tasks"] == ["mine"] else "multiple_choice"
        results = {"alias": "mine", "exact_match,none": 0.25, "exact_match_stderr,none": 0.1, "sample_len": 4}
        return {"configs": {"mine": {"output_type": kind}}, "results": {options["tasks"][0]: results}}

    suite, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    suite.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    tasks.TaskManager = lambda include_path: SimpleNamespace(all_tasks=["mine", "choice"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", suite)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    output = tmp_path / "eval.json"
    assert (
        run("--lm-eval", "mine", "--size", "4", "--num-loops", "2", "--num-fewshot", "3", "--output", str(output)) == 0
    )
    (row,) = json.loads(output.read_text())["rows"]
    assert (row["metric"], row["score"], row["mean_depth"]) == ("exact_match,none", 0.25, None)
    (call,) = calls
    assert (call["model"], call["gen_kwargs"]) == ("local-completions", {"num_loops": 2})
    assert (call["num_fewshot"], call["limit"]) == (3, 4)
    assert call["model_args"]["base_url"] == "http://stand/v1/completions"
    with pytest.raises(ConfigError, match="choice does not generate"):
        run("--lm-eval", "choice", "--num-loops", "2")
    with pytest.raises(ConfigError, match="no such task"):
        run("--lm-eval", "other")


def test_what_is_missing_is_said_by_name(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no task"):
        run()
    with pytest.raises(ConfigError, match="--reasoning-gym nosuch: Dataset"):
        run("--reasoning-gym", "nosuch")
    with pytest.raises(ConfigError, match="--gate needs"):
        run("--reasoning-gym", "sums", "--gate", "own")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"reasoning-gym is not installed .*depthbatch\[eval\]"):
        run("--reasoning-gym", "sums")
    monkeypatch.setattr(Stand, "__call__", lambda self, request: httpx.Response(503, text="loading"))
    with pytest.raises(DepthbatchError, match=r"/v1/models says 503: loading"):
        run("--reasoning-gym", "sums")
