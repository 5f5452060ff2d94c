"""The native API with its own client, over the fake engine: one terminal message a request, whatever the client does."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from prometheus_client import generate_latest

from depthbatch.common.transport import endpoint
from depthbatch.frontend import zmq_api
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.client import Client
from depthbatch.frontend.metrics import FrontendMetrics
from depthbatch.frontend.request_limit import RequestLimit
from depthbatch.frontend.zmq_api import ZmqApi
from fakes.engine_processes import REJECTED_PROMPT, next_token

pytestmark = pytest.mark.usefixtures("fake_engine")


@pytest.fixture
def address(tmp_path: Path) -> str:
    return endpoint(tmp_path, "api")


def serve(address: str, body: Callable[[str], None]) -> int:
    """Runs ``body`` in a thread against a server; returns the server's count of undecodable messages."""

    async def main() -> int:
        async with AsyncEngine(quiet=True) as engine:
            api = ZmqApi(engine, address)
            try:
                await asyncio.wait_for(asyncio.to_thread(body, address), 60)
            finally:
                await api.close()
            return api.decode_errors

    return asyncio.run(main())


def until_terminal(client: Client, request_id: Any) -> list[dict[str, Any]]:
    messages = []
    while True:
        message = client.receive()
        if message.get("id") == request_id and message["type"] != "aborted":
            messages.append(message)
            if message["type"] in ("finished", "error"):
                return messages


def limited(address: str, limit: int, body: Callable[[str, RequestLimit], None], timeout_s: float | None = None) -> str:
    """``serve`` under a limit of places; the metrics at the end."""

    async def main() -> str:
        async with AsyncEngine(quiet=True) as engine:
            places = RequestLimit(FrontendMetrics(4), limit, limit, limit)
            api = ZmqApi(engine, address, places, timeout_s)
            try:
                await asyncio.wait_for(asyncio.to_thread(body, address, places), 60)
            finally:
                await api.close()
            return generate_latest(places.metrics.registry).decode()

    return asyncio.run(main())


def test_requests_pass_through_admission(address: str) -> None:
    """Bug: the native API went round --max-requests, the drain and the metrics: one client could fill the engine, and a
    server that drained took its requests until it was gone."""

    def body(address: str, places: RequestLimit) -> None:
        client = Client(address)
        client.send(verb="submit", id="a", prompt=[7], params={"max_tokens": 500, "ignore_eos": True})
        assert client.receive()["type"] == "tokens"
        client.send(verb="submit", id="b", prompt=[7], params={"max_tokens": 3})
        (refused,) = until_terminal(client, "b")
        assert refused["error"] == "overloaded" and "queue is full" in refused["message"]
        client.send(verb="abort", id="a")
        assert until_terminal(client, "a")[-1]["finish_reason"] == "abort"
        client.send(verb="submit", id="c", prompt=[7, 8], params={"max_tokens": 3})
        assert until_terminal(client, "c")[-1]["finish_reason"] == "length"
        client.send(verb="submit", id="d", prompt=[7], params={"max_tokens": 100_000})
        assert until_terminal(client, "d")[-1]["error"] == "request"
        places.drain()
        client.send(verb="submit", id="e", prompt=[7], params={})
        (refused,) = until_terminal(client, "e")
        assert refused["error"] == "overloaded" and "shutting down" in refused["message"]
        client.close()
        assert places.in_flight == 0

    text = limited(address, 1, body)
    for line in (
        'prompt_tokens_total{process="frontend"} 3.0',
        'request_success_total{finished_reason="abort",process="frontend"} 1.0',
        'request_success_total{finished_reason="length",process="frontend"} 1.0',
        'admission_rejections_total{process="frontend",reason="queue_full"} 1.0',
        'admission_rejections_total{process="frontend",reason="draining"} 1.0',
        'time_to_first_token_seconds_count{process="frontend"} 2.0',
    ):
        assert f"depthbatch:{line}" in text


def test_the_default_timeout_holds(address: str) -> None:
    """Bug: --default-timeout-s held for HTTP alone."""

    def body(address: str, places: RequestLimit) -> None:
        client = Client(address)
        client.send(verb="submit", id=1, prompt=[7], params={"max_tokens": 400})
        assert until_terminal(client, 1)[-1]["finish_reason"] == "timeout"
        client.send(verb="submit", id=2, prompt=[7], params={"max_tokens": 60, "timeout_s": 30.0})
        assert until_terminal(client, 2)[-1]["finish_reason"] == "length"
        client.close()

    limited(address, 1, body, timeout_s=0.05)


