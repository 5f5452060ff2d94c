"""The real processes end to end: published tokens through three processes, recorded depths, aborts, kill -9."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import EngineDeadError, RequestError
from depthbatch.common.transport import endpoint
from depthbatch.frontend import engine_client
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.client import Client
from depthbatch.frontend.llm import LLM
from depthbatch.frontend.params import RequestDefaults, SamplingParams
from depthbatch.frontend.zmq_api import ZmqApi
from fakes.lockstep import LockstepEngine

OURO = Path(__file__).parent.parent / "data" / "fidelity" / "ouro-tiny"
OPTIONS = {"model": str(OURO), "max_num_seqs": 8, "min_free_slots": 1, "kv_blocks": 64, "threads": 1, "device": "cpu"}
VALUES = np.load(OURO / "expected.npz")
PROMPTS = [VALUES[f"prompt_{i}"].tolist() for i in range(4)]
FULL_DEPTH = [VALUES[f"greedy_full_depth_{i}"].tolist() for i in range(4)]
GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(quiet=True, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def lockstep() -> LockstepEngine:
    return LockstepEngine(EngineConfig.from_values(OPTIONS))


def test_published_tokens(llm: LLM) -> None:
    """Greedy tokens at full depth equal the reference implementation's, four prompts in one batch."""
    outputs = llm.generate(PROMPTS, SamplingParams(gate="none", **GREEDY))
    assert [output.token_ids for output in outputs] == FULL_DEPTH
    assert all(output.exit_depths == [4] * 24 for output in outputs)
    assert llm.tokenizer is None and outputs[0].text == ""


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(exit_depths=[2, 4, 1, 3, 3, 1, 2, 4, 4, 1], **GREEDY),
        SamplingParams(num_loops=2, **GREEDY),
        SamplingParams(gate="own", exit_threshold=0.5, **GREEDY),
        SamplingParams(gate="delayed", exit_threshold=0.3, min_loops=2, max_loops=3, **GREEDY),
        SamplingParams(max_tokens=24, temperature=1.3, top_k=40, top_p=0.95, min_p=0.001, seed=11, ignore_eos=True),
        SamplingParams(presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.1, **GREEDY),
        SamplingParams(allowed_token_ids=[7, 11, 13], logit_bias={11: 1.0}, **GREEDY),
        SamplingParams(logit_bias={7: 3.0}, min_tokens=5, stop_token_ids=[7], **GREEDY),
    ],
    ids=["replay", "fixed", "own", "delayed", "sampled", "penalties", "allowed", "held-off"],
)
def test_equals_lockstep(llm: LLM, lockstep: LockstepEngine, params: SamplingParams) -> None:
    """The same scheduler and runner without sockets: what processes add must change no token and no depth. Parameters
    go the whole way, so one that got lost on it would show as the default's tokens."""
    defaults = RequestDefaults(llm.info, seed=0)
    resolved = [(prompt, defaults.resolve(params, len(prompt), 0)) for prompt in PROMPTS]
    answers = lockstep.run(resolved)
    outputs = llm.generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == [answer.tokens for answer in answers]
    assert [output.exit_depths for output in outputs] == [answer.depths for answer in answers]
    assert [output.token_ids for output in outputs] != FULL_DEPTH


def test_replayed_depths_come_back(llm: LLM) -> None:
    """The first token is prefill's, at full depth; missing entries mean full depth."""
    depths = [2, 3, 1, 4, 2]
    [output] = llm.generate([PROMPTS[0]], SamplingParams(exit_depths=depths, **GREEDY))
    assert output.exit_depths == [4, *depths, *[4] * 18]


def test_end_of_sequence_and_limits(llm: LLM) -> None:
    """A stop token in the middle ends the request there; kv and length limits are refused with the numbers."""
    stop = FULL_DEPTH[1][5]
    count = FULL_DEPTH[1].index(stop) + 1
    [output] = llm.generate(
        [PROMPTS[1]], SamplingParams(gate="none", max_tokens=24, temperature=0.0, stop_token_ids=[stop])
    )
    assert output.token_ids == FULL_DEPTH[1][:count]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert llm.info.max_model_len == 64 * 16
    with pytest.raises(RequestError, match="max_model_len 1024"):
        llm.generate([[1] * 1000], SamplingParams(max_tokens=25))
    with pytest.raises(RequestError, match="300 is not a token id"):
        llm.generate([[300]])


