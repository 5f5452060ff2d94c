"""AsyncEngine over the fake engine's processes: streams, aborts, cancellation, deaths; what an HTTP server relies on."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from depthbatch.common.errors import ConfigError, EngineDeadError, RequestError
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.output import OutputDelta
from depthbatch.frontend.params import SamplingParams
from fakes.engine_processes import REJECTED_PROMPT, next_token

pytestmark = pytest.mark.usefixtures("fake_engine")


def with_engine(body: Callable[[AsyncEngine], Awaitable[None]], loop: str = "asyncio", **options: Any) -> None:
    """Runs ``body`` on an engine of its own."""

    async def main() -> None:
        async with AsyncEngine(quiet=True, **options) as engine:
            await asyncio.wait_for(body(engine), 60)
        assert len(asyncio.all_tasks()) == 1  # nothing is left running in the loop

    if loop == "uvloop":
        import uvloop

        uvloop.run(main())
    else:
        asyncio.run(main())


async def collect(engine: AsyncEngine, prompt: Any, **fields: Any) -> list[OutputDelta]:
    return [delta async for delta in engine.generate(prompt, SamplingParams(**fields))]


def tokens(deltas: list[OutputDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def expected(prompt: list[int], count: int) -> list[int]:
    return [next_token(prompt, i) for i in range(count)]


async def wait_until_idle(engine: AsyncEngine) -> None:
    for _ in range(50):
        if (await engine.stats())["num_requests_running"] == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a request still runs")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_many_streams_and_deaths(loop: str) -> None:
    """60 streams at once while scheduler and worker are killed in turn: every stream has its own tokens, each once and
    in order. Both event loops, since descriptors come and go under them."""

    async def body(engine: AsyncEngine) -> None:
        streams = [asyncio.create_task(collect(engine, [1 + i % 250], max_tokens=400)) for i in range(60)]
        victims = ["scheduler", "worker", "scheduler"]
        while victims:  # an observer that loses the race with a slow restart is followed by another
            observed: list[int] = []
            async for delta in engine.generate([9], SamplingParams(max_tokens=400)):
                observed += delta.token_ids
                if victims and len(observed) >= 40 and engine.health().status == "ok":
                    os.kill(engine.health().processes[victims.pop(0)].pid, signal.SIGKILL)
            assert observed == expected([9], 400)
        for i, deltas in enumerate(await asyncio.gather(*streams)):
            assert tokens(deltas) == expected([1 + i % 250], 400)
            assert deltas[-1].finish_reason == "length"
        while engine.health().status != "ok":
            await asyncio.sleep(0.02)
        assert engine.health().processes["scheduler"].restarts == 2

    with_engine(body, loop)


def test_text_and_depths() -> None:
    async def body(engine: AsyncEngine) -> None:
        assert engine.tokenizer is not None
        deltas = await collect(engine, "12+30=", max_tokens=12)
        prompt = engine.tokenizer.encode("12+30=")
        assert tokens(deltas) == expected(prompt, 12)
        assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(tokens(deltas))
        assert [depth for delta in deltas for depth in delta.exit_depths][:3] == [4, 3, 4]

    with_engine(body)


def test_slow_reader_gets_merged_deltas() -> None:
    """News that pile up become one delta, so a slow reader costs no queue; nothing of them is lost."""

    async def body(engine: AsyncEngine) -> None:
        got: list[OutputDelta] = []
        async for delta in engine.generate([5], SamplingParams(max_tokens=100)):
            got.append(delta)
            await asyncio.sleep(0.05)
        assert tokens(got) == expected([5], 100)
        assert len(got) < 50

    with_engine(body)


def test_every_way_out_frees_the_slot() -> None:
    """Cancelled task, closed generator, abandoned loop, abort by name, stop string, timeout: the engine is told."""

    async def body(engine: AsyncEngine) -> None:
        long = SamplingParams(max_tokens=500)
        task = asyncio.create_task(collect(engine, [1], max_tokens=500))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wait_until_idle(engine)

        stream = engine.generate([2], long)
        await anext(stream)
        await stream.aclose()
        await wait_until_idle(engine)

        async for _ in engine.generate([3], long):
            break
        await wait_until_idle(engine)

        named = engine.generate([4], long, "mine")
        await anext(named)
        assert await engine.abort("mine")
        assert [delta.finish_reason async for delta in named][-1] == "abort"
        assert not await engine.abort("mine")
        await wait_until_idle(engine)

        whole = "".join(delta.text for delta in await collect(engine, [5], max_tokens=20))
        deltas = await collect(engine, [5], max_tokens=500, stop=[whole[8:10]])
        assert "".join(delta.text for delta in deltas) == whole[: whole.index(whole[8:10])]
        assert (await collect(engine, [6], max_tokens=500, timeout_s=0.05))[-1].finish_reason == "timeout"
        await wait_until_idle(engine)

    with_engine(body)


def test_same_name_twice_does_not_swap_outputs() -> None:
    """Names are the caller's; internal ids are ours."""

    async def body(engine: AsyncEngine) -> None:
        async def run(prompt: list[int]) -> list[int]:
            return tokens([d async for d in engine.generate(prompt, SamplingParams(max_tokens=30), "same")])

        first, second = await asyncio.gather(run([1]), run([2]))
        assert (first, second) == (expected([1], 30), expected([2], 30))

    with_engine(body)