def test_session(address: str) -> None:
    """Submit, stream, stats, health through the client that ships."""

    def body(address: str) -> None:
        client = Client(address)
        *pieces, last = client.generate([7], max_tokens=9)
        assert [token for piece in pieces for token in piece["token_ids"]] == [next_token([7], i) for i in range(9)]
        assert all(len(piece["token_ids"]) == len(piece["exit_depths"]) for piece in pieces)
        assert (last["type"], last["finish_reason"]) == ("finished", "length")
        assert (last["accepted_drafts"], last["rejected_drafts"]) == (9, 4)
        assert client.ask("health")["status"] == "ok"
        assert client.ask("stats")["values"]["prompt_tokens_total"] == 1
        *_, without = client.generate([7], max_tokens=9, speculation=False)
        assert (without["accepted_drafts"], without["rejected_drafts"]) == (0, 0)
        with pytest.raises(RuntimeError, match="max_tokens"):
            list(client.generate([7], max_tokens=0))
        client.close()

    assert serve(address, body) == 0


def test_exactly_one_terminal_message(address: str) -> None:
    """Row "over-long prompt logged and dropped, client hangs": submits and aborts sent together, so that aborts meet
    requests in every state, unborn and finished included, and among them prompts too long for the model (refused by the
    frontend) and for the cache (by the scheduler): each request gets one terminal message and nothing after it."""

    def body(address: str) -> None:
        client = Client(address)
        for i in range(60):
            client.send(verb="submit", id=i, prompt=[1 + i], params={"max_tokens": 1 + i})
            if i % 3 == 0:
                client.send(verb="abort", id=i)
            if i % 3 == 1:
                client.send(verb="abort", id=i - 1)
        for i in range(0, 60, 5):
            client.send(verb="abort", id=i)
        client.send(verb="abort", id="unknown")
        for i, length in enumerate((511, 512, 513, 10_000, REJECTED_PROMPT), 60):
            client.send(verb="submit", id=i, prompt=[5] * length, params={"max_tokens": 1})
        terminal: dict[int, int] = dict.fromkeys(range(65), 0)
        refused = set()
        while min(terminal.values()) == 0:
            message = client.receive()
            if message["type"] in ("finished", "error"):
                terminal[message["id"]] += 1
            if message["type"] == "error":
                refused.add(message["id"])
                assert message["param"] == "prompt"
            elif message["type"] == "tokens":
                assert terminal[message["id"]] == 0
        client.ask("stats")  # whatever else was sent has come before this
        assert set(terminal.values()) == {1} and refused == {61, 62, 63, 64}
        client.close()

    serve(address, body)


def test_bad_messages(address: str) -> None:
    """Bytes that are no request get a typed error and are counted; bad fields name themselves; the server goes on."""

    def body(address: str) -> None:
        client = Client(address)
        for bad in (b"", b"\xc1", os.urandom(64), b"\x81\xa4verb\xa3fly", b"\x81\xa4verb\xa6submit"):
            client.socket.send(bad)
            assert client.receive()["error"] == "decode"
        client.send(verb="abort", id=1, extra=2)
        error = client.receive()
        assert (error["error"], error["id"]) == ("decode", 1), "bug: who matches answers by id waited for ever"
        client.send(verb="submit", id="x", prompt="a", params={"max_tokns": 3})
        error = client.receive()
        assert (error["error"], error["id"], error["param"]) == ("request", "x", "max_tokns")
        assert client.ask("stats")["values"]["api_decode_errors"] == 6
        client.close()

    assert serve(address, body) == 6


