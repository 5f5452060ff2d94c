"""Answers that go on: of a kept answer after any token, and of a request that another engine has begun. Over the fake
engine's processes, whose tokens are a function of prompt and index."""

import asyncio
import os
import signal
from contextlib import aclosing

import pytest

from depthbatch.common.errors import RequestError
from depthbatch.common.messages import FinishReason
from depthbatch.frontend import kept_answers
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.kept_answers import KeptAnswers
from depthbatch.frontend.live_requests import Progress
from depthbatch.frontend.output import IndexedDelta, OutputDelta
from depthbatch.frontend.params import SamplingParams
from fakes.engine_processes import depth, next_token

pytestmark = pytest.mark.usefixtures("fake_engine")

PROMPTS = [[5, 6, 7], [9, 9]]
LENGTH = 12


async def take(engine: AsyncEngine, requests: list, count: int | None, name: str = "n") -> list[IndexedDelta]:
    """The first ``count`` pieces, or all; then the client has gone."""
    got: list[IndexedDelta] = []
    async with aclosing(engine.generate_all(requests, name, form=b"f")) as batches:
        async for batch in batches:
            got += batch
            if count is not None and len(got) >= count:
                break
    return got


async def resumed(engine: AsyncEngine, requests: list, name: str = "n") -> list[list[IndexedDelta]]:
    answer = engine.kept_answer(name)
    assert answer is not None and answer.form == b"f"
    return [batch async for batch in engine.resume_all(answer, requests)]


def joined(deltas: list[IndexedDelta], index: int) -> OutputDelta:
    whole = OutputDelta("", "", [], [])
    for number, delta in deltas:
        if number == index:
            whole.append(delta)
    whole.request_id = ""
    return whole


@pytest.mark.parametrize("stop", [(), ("Wh",), ("absent",)])
def test_a_kept_answer_goes_on(stop: tuple[str, ...]) -> None:
    """Two prompts, given up after so many pieces: what is resumed is the whole answer again, token for token, with what was
    there before an empty batch, in single tokens; resumed again when it has ended, it is all there and nothing runs. A
    stop string may lie across the point, and ends what it ended before."""

    async def main() -> None:
        async with AsyncEngine(quiet=True) as engine:
            engine.keep_answers(60)
            params = SamplingParams(max_tokens=LENGTH, stop=stop)
            requests = [(prompt, params) for prompt in PROMPTS]
            whole = await take(engine, requests, None, "whole")
            for count in range(1, 9, 3):
                before = await take(engine, requests, count)
                for again in range(2):
                    batches = await resumed(engine, requests)
                    seam = batches.index([])
                    assert all(len(delta.token_ids) <= 1 for batch in batches[:seam] for _, delta in batch)
                    got = [piece for batch in batches for piece in batch]
                    for index in range(2):
                        assert joined(got, index) == joined(whole, index)
                        assert (
                            joined(before, index).token_ids
                            == joined(got, index).token_ids[: len(joined(before, index).token_ids)]
                        )
                    assert not again or not batches[seam + 1 :]
            assert (await engine.stats())["num_requests_running"] == 0

    asyncio.run(main())


def test_what_was_said_is_what_is_kept() -> None:
    """No piece is handed out before it is in the file, whatever is read of it; an aborted answer stays aborted; an answer
    without a form is not kept."""

    async def main() -> None:
        async with AsyncEngine(quiet=True) as engine:
            engine.keep_answers(60)
            requests = [([5, 6], SamplingParams(max_tokens=200))]
            async with aclosing(engine.generate_all(requests, "n", form=b"f")) as batches:
                said = 0
                async for ((_, delta),) in batches:
                    said += len(delta.token_ids)
                    answer = engine.kept_answer("n")
                    assert answer is not None and sum(len(news.event.token_ids) for news in answer.news) >= said
                    if said > 20:
                        await engine.abort("n")
            ((*_, last),) = (await resumed(engine, requests))[-2:-1]
            assert last.delta.finish_reason is FinishReason.ABORT
            assert [batch async for batch in engine.generate_all(requests[:1], "unkept")]
            assert engine.kept_answer("unkept") is None

    asyncio.run(main())


def test_a_stream_that_lives_gives_way() -> None:
    """A client that has lost its connection resumes before the server has noticed: the old stream ends with an error that
    says so, the new one has every token once."""

    async def main() -> None:
        async with AsyncEngine(quiet=True) as engine:
            engine.keep_answers(60)
            requests = [([5, 6], SamplingParams(max_tokens=60))]
            old = engine.generate_all(requests, "n", form=b"f")
            await anext(old)
            got = [piece for batch in await resumed(engine, requests) for piece in batch]
            assert joined(got, 0).token_ids == [next_token([5, 6], i) for i in range(60)]
            with pytest.raises(RequestError, match="goes on over another connection"):
                async for _ in old:
                    pass

    asyncio.run(main())


