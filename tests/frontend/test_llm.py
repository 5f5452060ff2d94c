"""LLM over the fake engine's processes: order, batches, parameters, early ends, and everything that may die."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.errors import ConfigError, EngineDeadError, RequestError
from depthbatch.frontend.engine_client import EngineClient
from depthbatch.frontend.llm import LLM, IndexedDelta
from depthbatch.frontend.params import SamplingParams
from fakes.engine_processes import REJECTED_PROMPT, depth, next_token
from fakes.install import use_fake_engine

pytestmark = pytest.mark.usefixtures("fake_engine")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        use_fake_engine(patch)
        with LLM("demo", quiet=True) as llm:
            yield llm


def pid(llm: LLM, name: str) -> int:
    return llm.health().processes[name].pid


def expected(prompt: list[int], count: int) -> list[int]:
    return [next_token(prompt, i) for i in range(count)]


def test_outputs_in_order_of_prompts(llm: LLM) -> None:
    """Prompts of different lengths and output lengths finish out of order; every output must be its own prompt's."""
    prompts = [[i + 1] * (1 + i % 3) for i in range(200)]
    params = [SamplingParams(max_tokens=1 + (7 * i) % 13) for i in range(200)]
    seen: list[tuple[int, int]] = []
    outputs = llm.generate(prompts, params, progress=lambda done, total: seen.append((done, total)))
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt and output.finish_reason == "length"
        assert output.token_ids == expected(prompt, own.max_tokens or 0)
        assert output.exit_depths == [depth(i) for i in range(len(output.token_ids))]
        assert (output.accepted_drafts, output.rejected_drafts) == (len(output.token_ids), len(output.token_ids) // 2)
        assert llm.tokenizer is not None and output.text == llm.tokenizer.decode(output.token_ids)
    assert seen == [(i + 1, 200) for i in range(200)]


def test_thousands_of_prompts(llm: LLM) -> None:
    outputs = llm.generate([[1 + i % 250] for i in range(3000)], SamplingParams(max_tokens=2))
    assert len(outputs) == 3000 and all(len(output.token_ids) == 2 for output in outputs)


def test_the_prompt_at_fault_is_named(llm: LLM) -> None:
    """Bug: "prompt is empty", of one among many. A prompt alone needs no number."""
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt is empty$") as raised:
        llm.generate(["a", "", "b"])
    assert raised.value.param == "prompt"
    with pytest.raises(RequestError, match=r"^prompt is empty$"):
        llm.generate([""])


def test_one_prompt_alone(llm: LLM) -> None:
    [as_text] = llm.generate("12+30=", SamplingParams(max_tokens=3))
    [as_ids] = llm.generate(as_text.prompt_token_ids, SamplingParams(max_tokens=3))
    assert as_text.token_ids == as_ids.token_ids and as_text.prompt == "12+30=" and as_ids.prompt is None
    assert llm.generate([]) == []


def test_stop_token(llm: LLM) -> None:
    stop = next_token([5], 6)
    [output] = llm.generate([[5]], SamplingParams(max_tokens=50, stop_token_ids=[stop]))
    assert output.token_ids == expected([5], 7)
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert llm.tokenizer is not None and output.text == llm.tokenizer.decode(output.token_ids[:-1])


def test_stop_string_aborts_in_the_engine(llm: LLM) -> None:
    """The text ends before the stop string; the engine, which knows no text, is told, so the slot is free at once."""
    [whole] = llm.generate([[9]], SamplingParams(max_tokens=40))
    stop = whole.text[10:13]
    [output] = llm.generate([[9]], SamplingParams(max_tokens=400, stop=[stop]))
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    wait_until_idle(llm)


def wait_until_idle(llm: LLM) -> None:
    """The fake engine's own count of running requests reaches 0 long before any of them could finish by itself."""
    for _ in range(50):
        if llm.stats()["num_requests_running"] == 0:
            return
        time.sleep(0.01)
    raise AssertionError("a request still runs")


def test_giving_up_a_stream_aborts(llm: LLM) -> None:
    stream = llm.stream([[3], [4]], SamplingParams(max_tokens=500))
    assert [next(stream) for _ in range(5)]
    assert llm.stats()["num_requests_running"] == 2
    stream.close()  # type: ignore[attr-defined]
    wait_until_idle(llm)


def test_runs_may_be_interleaved(llm: LLM) -> None:
    """Two streams and questions to the engine in turn: news that one call takes off the socket belong to another."""
    streams = [llm.stream([[i]], SamplingParams(max_tokens=60)) for i in (1, 2)]
    got: list[list[int]] = [[], []]
    for _ in range(60):
        for own, stream in zip(got, streams, strict=True):
            own += next(stream).delta.token_ids
        llm.health()
        llm.stats()
    assert got == [expected([1], 60), expected([2], 60)]


def test_timeout(llm: LLM) -> None:
    [output] = llm.generate([[3]], SamplingParams(max_tokens=500, timeout_s=0.05))
    assert output.finish_reason == "timeout" and output.token_ids == expected([3], len(output.token_ids))
    wait_until_idle(llm)


def test_bad_requests_leave_nothing_running(llm: LLM) -> None:
    """All prompts are checked before any is submitted; a refusal by the scheduler ends the others."""
    submitted = llm.stats()["prompt_tokens_total"]
    good = [[1], "text"]
    for bad in ([9999], [], ["x"], "\ud800", [1.5]):
        with pytest.raises(RequestError):
            llm.generate([*good, bad], SamplingParams(max_tokens=400))  # type: ignore[list-item]
    with pytest.raises(RequestError, match="2 prompts but 1 params"):
        llm.generate([[1], [2]], [SamplingParams()])
    assert llm.stats()["prompt_tokens_total"] == submitted
    with pytest.raises(RequestError, match="needs 9 KV blocks"):
        llm.generate([[1], [1] * REJECTED_PROMPT], SamplingParams(max_tokens=400))
    wait_until_idle(llm)


@given(
    kills=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["scheduler", "worker"])), min_size=1, max_size=2),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