def test_names_and_prompts_have_a_largest_size(address: str) -> None:
    """Bug: each token's message repeated an id of a megabyte; names of answers had any length, none too; true was echoed as an
    id, as which it equals 1; and every id of a prompt of millions was looked at before its length was, in which time no
    other stream got a token."""

    def body(address: str) -> None:
        client = Client(address)
        good = {"verb": "submit", "prompt": [7], "params": {"max_tokens": 1}}
        for bad, echoed in (
            ({"id": "x" * 129}, "x" * 129),
            ({"id": True}, None),
            ({"id": 1, "request_id": ""}, 1),
            ({"id": 1, "request_id": "x" * 129}, 1),
            ({"id": 1, "request_id": "x" * 129, "verb": "resume"}, 1),
        ):
            client.send(**{**good, **bad})
            error = client.receive()
            assert (error["error"], error["id"]) == ("decode", echoed) and type(error["id"]) is type(echoed)
        client.send(**{**good, "id": 1, "prompt": [-1] * 600})
        error = client.receive()
        assert error["error"] == "request" and "prompt of 600 tokens leaves no room" in error["message"]
        client.send(**good, id="x" * 128, request_id="x" * 128)
        assert until_terminal(client, "x" * 128)[-1]["finish_reason"] == "length"
        client.close()

    assert serve(address, body) == 5


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "max_tokens",
        "stop",
        "regex",
        "json_schema",
        "choice",
        "logit_bias",
        "exit_depths",
        "gate",
        "seed",
    ],
)
def test_deep_values_are_the_requests_error(address: str, name: str) -> None:
    """Bug: 3 kB of nesting ended the frontend. Deeper than the decoder goes it is no message; shallower it is an error of
    its field, or of the engine that has none, and the server goes on either way."""

    def body(address: str) -> None:
        client = Client(address)
        for request_id, (depth, as_map) in enumerate(
            itertools.product((2, 300, 480, 900, 3000, 30_000), (True, False))
        ):
            head = msgpack.packb({"verb": "submit", "id": request_id, "prompt": [5]})
            inner = (b"\x81\xa1a" if as_map else b"\x91") * depth + b"\x01"
            client.socket.send(b"\x84" + head[1:] + msgpack.packb("params") + b"\x81" + msgpack.packb(name) + inner)
            error = client.receive()
            assert error["type"] == "error", (depth, as_map)
            assert error["error"] in ("decode", "request"), (depth, as_map, error)
            assert len(error["message"]) < 400
        assert [m["type"] for m in client.generate([7], max_tokens=1)][-1] == "finished"
        client.close()

    serve(address, body)


def test_ids_belong_to_the_connection(address: str) -> None:
    """Two clients use one id at once and each gets its own tokens; one client may not."""

    def body(address: str) -> None:
        first, second = Client(address), Client(address)
        first.send(verb="submit", id="same", prompt=[1], params={"max_tokens": 200})
        second.send(verb="submit", id="same", prompt=[2], params={"max_tokens": 20})
        first.send(verb="submit", id="same", prompt=[3], params={"max_tokens": 20})
        tokens = [t for m in until_terminal(second, "same") for t in m.get("token_ids", ())]
        assert tokens == [next_token([2], i) for i in range(20)]
        refused, got = None, []
        while refused is None or len(got) < 200:
            message = first.receive()
            if message["type"] == "error":
                refused = message["param"]
            got += message.get("token_ids", [])
        assert refused == "id" and got == [next_token([1], i) for i in range(200)]
        first.close()
        second.close()

    serve(address, body)


def test_client_that_goes_away_frees_the_slot(address: str) -> None:
    def body(address: str) -> None:
        leaver, observer = Client(address), Client(address)
        leaver.send(verb="submit", id=1, prompt=[1], params={"max_tokens": 500})
        leaver.receive()
        assert observer.ask("stats")["values"]["num_requests_running"] == 1
        leaver.close()
        for _ in range(50):
            if observer.ask("stats")["values"]["num_requests_running"] == 0:
                break
            time.sleep(0.01)
        else:
            raise AssertionError("the request of a client that has gone still runs")
        observer.close()

    serve(address, body)