def test_requests_that_are_submitted_together() -> None:
    """One that cannot be served keeps all from running. Each has its own tokens, however they pile up; a stop string ends
    its own request alone, and at once; an abort by name ends those that are left."""

    async def body(engine: AsyncEngine) -> None:
        long = SamplingParams(max_tokens=500)
        with pytest.raises(RequestError):
            await anext(engine.generate_all([([1], long), ([9999], long)]))
        assert not engine._client._requests

        whole = "".join(delta.text for delta in await collect(engine, [5], max_tokens=20))
        stopping = SamplingParams(max_tokens=500, stop=[whole[8:10]])
        got: dict[int, list[OutputDelta]] = {0: [], 1: [], 2: []}
        async for batch in engine.generate_all(
            [([4], SamplingParams(max_tokens=9)), ([5], stopping), ([6], long)], "mine"
        ):
            assert len({index for index, _ in batch}) == len(batch)
            for index, delta in batch:
                got[index].append(delta)
            if got[0][-1:] and got[0][-1].finish_reason and got[1][-1].finish_reason and not got[2][-1].finish_reason:
                assert len(engine._client._requests._live) == 1
                await engine.abort("mine")
            await asyncio.sleep(0.01)
        assert tokens(got[0]) == expected([4], 9)
        assert "".join(delta.text for delta in got[1]) == whole[: whole.index(whole[8:10])]
        assert tokens(got[2]) == expected([6], len(tokens(got[2])))
        assert [deltas[-1].finish_reason for deltas in got.values()] == ["length", "stop", "abort"]
        assert not await engine.abort("mine") and not engine._mailboxes and not engine._named

    with_engine(body)


def test_an_error_comes_after_what_came_before() -> None:
    """News that pile up: the tokens before the engine was lost are delivered, then its error is raised."""

    async def body(engine: AsyncEngine) -> None:
        stream = engine.generate([5], SamplingParams(max_tokens=500))
        got = (await anext(stream)).token_ids
        before = len(engine._client._requests._live[next(iter(engine._mailboxes))].generated)
        while len(engine._client._requests._live[next(iter(engine._mailboxes))].generated) < before + 5:
            await asyncio.sleep(0.01)
        engine.fail("a test", RuntimeError("on purpose"))
        got += (await anext(stream)).token_ids
        assert got == expected([5], len(got)) and len(got) >= before + 5
        with pytest.raises(EngineDeadError):
            await anext(stream)

    with_engine(body)


def test_a_deadline_waits_for_no_tick() -> None:
    """Bug: deadlines were only looked at ten times a second, and when tokens came. None comes here: the scheduler is
    stopped. Requests that begin with a tick would be 68 ms late and more."""

    async def body(engine: AsyncEngine) -> None:
        loop, late_s = asyncio.get_running_loop(), []
        scheduler = engine.health().processes["scheduler"].pid
        os.kill(scheduler, signal.SIGSTOP)
        for timeout_s in (0.011, 0.021, 0.031, 0.012, 0.022, 0.032, 0.013, 0.023):
            start_s = loop.time()
            deltas = await collect(engine, [6], max_tokens=500, timeout_s=timeout_s)
            late_s.append(loop.time() - start_s - timeout_s)
            assert deltas[-1].finish_reason == "timeout"
        os.kill(scheduler, signal.SIGCONT)
        assert sorted(late_s)[len(late_s) // 2] < 0.04

    with_engine(body)


def test_refusals() -> None:
    """By the frontend before anything is sent, by the scheduler as the stream's first news; the engine goes on."""

    async def body(engine: AsyncEngine) -> None:
        for prompt, fields, param in (
            ([9999], {}, "prompt"),
            ([], {}, "prompt"),
            ("a", {"max_tokens": 5000}, "max_tokens"),
            ("a", {"gate": "lookahead"}, "gate"),
            ([1] * REJECTED_PROMPT, {}, "prompt"),
        ):
            with pytest.raises(RequestError) as caught:
                await collect(engine, prompt, **fields)
            assert caught.value.param == param
        assert tokens(await collect(engine, [1], max_tokens=3)) == expected([1], 3)

    with_engine(body)


def test_close_ends_open_streams() -> None:
    """A server that goes down must not leave its handlers waiting."""

    async def main() -> None:
        async with AsyncEngine(quiet=True) as engine:
            task = asyncio.create_task(collect(engine, [1], max_tokens=500))
            await asyncio.sleep(0.05)
        with pytest.raises(EngineDeadError, match="closed"):
            await asyncio.wait_for(task, 5)

    asyncio.run(main())


def test_engine_lost_for_good() -> None:
    """Open streams end with the reason, ``failed`` wakes, health says dead."""

    async def body(engine: AsyncEngine) -> None:
        stream = asyncio.create_task(collect(engine, [1], max_tokens=500))
        os.kill(engine.health().processes["worker"].pid, signal.SIGKILL)
        failure = await engine.failed()
        assert "exit code 7" in str(failure)
        result = (await asyncio.gather(stream, return_exceptions=True))[0]
        assert isinstance(result, EngineDeadError) or tokens(result) == expected([1], 500)  # type: ignore[arg-type]
        assert engine.health().status == "dead"

    with_engine(body, model="crash-later")


def test_failed_start() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"no config\.json"):
            async with AsyncEngine("user-error", quiet=True):
                raise AssertionError("started")

    asyncio.run(main())
