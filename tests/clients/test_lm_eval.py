"""lm-eval's local-completions on task files of ours: generation, and loglikelihoods of choices (echo + logprobs).

It finds the server's own tokenizer endpoints by itself and sends token ids. What it logs for every sample is held to
what the server says when asked directly, so that a score that is merely plausible does not pass.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.serve_process import ServeProcess

ROOT = Path(__file__).resolve().parents[2]
LM_EVAL = ROOT / ".venv-clients" / "bin" / "lm_eval"
TASKS = "depthbatch_sums_generate,depthbatch_sums_choose"


@pytest.fixture(scope="module")
def samples(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """lm-eval's log of every sample, by task."""
    output = tmp_path_factory.mktemp("lm_eval")
    arguments = f"model=demo,base_url={server.url}/v1/completions,num_concurrent=4,max_retries=1,max_length=512"
    command = [str(LM_EVAL), "--model", "local-completions", "--model_args", arguments, "--tasks", TASKS]
    command += ["--include_path", "tests/clients/tasks", "--output_path", str(output), "--log_samples"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(output / "cache")}
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    logs: dict[str, list[Any]] = {}
    for path in output.rglob("samples_*.jsonl"):
        task = next(name for name in TASKS.split(",") if name in path.name)
        logs[task] = [json.loads(line) for line in path.read_text().splitlines()]
    assert {len(log) for log in logs.values()} == {8}
    return logs


def test_generations(server: ServeProcess, samples: dict[str, list[Any]]) -> None:
    """Each answer is the server's greedy text up to the stop string."""
    for sample in samples["depthbatch_sums_generate"]:
        body = {"prompt": sample["doc"]["question"], "max_tokens": 8, "temperature": 0, "stop": ["\n"]}
        text = httpx.post(server.url + "/v1/completions", json=body).json()["choices"][0]["text"]
        assert sample["resps"][0][0] == text


def test_loglikelihoods(server: ServeProcess, samples: dict[str, list[Any]]) -> None:
    """Each choice's score is the sum of its tokens' logprobs after the question."""
    seen = set()
    for sample in samples["depthbatch_sums_choose"]:
        question = sample["doc"]["question"]
        for choice, response in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            body = {"prompt": question + choice, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
            scored = httpx.post(server.url + "/v1/completions", json=body).json()["choices"][0]["logprobs"]
            count = len(httpx.post(server.url + "/tokenize", json={"prompt": question}).json()["tokens"])
            total = sum(scored["token_logprobs"][count:-1])
            assert float(response[0][0]) == pytest.approx(total, abs=2e-3)
            seen.add(round(total, 3))
    assert len(seen) > 12  # the scores tell choices apart


def test_bench_eval_asks_both_suites(server: ServeProcess, tmp_path: Path) -> None:
    """The real packages, at two depths: the demo adds right at four loops and not at one, and what reasoning-gym asks, which it
    was not trained for, is judged by reasoning-gym."""
    output = tmp_path / "eval.json"
    command = [str(LM_EVAL.with_name("python")), "-m", "depthbatch", "bench", "eval", server.url, "--size", "8"]
    command += ["--lm-eval", "depthbatch_sums_generate", "--include-path", "tests/clients/tasks"]
    command += ["--reasoning-gym", "chain_sum", "--max-tokens", "8", "--num-loops", "1", "--num-loops", "4"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run = subprocess.run(
        [*command, "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = {(row["task"], row["num_loops"]): row for row in json.loads(output.read_text())["rows"]}
    assert rows["depthbatch_sums_generate", 4]["score"] > 0.8 > rows["depthbatch_sums_generate", 1]["score"]
    assert 0 <= rows["chain_sum", 4]["score"] <= 1
    assert rows["depthbatch_sums_generate", 4]["mean_depth"] == 4