@settings(max_examples=6, deadline=None)
def test_killed_processes_lose_and_repeat_nothing(kills: list[tuple[int, str]], lengths: list[int]) -> None:
    """kill -9 after any delta, of either process, once or twice: the tokens are those of an undisturbed run. A lost
    token, one sent twice, or a resubmission without the tokens so far would each show, as every index has its own."""
    with LLM("demo", quiet=True) as llm:
        prompts = [[i + 1] for i in range(len(lengths))]
        got: list[list[int]] = [[] for _ in prompts]
        plan = dict(kills)
        for count, (index, delta) in enumerate(
            llm.stream(prompts, [SamplingParams(max_tokens=length) for length in lengths])
        ):
            got[index] += delta.token_ids
            if count in plan:
                os.kill(pid(llm, plan[count]), signal.SIGKILL)
        assert got == [expected(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


def test_restart_is_visible_in_health() -> None:
    with LLM("demo", quiet=True) as llm:
        before = llm.health()
        assert before.status == "ok"
        os.kill(before.processes["worker"].pid, signal.SIGKILL)
        llm.generate([[1]], SamplingParams(max_tokens=100))
        after = llm.health().processes["worker"]
        assert after.restarts == 1 and after.pid != before.processes["worker"].pid


def test_worker_that_keeps_dying_ends_the_engine() -> None:
    """Restarting is bounded: the request gets an error instead of waiting for ever, and so does the next one."""
    with LLM("crash-later", quiet=True) as llm:
        os.kill(pid(llm, "worker"), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker died \(exit code 7\)"):
            while True:
                llm.generate([[1]], SamplingParams(max_tokens=300))
        assert llm.health().status == "dead"
        with pytest.raises(EngineDeadError):
            llm.generate([[1]])


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("user-error", ConfigError, "model 'user-error' has no config.json"),
        ("crash", EngineDeadError, r"worker died \(killed by SIGABRT\): about to abort"),
    ],
)
def test_child_that_dies_at_start(
    model: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent says why, from the last words or the log, and leaves no process and no directory. C-level aborts,
    which send no message, are noticed too."""
    clients: list[EngineClient] = []
    launch = EngineClient.launch
    monkeypatch.setattr(EngineClient, "launch", lambda client: (clients.append(client), launch(client))[1])
    with pytest.raises(error, match=message):
        LLM(model)
    assert not clients[0].run_dir.exists()
    assert not clients[0].descriptors()


def test_use_after_close(llm: LLM) -> None:
    with LLM("demo", quiet=True) as closed:
        pass
    closed.close()
    with pytest.raises(EngineDeadError, match="closed"):
        closed.generate([[1]])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((5,), "prompts"), ((["1"], {"max_tokens": 1}), "params"), ((["1"], ["x"]), "params"), (([[1], 5],), "prompt")],
)
def test_arguments_of_another_type_are_named(llm: LLM, arguments: tuple, name: str) -> None:
    """Bug: an AttributeError or a TypeError from the inside."""
    with pytest.raises(RequestError, match=rf"\b{name}\b") as raised:
        llm.generate(*arguments)
    assert raised.value.param == name


def test_unknown_option() -> None:
    with pytest.raises(ConfigError, match="unknown option 'polcy' \\(did you mean 'policy'\\?\\)"):
        LLM("demo", polcy="cb")


def test_deltas_join_to_the_output(llm: LLM) -> None:
    deltas: list[IndexedDelta] = list(llm.stream("ab", SamplingParams(max_tokens=30)))
    [output] = llm.generate("ab", SamplingParams(max_tokens=30))
    assert "".join(delta.text for _, delta in deltas) == output.text
    assert [delta.finish_reason for _, delta in deltas][:-1] == [None] * (len(deltas) - 1)


def test_children_outlive_the_starting_thread() -> None:
    """The parent-death signal goes by thread: an engine that was made in a thread that has ended must live on."""
    import threading

    made: list[LLM] = []
    thread = threading.Thread(target=lambda: made.append(LLM("demo", quiet=True)))
    thread.start()
    thread.join()
    with made[0] as llm:
        assert len(llm.generate([[1]], SamplingParams(max_tokens=20))[0].token_ids) == 20
        assert all(process.restarts == 0 for process in llm.health().processes.values())


def test_run_dir_is_removed() -> None:
    with LLM("demo", quiet=True) as llm:
        path = llm._client.run_dir
        assert path.is_dir()
    assert not path.exists()