def test_a_client_that_never_reads_counts_as_gone(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: its messages were kept without a limit, until the frontend's memory was full. Its requests are aborted, and others
    are served."""
    monkeypatch.setattr(zmq_api, "MAX_UNREAD", 50)

    def body(address: str, places: RequestLimit) -> None:
        deaf = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 2048), (zmq.LINGER, 0)):
            deaf.setsockopt(option, value)
        deaf.connect(address)
        for number in range(40):
            fields = {"verb": "submit", "id": f"{number}{'x' * 120}", "prompt": [7], "params": {"max_tokens": 500}}
            deaf.send(msgpack.packb(fields))
        client = Client(address)
        while places.in_flight or client.ask("stats")["values"]["prompt_tokens_total"] < 40:
            time.sleep(0.01)
        assert [message["type"] for message in client.generate([7], max_tokens=3)][-1] == "finished"
        client.close()
        deaf.close()

    ended = 'request_success_total{finished_reason="abort",process="frontend"} '
    assert float(limited(address, 100, body).partition(ended)[2].split()[0]) == 40


def test_client_raises_an_error_that_names_no_request(address: str) -> None:
    """Bug: an error with id nil (here a prompt that is no request) was dropped, so that the client waited 30 s for an
    answer that had come at once. Without a limit, as here, it would never return."""

    def body(address: str) -> None:
        client = Client(address, timeout_s=None)
        with pytest.raises(RuntimeError, match="prompt"):
            list(client.generate([2.5], max_tokens=2))  # type: ignore[list-item]
        with pytest.raises(RuntimeError, match="nonsense"):
            client.ask("nonsense")
        client.close()

    assert serve(address, body) == 2


def test_client_skips_late_answers(address: str) -> None:
    """Bug: stats and health have no id, which was a KeyError when one came during a request."""

    def body(address: str) -> None:
        client = Client(address)
        client.send(verb="health")
        client.send(verb="stats")
        assert list(client.generate([7], max_tokens=3))[-1]["finish_reason"] == "length"
        client.close()

    assert serve(address, body) == 0


def test_client_that_gives_up_aborts(address: str) -> None:
    """Bug: a closed iteration left its request running. The server says itself that it was aborted, not finished; and
    a given up request's last messages do not disturb the next one."""

    def body(address: str) -> None:
        client = Client(address)
        messages = client.generate([1], max_tokens=500)
        next(messages)
        messages.close()
        assert until_terminal(client, 0)[-1]["finish_reason"] == "abort"
        messages = client.generate([1], max_tokens=500)
        next(messages)
        messages.close()
        assert list(client.generate([2], max_tokens=3))[-1]["finish_reason"] == "length"
        client.close()

    assert serve(address, body) == 0


def test_client_waits_as_long_as_told(address: str) -> None:
    """Bug: the limit was 30 s, whatever the caller needed. Nobody listens at the address; 0 s must not be 30 s."""
    client = Client(address, timeout_s=0.0)
    with pytest.raises(TimeoutError, match=r"0\.0 s"):
        client.ask("health")
    client.close()


def test_an_answer_is_resumed_on_another_connection(address: str) -> None:
    """``resume`` by another socket, as after the frontend's death: the rest from any token on; beyond the end, and of a
    name that is not kept, an error that names the field. ``submit`` with ``resume`` goes on with what another engine has made."""

    async def main() -> None:
        async with AsyncEngine(quiet=True) as engine:
            engine.keep_answers(60)
            api = ZmqApi(engine, address)
            await asyncio.wait_for(asyncio.to_thread(body), 60)
            await api.close()

    def body() -> None:
        client = Client(address)
        params = {"max_tokens": 30, "logprobs": None, "stop_token_ids": [], "temperature": 0}
        whole = _joined(client.generate([5, 6], **params))
        first = client.generate([5, 6], "mine", **params)
        assert next(first)["type"] == "tokens"
        client.close()  # without an abort, as a process that dies
        other = Client(address)
        assert _joined(other.resume("mine")) == whole
        for after in (1, 17, 30):
            tokens, depths, text, end = _joined(other.resume("mine", after))
            assert (tokens, depths, end) == (whole[0][after:], whole[1][after:], whole[3]) and whole[2].endswith(text)
        for name, after, message in (
            ("mine", 31, "after: 31 is not among the 30"),
            ("mine", -1, "after"),
            ("x", 0, "'x' is kept"),
        ):
            with pytest.raises(RuntimeError, match=message):
                next(other.resume(name, after))
        begun = {"token_ids": whole[0][:9], "exit_depths": whole[1][:9]}
        other.send(verb="submit", id="r", prompt=[5, 6], params=params, resume=begun)
        assert _joined(until_terminal(other, "r"))[:2] == (whole[0][9:], whole[1][9:])
        other.send(verb="submit", id="s", prompt=[5, 6], params=params, resume={**begun, "exit_depths": [1]})
        (refused,) = until_terminal(other, "s")
        assert refused["param"] == "resume" and "9 token_ids with 1 exit_depths" in refused["message"]
        other.close()

    asyncio.run(main())


def _joined(messages: Iterable[dict[str, Any]]) -> tuple[list[int], list[int], str, str]:
    *pieces, last = messages
    tokens = [token for piece in pieces for token in piece["token_ids"]]
    depths = [depth for piece in pieces for depth in piece["exit_depths"]]
    return tokens, depths, "".join(piece["text"] for piece in pieces), last["finish_reason"]
