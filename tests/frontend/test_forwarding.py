"""Requests that are served by engines elsewhere, over replicas that get lost at every point. Two AsyncEngines over the fake
engine's processes stand behind it, whose tokens are a function of prompt and index."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from depthbatch.common.errors import DepthbatchError, EngineDeadError, RequestError
from depthbatch.common.messages import FinishReason
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.forwarding import ForwardingEngine, ReplicaLostError, decode_call, encode_error, encode_news
from depthbatch.frontend.output import OutputDelta
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.routing import AffinityRouter, LoopForecast, Order, prefixes_of
from fakes.engine_processes import REJECTED_PROMPT, depth, next_token

pytestmark = pytest.mark.usefixtures("fake_engine")


class TwoEngines:
    """Replicas that take turns; each is lost after so many messages."""

    def __init__(self, engines: list[AsyncEngine], lost_after: int | None) -> None:
        self.engines, self.lost_after, self.asked = engines, lost_after, 0
        self.orders: list[Order] = []

    async def ask(self, call: bytes, order: Order) -> AsyncGenerator[bytes, None]:
        self.asked += 1
        self.orders.append(order)
        engine = self.engines[self.asked % 2]
        try:
            async with aclosing(engine.forward(*_fields(call))) as stream:
                told = 0
                async for events in stream:
                    yield encode_news(events)
                    told += 1
                    if told == self.lost_after:
                        raise ReplicaLostError("killed")
        except DepthbatchError as error:
            yield encode_error(error)


def _fields(call: bytes) -> tuple:
    decoded = decode_call(call)
    return decoded.submit, decoded.timeout_s


async def run(engine: ForwardingEngine, requests: list, name: str = "n") -> list[OutputDelta]:
    outputs: dict[int, OutputDelta] = {}
    async for batch in engine.generate_all(requests, name):
        for index, delta in batch:
            outputs.setdefault(index, OutputDelta(name, "", [], [])).append(delta)
    return [outputs[index] for index in sorted(outputs)]


def with_replicas(body, lost_after: int | None) -> None:
    async def main() -> None:
        async with AsyncEngine(quiet=True) as one, AsyncEngine(quiet=True) as two:
            replicas = TwoEngines([one, two], lost_after)
            await asyncio.wait_for(body(ForwardingEngine(replicas, one.info, one.tokenizer), replicas), 60)
            for engine in (one, two):
                assert (await engine.stats())["num_requests_running"] == 0

    asyncio.run(main())


@pytest.mark.parametrize("lost_after", [None, 1, 3])
def test_a_lost_replica_is_a_pause(lost_after: int | None) -> None:
    """Row "one of several replicas dies: its streams are cut, or begin anew with other tokens". Three prompts of different
    lengths, the replica lost after each message, or each third: every token and depth once and
    in order, the text as of one engine, a stop string across the seam found; nothing is left running anywhere."""

    async def body(engine: ForwardingEngine, replicas: TwoEngines) -> None:
        requests = [([5, 6], SamplingParams(max_tokens=12)), ([9], SamplingParams(max_tokens=5))]
        requests.append(([7, 7, 7], SamplingParams(max_tokens=20, stop="never", seed=4)))
        outputs = await run(engine, requests)
        for (prompt, params), output in zip(requests, outputs, strict=True):
            assert output.token_ids == [next_token(prompt, i) for i in range(params.max_tokens)]
            assert output.exit_depths == [depth(i) for i in range(params.max_tokens)]
            assert output.text == engine._tokenizer.decode(output.token_ids)
            assert output.finish_reason is FinishReason.LENGTH
        text = outputs[0].text
        (stopped,) = await run(engine, [([5, 6], SamplingParams(max_tokens=12, stop=text[3:6]))])
        assert (stopped.text, stopped.finish_reason) == (text[:3], FinishReason.STOP)
        assert (replicas.asked == 4) == (lost_after is None)
        assert replicas.orders[0].loops == 12 * 4  # nothing has come yet: full depth

    with_replicas(body, lost_after)


def test_what_a_replica_refuses_is_refused() -> None:
    """A refusal by its scheduler comes as it would from an engine of one's own; a request too large for the model never
    leaves; aborts by name, deadlines and a reader that goes away end the requests there."""

    async def body(engine: ForwardingEngine, replicas: TwoEngines) -> None:
        with pytest.raises(RequestError, match="needs 9 KV blocks") as caught:
            await run(engine, [([1] * REJECTED_PROMPT, SamplingParams())])
        assert caught.value.param == "prompt"
        asked = replicas.asked
        with pytest.raises(RequestError, match="max_model_len"):
            await run(engine, [([1], SamplingParams(max_tokens=10_000))])
        assert replicas.asked == asked
        long = [([1], SamplingParams(max_tokens=400))]
        reading = asyncio.create_task(run(engine, long, "mine"))
        await asyncio.sleep(0.1)
        assert await engine.abort("mine") and not await engine.abort("yours")
        (output,) = await reading
        assert output.finish_reason is FinishReason.ABORT and 0 < len(output.token_ids) < 400
        (output,) = await run(engine, [([1], SamplingParams(max_tokens=400, timeout_s=0.2))])
        assert output.finish_reason is FinishReason.TIMEOUT and 0 < len(output.token_ids) < 400
        async with aclosing(engine.generate_all(long, "n")) as batches:
            await anext(batches)

    with_replicas(body, None)


@pytest.mark.parametrize("way", ["lost", "ended"])
def test_replicas_that_are_lost_again_and_again_are_told(way: str) -> None:
    """Without a message between the losses there is an end to it; an answer that ends before its request does is a loss."""
    asked = 0

    class Never:
        async def ask(self, call: bytes, order: Order) -> AsyncGenerator[bytes, None]:
            nonlocal asked
            asked += 1
            if way == "lost":
                raise ReplicaLostError("out of order")
            return
            yield b""

    async def main() -> None:
        async with AsyncEngine(quiet=True) as one:
            engine = ForwardingEngine(Never(), one.info, one.tokenizer)
            with pytest.raises(EngineDeadError, match="6 replicas in a row were lost: "):
                await run(engine, [([1], SamplingParams())])
            assert asked == 6 and not engine.num_unfinished

    asyncio.run(main())


def test_prompts_go_where_their_beginning_is() -> None:
    """The longest known beginning decides, unless that replica has more than its bound of the load: then the one with the
    fewest loops queued. A replica that has gone is no home."""
    router = AffinityRouter(load_bound=1.25)
    tokens = [bytes([n, 0, 0, 0]) * 64 for n in range(4)]
    short, long = Order(prefixes_of(tokens[0] + tokens[1]), 1.0), Order(prefixes_of(b"".join(tokens)), 1.0)
    assert long.prefixes[:2] == short.prefixes and len(long.prefixes) == 4 and prefixes_of(tokens[0][:-4]) == ()
    assert router.rank(short, {"a": 3.0, "b": 2.0}) == ["b", "a"]
    router.went(short, "a")
    assert router.rank(long, {"a": 30.0, "b": 25.0, "c": 26.0}) == ["a", "b", "c"]
    assert router.rank(long, {"a": 60.0, "b": 25.0, "c": 26.0}) == ["b", "c", "a"]
    assert router.rank(long, {"b": 25.0, "c": 20.0}) == ["c", "b"]
    router.went(long, "b")
    assert router.rank(long, {"a": 1.0, "b": 1.0}) == ["b", "a"]
    assert router.rank(Order(prefixes_of(tokens[3]), 1.0), {"a": 1.0, "b": 0.0}) == ["b", "a"]


def test_loops_are_forecast_by_depth() -> None:
    """A fixed or recorded depth counts as it is, a gate by the mean so far within the request's bounds; what has come is not
    ahead any more."""
    from depthbatch.common.gates import Gate
    from depthbatch.common.messages import RequestParams, Submit

    def loops(generated: int = 0, **params: object) -> float:
        own = RequestParams(**{"max_tokens": 10, "max_loops": 4, **params})
        return forecast.loops(Submit(1, b"", own, generated_depths=bytes([2]) * generated))

    forecast = LoopForecast(4)
    assert loops(gate=Gate.FIXED, max_loops=2) == 20 and loops(gate=Gate.NONE) == 40 == loops(gate=Gate.DELAYED)
    assert loops(6, gate=Gate.NONE) == 16
    assert loops(gate=Gate.REPLAY, exit_depths=bytes([1, 2, 3])) == 1 + 2 + 3 + 7 * 4
    assert loops(2, gate=Gate.REPLAY, exit_depths=bytes([1, 2, 3])) == 2 + 3 + 6 * 4
    forecast.add([2] * 20_000)
    assert loops(gate=Gate.DELAYED) == pytest.approx(20, rel=1e-3)
    assert loops(gate=Gate.DELAYED, min_loops=3) == 30
