"""Row "client gone, sequence decodes to max_tokens": a closed socket ends the sequence in every state it can be in.

A pass is not luck: each test first sees the sequence in the state it names, and the fake engine would otherwise make
tokens for minutes. Waits are on conditions, with a limit that only a failure reaches.
"""

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from depthbatch.frontend.tokenizer import Tokenizer
from fakes.http_server import LiveServer

LIMIT_S = 10.0
LONG = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}


@pytest.fixture
def slow(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """One slot, 50 ms a token: 25 s for LONG."""
    with LiveServer(tokenizer, engine={"slots": 1, "step_s": 0.05}) as server:
        yield server


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


def send(server: LiveServer, body: dict, path: str = "/v1/completions") -> socket.socket:
    """A request whose answer is not read."""
    port = int(server.url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def assert_all_free(server: LiveServer) -> None:
    """Nothing holds a slot, waits for one or is counted at the edge; the next request is served at once."""
    wait_until(lambda: not server.engine.running and server.engine.waiting == 0)
    wait_until(lambda: server.service.limit.in_flight == 0)
    made = server.engine.tokens_made
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert answer.status_code == 200
    assert server.engine.tokens_made == made + 2  # the old sequence really is gone


@pytest.mark.parametrize("stream", [True, False])
def test_gone_while_running(slow: LiveServer, stream: bool) -> None:
    """In mid-stream, and with an answer that is not streamed."""
    connection = send(slow, {**LONG, "stream": stream})
    wait_until(lambda: slow.engine.tokens_made >= 2)
    connection.close()
    assert_all_free(slow)
    assert slow.engine.tokens_made < 100


@pytest.mark.parametrize("stream", [True, False])
def test_gone_while_queued(slow: LiveServer, stream: bool) -> None:
    """Behind a request that holds the only slot; the waiting one must leave before that slot is free."""
    first = send(slow, {**LONG, "stream": True})
    wait_until(lambda: len(slow.engine.running) == 1)
    second = send(slow, {**LONG, "stream": stream})
    wait_until(lambda: slow.engine.waiting == 1)
    second.close()
    wait_until(lambda: slow.engine.waiting == 0)
    assert len(slow.engine.running) == 1
    first.close()
    assert_all_free(slow)


@pytest.mark.parametrize("stream", [True, False])
def test_gone_in_prefill(slow: LiveServer, stream: bool) -> None:
    """Holding a slot, before the first token."""
    slow.call(slow.engine.prefill_open.clear)
    connection = send(slow, {**LONG, "stream": stream})
    wait_until(lambda: len(slow.engine.running) == 1)
    connection.close()
    wait_until(lambda: not slow.engine.running)
    slow.call(slow.engine.prefill_open.set)
    assert_all_free(slow)


def test_gone_with_several_choices(tokenizer: Tokenizer) -> None:
    """Every choice of every prompt ends, running or waiting."""
    with LiveServer(tokenizer, engine={"slots": 3, "step_s": 0.05}) as server:
        connection = send(server, {**LONG, "prompt": ["a", "b", "c"], "n": 2, "stream": True})
        wait_until(lambda: len(server.engine.running) == 3 and server.engine.waiting == 3)
        connection.close()
        assert_all_free(server)


def test_gone_with_a_pipelined_request_behind(slow: LiveServer) -> None:
    """A second request on the same connection must not hide that the first one's reader has gone."""
    connection = send(slow, {**LONG, "stream": True})
    wait_until(lambda: slow.engine.tokens_made >= 1)
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    time.sleep(0.05)
    connection.close()
    assert_all_free(slow)


def test_abort_by_name(slow: LiveServer) -> None:
    """Row "abort in an unexpected state crashes": running, waiting, twice and unknown; each answer still comes once,
    and two requests of the same name are both ended, neither gets the other's output."""
    with httpx.Client(base_url=slow.url, timeout=LIMIT_S) as http:
        sockets = [send(slow, {**LONG, "request_id": "mine"}) for _ in range(2)]
        wait_until(lambda: len(slow.engine.running) == 1 and slow.engine.waiting == 1)
        assert http.post("/abort", json={"request_id": ["mine", "unknown"]}).json() == {"aborted": ["mine"]}
        for connection in sockets:
            connection.settimeout(LIMIT_S)
            answer = ""
            while not answer.endswith("}"):
                answer += connection.recv(1 << 16).decode()
            assert answer.startswith("HTTP/1.1 200") and '"finish_reason":"abort"' in answer and '"id":"mine"' in answer
            connection.close()
        assert http.post("/abort", json={"request_id": "mine"}).json() == {"aborted": []}
    assert_all_free(slow)


def test_streams_of_one_name_keep_their_outputs(live: LiveServer) -> None:
    """Row "same client request id twice swaps outputs"."""
    import concurrent.futures

    def ask(seed: int) -> str:
        body = {"prompt": "x", "max_tokens": 30, "seed": seed, "request_id": "same"}
        return httpx.post(live.url + "/v1/completions", json=body).json()["choices"][0]["text"]

    alone = [ask(seed) for seed in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone
    assert len(set(alone)) == 6


def test_random_ends_leave_nothing(tokenizer: Tokenizer) -> None:
    """Row "abort leaks KV or slots", at the edge: 400 requests that finish, are closed, aborted by name (twice), time
    out or fail, in random order and all states; afterwards nothing is held anywhere."""
    draw = random.Random(4)

    async def one(url: str, http: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": "x" * draw.randint(1, 20), "n": draw.choice([1, 1, 3]), "max_tokens": draw.randint(1, 30)}
        body |= {"stream": draw.random() < 0.5, "request_id": f"r{number % 7}", "ignore_eos": True}
        kind = draw.choice(["finish", "close", "abort", "timeout"])
        if kind == "timeout":
            body["timeout_s"] = draw.uniform(0.001, 0.1)
        asking = asyncio.create_task(http.post(url + "/v1/completions", json=body))
        await asyncio.sleep(draw.uniform(0, 0.05))
        if kind == "close":
            asking.cancel()
        elif kind == "abort":
            for _ in range(2):
                await http.post(url + "/abort", json={"request_id": body["request_id"]})
        answers = await asyncio.gather(asking, return_exceptions=True)
        if kind != "close":
            assert answers[0].status_code in (200, 504), answers[0].text

    async def run(url: str) -> None:
        places = asyncio.Semaphore(40)
        limits = httpx.Limits(max_connections=100, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as http:

            async def placed(number: int) -> None:
                async with places:
                    await one(url, http, number)

            await asyncio.gather(*map(placed, range(400)))

    with LiveServer(tokenizer, engine={"slots": 4, "step_s": 0.001}) as server:
        asyncio.run(run(server.url))
        assert_all_free(server)
        assert not server.engine.known
