"""HTTP over the whole engine with real weights: the same tokens and depths as the Python API gives."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from depthbatch import LLM, SamplingParams
from serving_fakes.process import ServeProcess

MODEL = Path(__file__).resolve().parents[1] / "data" / "fidelity" / "ouro-tiny"
OPTIONS = {"kv_blocks": 64, "max_num_seqs": 8, "device": "cpu", "threads": 1}
PROMPTS = [[5, 17, 3], [9, 8, 7, 6, 5, 4], [100, 2, 30, 4]]


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    options = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with ServeProcess(*options, model=str(MODEL)) as server:
        yield server


def test_http_equals_python(server: ServeProcess) -> None:
    """Greedy at two fixed depths, at the model's gate, and sampled with a seed: tokens and depths of every prompt, all
    of them in flight together."""
    cases = [
        {"temperature": 0.0, "num_loops": 2},
        {"temperature": 0.0, "num_loops": 4},
        {"temperature": 0.0, "gate": "own", "exit_threshold": 0.5},
        {"temperature": 0.8, "seed": 11, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {"5": 3.0}},
        {"temperature": 0.0, "logprobs": 3},
    ]
    body = {"prompt": PROMPTS, "max_tokens": 12, "ignore_eos": True, "return_exit_depths": True}
    answers = [httpx.post(server.url + "/v1/completions", json={**body, **case}, timeout=60) for case in cases]
    with LLM(str(MODEL), quiet=True, **OPTIONS) as llm:
        for case, answer in zip(cases, answers, strict=True):
            assert answer.status_code == 200, answer.text
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True, **case))
            choices = answer.json()["choices"]
            assert [choice["token_ids"] for choice in choices] == [output.token_ids for output in outputs]
            assert [choice["exit_depths"] for choice in choices] == [output.exit_depths for output in outputs]
            for choice, output in zip(choices, outputs, strict=True):
                scored = choice["logprobs"]["token_logprobs"] if "logprobs" in case else []
                assert scored == pytest.approx([entry.logprob for entry in output.logprobs], abs=1e-6)
    depths = {depth for choice in answers[2].json()["choices"] for depth in choice["exit_depths"][1:]}
    texts = [[choice["token_ids"] for choice in answer.json()["choices"]] for answer in answers]
    assert texts[0] != texts[1] and depths != {4} and texts[4] != texts[5]


def test_too_long_for_the_kv_memory_is_refused(server: ServeProcess) -> None:
    """Row "request needs more KV than exists and the queue deadlocks": refused at submit, with a 400."""
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": [1] * 8, "max_tokens": 100_000})
    assert answer.status_code == 400 and answer.json()["error"]["param"] in ("max_tokens", "prompt")