@pytest.mark.parametrize("silent", [False, True])
def test_a_stream_gives_way_to_another_frontend(monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    """Bug: it went on beside the resumed one, at the price of two. With its next token, or, where none comes, soon, it ends
    with the error that a stream of the same frontend gets, and its request is aborted."""
    monkeypatch.setattr(kept_answers, "SWEEPS_PER_LIFE", 600)

    async def main() -> None:
        async with AsyncEngine(quiet=True) as engine:
            engine.keep_answers(60)
            requests = [([5, 6], SamplingParams(max_tokens=500))]
            stream = engine.generate_all(requests, "n", form=b"f")
            await anext(stream)
            scheduler = engine.health().processes["scheduler"].pid
            assert scheduler is not None
            if silent:
                os.kill(scheduler, signal.SIGSTOP)
            other = KeptAnswers(engine.run_dir, 60)
            answer = other.find("n")
            assert answer is not None and other.go_on(answer.handle) is not None
            other.close()
            with pytest.raises(RequestError, match="goes on over another connection"):
                async for _ in stream:
                    pass
            os.kill(scheduler, signal.SIGCONT)
            with pytest.raises(RequestError, match="goes on over another connection, or is not kept any more"):
                await anext(engine.resume_all(answer, requests))
            assert (await engine.stats())["num_requests_running"] == 0

    asyncio.run(main())


def test_a_resting_answer_is_aborted() -> None:
    """Bug: an abort by name did nothing to a stream whose client had gone: resumed, it decoded on. Now it has the tokens that
    it had, and ends with "abort"; one that has ended is nobody's to abort."""

    async def main() -> None:
        async with AsyncEngine(quiet=True) as engine:
            engine.keep_answers(60)
            requests = [([5, 6], SamplingParams(max_tokens=500)), ([7], SamplingParams(max_tokens=1))]
            await take(engine, requests, 10)
            assert not await engine.abort("n") and engine.abort_kept("n") and not engine.abort_kept("n")
            batches = await resumed(engine, requests)
            assert batches[-1] == []
            got = [piece for batch in batches for piece in batch]
            assert joined(got, 0).finish_reason is FinishReason.ABORT
            assert joined(got, 1).finish_reason is FinishReason.LENGTH
            assert len(joined(got, 0).token_ids) >= 5

    asyncio.run(main())


def test_a_request_goes_on_elsewhere() -> None:
    """The resume form, after every number of tokens: what comes is new, its text follows on what the first engine said,
    a stop string across the point is found, and one that lies before it ends the answer at once."""

    async def rest(engine: AsyncEngine, params: SamplingParams, count: int) -> OutputDelta:
        tokens = [next_token(PROMPTS[0], i) for i in range(count)]
        progress = Progress(tokens, [depth(i) for i in range(count)])
        news = engine.generate_all([(PROMPTS[0], params)], progress=progress)
        return joined([piece async for batch in news for piece in batch], 0)

    async def main() -> None:
        async with AsyncEngine(quiet=True) as engine:
            params = SamplingParams(max_tokens=LENGTH, temperature=0)
            whole = joined(await take(engine, [(PROMPTS[0], params)], None), 0)
            for count in range(LENGTH + 1):
                got = await rest(engine, params, count)
                assert got.token_ids == whole.token_ids[count:] and got.exit_depths == whole.exit_depths[count:]
                assert got.text == whole.text[count:] and got.finish_reason is FinishReason.LENGTH
            stop = SamplingParams(max_tokens=LENGTH, temperature=0, stop=whole.text[4:7])
            assert ((got := await rest(engine, stop, 5)).text, got.finish_reason) == ("", FinishReason.STOP)
            assert len(got.token_ids) == 2
            assert ((got := await rest(engine, stop, 9)).text, got.token_ids) == ("", [])

    asyncio.run(main())


BAD = [
    (Progress([5], []), {}, "1 token_ids with 0 exit_depths"),
    (Progress([5] * 13, [4] * 13), {}, "13 token_ids are more than max_tokens 12"),
    (Progress([5, 264], [4, 4]), {}, "token_ids: not all are below the vocabulary size 264"),
    (Progress([-1], [4]), {}, "token_ids: not all are below"),
    (Progress([5], [0]), {}, "exit_depths: not all are from 1 to 4"),
    (Progress([5], [5]), {}, "exit_depths: not all are from 1 to 4"),
    (Progress([5], [4], [0]), {}, "cuts: not all are token counts"),
    (Progress([True], [4]), {}, "token_ids must be a list of whole numbers"),
    (Progress([5], [4]), {"temperature": 1.0}, "seed: a request that goes on elsewhere"),
]


def test_bad_progress_is_refused() -> None:
    """By the frontend, in words that a client knows, before the scheduler sees it."""

    async def main() -> None:
        async with AsyncEngine(quiet=True) as engine:
            for progress, changes, message in BAD:
                params = SamplingParams(**{"max_tokens": LENGTH, "temperature": 0, **changes})
                with pytest.raises(RequestError, match=message):
                    await anext(engine.generate_all([([5], params)], progress=progress))

    asyncio.run(main())