def wait_until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + 20
    while (stats := llm.stats())["num_requests_running"] or stats["num_requests_waiting"]:
        assert time.monotonic() < deadline, "a request still runs"
        time.sleep(0.02)
    assert stats["kv_cache_usage_perc"] == 0.0


def test_more_requests_than_slots_and_blocks(llm: LLM) -> None:
    """60 requests for 8 slots and 64 blocks: all answered, each as if it were alone, and every block is free again."""
    [alone] = llm.generate([PROMPTS[2]], SamplingParams(gate="none", **GREEDY))
    outputs = llm.generate([PROMPTS[i % 4] for i in range(60)], SamplingParams(gate="none", **GREEDY))
    assert [output.token_ids for output in outputs] == [FULL_DEPTH[i % 4] for i in range(60)]
    assert outputs[2].token_ids == alone.token_ids
    wait_until_idle(llm)


def test_abort_mid_stream_frees_slot_and_blocks(llm: LLM) -> None:
    aborted = llm.stats()['request_success_total{finished_reason="abort"}']
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True))
    for _ in range(9):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_until_idle(llm)
    assert llm.stats()['request_success_total{finished_reason="abort"}'] == aborted + 4


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
def test_kill_9_changes_nothing(llm: LLM, victim: str) -> None:
    """At full depth the rebuilt sequence is the undisturbed one, token for token: none lost, none twice, same sampling
    draws. The sampled request would differ from its first run if draws depended on anything but seed and position."""
    sampled = SamplingParams(
        gate="none", max_tokens=200, temperature=1.0, seed=3, ignore_eos=True, logprobs=1, prompt_logprobs=0,
        repetition_penalty=1.2, presence_penalty=0.5,
    )  # fmt: skip
    greedy = SamplingParams(gate="none", **GREEDY)
    [undisturbed] = llm.generate([PROMPTS[0]], sampled)
    logprobs, prompt_logprobs = list[float](), list[float]()
    restarts = llm.health().processes[victim].restarts
    got: list[list[int]] = [[] for _ in range(5)]
    for count, (index, delta) in enumerate(llm.stream([*PROMPTS, PROMPTS[0]], [*[greedy] * 4, sampled])):
        got[index] += delta.token_ids
        logprobs += [entry.logprob for entry in delta.logprobs]
        prompt_logprobs += [entry.logprob for entry in delta.prompt_logprobs]
        if count == 40:
            os.kill(llm.health().processes[victim].pid, signal.SIGKILL)
    assert got[:4] == FULL_DEPTH
    assert got[4] == undisturbed.token_ids
    assert logprobs == pytest.approx([entry.logprob for entry in undisturbed.logprobs], abs=1e-4)
    assert prompt_logprobs == pytest.approx([entry.logprob for entry in undisturbed.prompt_logprobs], abs=1e-4)
    assert (len(logprobs), len(prompt_logprobs)) == (200, len(PROMPTS[0]) - 1)
    assert llm.health().processes[victim].restarts == restarts + 1
    wait_until_idle(llm)


EARLY = {
    "demo": [SamplingParams(gate=gate, exit_threshold=0.9, max_tokens=120, ignore_eos=True, **more)
             for gate, more in (("own", {"temperature": 1.0, "seed": 5}), ("delayed", {"temperature": 0.0}),
                                ("lookahead", {"temperature": 1.0, "seed": 6, "presence_penalty": 0.5}))],
    "huginn-tiny": [SamplingParams(gate=gate, exit_threshold=0.8, max_tokens=80, ignore_eos=True, **more)
                    for gate, more in (("own", {"temperature": 1.0, "seed": 5}), ("convergence", {"temperature": 0.0}))],
}  # fmt: skip


@pytest.mark.parametrize("model", EARLY)
def test_kill_9_under_gates_that_exit_early_changes_nothing(model: str) -> None:
    """Worker, scheduler and worker again die in mid-stream: tokens and exit depths are those of the undisturbed run, one
    for one. Gates of the trained demo model (a plane a loop: a prefill at every token's depth) and of Huginn in its
    default layout (one plane: the output is decoded again). A rebuild at full depth gave other depths from there on."""
    path = model if model == "demo" else str(OURO.parent / model)
    params = EARLY[model]
    prompts = [[1, 5, 9, 13, 17, 21], list(range(40, 60)), [30, 31, 32, 33]][: len(params)]
    with LLM(quiet=True, **OPTIONS | {"model": path}) as llm:
        undisturbed = llm.generate(prompts, params)
        assert len({depth for output in undisturbed for depth in output.exit_depths[1:]}) >= 2
        tokens, depths = ([list[int]() for _ in prompts] for _ in range(2))
        victims = {15: "worker", 60: "scheduler", 110: "worker"}
        for count, (index, delta) in enumerate(llm.stream(prompts, params)):
            tokens[index] += delta.token_ids
            depths[index] += delta.exit_depths
            if count in victims:
                os.kill(llm.health().processes[victims.pop(count)].pid, signal.SIGKILL)
        assert not victims, "the streams ended before the last kill"
        assert tokens == [output.token_ids for output in undisturbed]
        assert depths == [output.exit_depths for output in undisturbed]


