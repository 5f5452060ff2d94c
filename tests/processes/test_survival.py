"""Real processes that hang, run out of memory or are killed by a request: what was running goes on with the same tokens.

On the simulated device, whose tokens are a function of (seed, position)."""

import logging
from pathlib import Path

import pytest

from depthbatch.common.errors import RequestKillsWorkerError
from depthbatch.frontend import health
from depthbatch.frontend.http.error_answers import as_api_error
from depthbatch.frontend.llm import LLM
from depthbatch.frontend.params import SamplingParams
from fakes.faults import Fault, install

OPTIONS = {"model": "demo", "device": "simulated:h100-ouro-1.4b", "max_num_seqs": 8, "min_free_slots": 1}
PROMPTS = [[5 + i, 6, 7] for i in range(4)]
PARAMS = [SamplingParams(max_tokens=40, seed=i, temperature=1.0, ignore_eos=True) for i in range(4)]


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    with LLM(quiet=True, **OPTIONS) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


def test_hangs_are_ended(
    undisturbed: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Row "the device hangs, its process lives: every request waits until somebody kills it by hand". A worker that waits
    for itself writes where it is into its log; one that is stopped cannot, which the frontend's log says; then a
    scheduler hangs. Each is killed and started again, and every stream goes on with the tokens that it would have had."""
    monkeypatch.setattr(health, "SILENCE_S", 2.0)
    faults = install(
        monkeypatch,
        tmp_path,
        Fault("worker.stage", "deadlock", after=20),
        Fault("worker.stage", "stop", after=20),
        Fault("scheduler.dispatch", "deadlock", after=90),
    )
    with caplog.at_level(logging.ERROR, "depthbatch"), LLM(quiet=True, hang_s=2.0, **OPTIONS) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == undisturbed
        assert faults.struck == 3 and llm.health().processes["scheduler"].restarts == 1
        logs = {name: (llm._client.run_dir / f"{name}.log").read_text() for name in ("worker", "scheduler")}
    said = caplog.text
    assert said.count("worker") >= 4 and "is stopped by a signal" in said and "hangs: nothing from it for 2 s" in said
    for log in logs.values():
        assert log.count("Current thread") == 1 and "in _strike" in log


def test_a_request_that_kills_the_worker_fails_alone(
    undisturbed: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the worker whenever a prefill holds token 99: that request gets an error that names it, and no client is
    asked to try again; the streams beside it lose nothing. Three deaths, after which the worker serves on."""
    faults = install(monkeypatch, tmp_path, Fault("worker.stage", "kill", token=99, times=100))
    with LLM(quiet=True, **OPTIONS) as llm:
        streams = [llm.stream([prompt], own) for prompt, own in zip(PROMPTS, PARAMS, strict=True)]
        tokens = [list(next(stream).delta.token_ids) for stream in streams]
        killer = llm.stream([[98, 99]], SamplingParams(max_tokens=4))
        with pytest.raises(
            RequestKillsWorkerError, match="the worker died 3 times while running this request"
        ) as caught:
            next(killer)
        for own, stream in zip(tokens, streams, strict=True):
            own += [token for _, delta in stream for token in delta.token_ids]
        assert tokens == undisturbed and faults.struck == llm.health().processes["worker"].restarts == 3
        assert llm.stats()["kv_cache_usage_perc"] == 0.0
    answer = as_api_error(caught.value)
    assert (answer.status, answer.code, answer.headers) == (500, "worker_died", {"x-should-retry": "false"})


def test_no_memory_in_a_step_and_deaths_in_prefill_lose_nothing(
    undisturbed: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row "out of memory in a step: every request is lost". The host's memory, then the device's, runs out in a decode
    step; a long prompt's worker, then its scheduler, is killed in the middle of its prefill: every request gets all of
    its tokens."""
    faults = install(
        monkeypatch,
        tmp_path,
        Fault("worker.stage", "MemoryError", after=20),
        Fault("worker.stage", "OutOfMemoryError", after=20),
        Fault("worker.stage", "kill", token=98),
        Fault("scheduler.dispatch", "kill", token=99),
    )
    long, own = [*range(11, 31), 97, 98, *range(31, 45), 99, 5], SamplingParams(max_tokens=9, seed=7, temperature=1.0)
    with LLM(quiet=True, max_num_batched_tokens=8, **OPTIONS) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == undisturbed
        assert faults.struck == 2 and "out of memory" in (llm._client.run_dir / "worker.log").read_text()
        [killed] = llm.generate([long], own)
        assert faults.struck == 4
        assert llm.generate([long], own)[0].token_ids == killed.token_ids
        restarts = {name: process.restarts for name, process in llm.health().processes.items()}
        assert restarts.pop("worker") in (3, 4)  # the scheduler may die before anybody has seen that the worker has
        assert restarts == {"frontend": 0, "scheduler": 1} and llm.stats()["kv_cache_usage_perc"] == 0.0