def test_kill_9_at_fixed_depth(llm: LLM) -> None:
    """Every token but the first has the fixed depth, behind the crash as before it, and is the undisturbed one."""
    fixed = SamplingParams(num_loops=2, **GREEDY)
    [undisturbed] = llm.generate([PROMPTS[3]], fixed)
    tokens, depths = list[int](), list[int]()
    for _, delta in llm.stream([PROMPTS[3]], fixed):
        tokens += delta.token_ids
        depths += delta.exit_depths
        if len(tokens) == 10:
            os.kill(llm.health().processes["worker"].pid, signal.SIGKILL)
    assert depths == [4, *[2] * 23]
    assert tokens == undisturbed.token_ids


def test_async_engine_and_native_api(tmp_path: Path) -> None:
    """One engine under asyncio serving its native API: a client's tokens are the published ones, and a client that goes
    away in mid-stream frees its slot and blocks."""

    def body(address: str) -> None:
        client, leaver = Client(address), Client(address)
        *pieces, last = client.generate(PROMPTS[2], gate="none", logprobs=2, prompt_logprobs=1, **GREEDY)
        rows = [row for piece in pieces for row in piece["logprobs"]]
        assert [token for token, _, _ in rows] == FULL_DEPTH[2]
        assert all(top[0] == [token, logprob] and len(top) == 2 for token, logprob, top in rows)
        prompt_rows = [row for piece in pieces for row in piece.get("prompt_logprobs", ())]
        assert [token for token, _, _ in prompt_rows] == PROMPTS[2][1:]
        assert [token for piece in pieces for token in piece["token_ids"]] == FULL_DEPTH[2]
        assert last["finish_reason"] == "length"
        leaver.send(verb="submit", id=1, prompt=PROMPTS[0], params={"max_tokens": 900, "ignore_eos": True})
        assert leaver.receive()["type"] == "tokens"
        leaver.close()
        deadline = time.monotonic() + 20
        while (stats := client.ask("stats")["values"])["num_requests_running"]:
            assert time.monotonic() < deadline, "the request of a client that has gone still runs"
        assert stats["kv_cache_usage_perc"] == 0.0
        assert client.ask("health")["status"] == "ok"
        client.close()

    async def main() -> None:
        loading: list[tuple[int, int]] = []
        engine = AsyncEngine(quiet=True, run_dir=str(tmp_path / "run"), **OPTIONS)
        engine._client.on_loading = lambda done, total: loading.append((done, total))
        async with engine:
            # none where the weights were there before this process listened
            assert loading == sorted(loading) and all(0 < done <= total < 1 << 30 for done, total in loading)
            assert engine.run_dir == str(tmp_path / "run")
            api = ZmqApi(engine, endpoint(tmp_path, "api"))
            try:
                await asyncio.wait_for(asyncio.to_thread(body, api.address), 60)
            finally:
                await api.close()

    asyncio.run(main())


def test_grammars_pass_through_the_processes() -> None:
    """Prepared by the worker, held back by the scheduler, and followed, also by a worker that took another's place."""
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=3, regex="[0-9]{4}", exit_threshold=0.5)
    with LLM("demo", quiet=True, max_num_seqs=2, kv_blocks=64) as llm:
        first = [out.text for out in llm.generate(["1+2=", "say a=", "x", "y"], params)]
        assert all(re.fullmatch("[0-9]{4}", text) for text in first)
        stream = llm.stream(["1+2=", "say a=", "x", "y"], params)
        deltas = [next(stream)]
        os.kill(llm.health().processes["worker"].pid, signal.SIGKILL)
        deltas += stream
        joined = ["".join(delta.text for index, delta in deltas if index == place) for place in range(4)]
        assert joined == first


def test_frontend_of_another_version_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a frontend and a scheduler of different versions waited for each other for ever."""
    monkeypatch.setattr(engine_client, "WIRE_VERSION", "another")
    with pytest.raises(EngineDeadError, match="scheduler and frontend are of different versions"):
        LLM(quiet=True, **OPTIONS)
