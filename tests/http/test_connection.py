"""Limits of one connection: time, number, and what is no HTTP. The clock of the protocol is the test's."""

import asyncio
import functools
import json
import logging
import resource
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from depthbatch.common.logging import SparseLog
from depthbatch.frontend.http import connection, server
from depthbatch.frontend.http.connection import (
    BODY_WINDOW_BYTES,
    BODY_WINDOW_S,
    HEAD_S,
    LINGER_S,
    BoundedProtocol,
    ConnectionLimits,
    bounded_protocol,
)
from depthbatch.frontend.tokenizer import Tokenizer
from fakes.http_server import LiveServer

LIMIT_S = 20.0
HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
SHORT = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**values: Any) -> None:
        asyncio.run(test(**values))

    return run


class Wire(asyncio.Transport):
    """What the protocol writes; ``ended`` once nothing more is."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.written, self.ended, self.closed = b"", False, False

    def write(self, data: Any) -> None:
        assert not self.ended
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Peer:
    """A connection whose application reads the body and says how long it was, unless ``held``."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.held: asyncio.Event | None = None
        self.left: list[str] = []
        real = asyncio.get_running_loop()
        loop: Any = SimpleNamespace(
            time=lambda: self.now_s, create_task=real.create_task, call_later=lambda *_: SimpleNamespace(cancel=int)
        )
        config = uvicorn.Config(self.app, interface="asgi3", log_config=None, access_log=False)
        kind = bounded_protocol(ConnectionLimits(8192))
        self.protocol: BoundedProtocol = kind(config, ServerState(), {}, loop)
        self.wire = Wire()
        self.protocol.connection_made(self.wire)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        length, more = 0, True
        while more:
            if self.held is not None:
                await self.held.wait()
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(scope["path"])
                return
            length, more = length + len(message["body"]), message["more_body"]
        body = str(length).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def after(self, seconds: float, data: bytes = b"") -> "Peer":
        """Time goes by, with a sweep every second, then data come."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.protocol.sweep(self.now_s)
            await asyncio.sleep(0)
        if data:
            self.protocol.data_received(data)
        for _ in range(5):
            await asyncio.sleep(0)
        return self

    def refused(self, status: int, code: str) -> bool:
        head, _, body = self.wire.written.rpartition(b"\r\n\r\n")
        error = json.loads(body)["error"] if self.wire.ended and body else {}
        return head.rpartition(b"HTTP/1.1 ")[2].startswith(b"%d " % status) and error.get("code") == code


@in_loop
async def test_a_head_has_its_time() -> None:
    """A head that never ends, however busily it grows, is answered 408; a connection that says nothing, or nothing but
    empty lines, is closed. Before, each kept its descriptor for ever."""
    peer = Peer()
    await peer.after(0, b"GET / HTTP/1.1\r\n")
    for number in range(int(HEAD_S) - 1):
        await peer.after(1, b"x-%d: y\r\n" % number)
    assert not peer.wire.ended
    await peer.after(2)
    assert peer.refused(408, "request_timeout") and not peer.wire.closed
    await peer.after(LINGER_S + 1, b"ignored")
    assert peer.wire.closed
    for data in (b"", b"\r\n"):
        peer = Peer()
        for _ in range(int(HEAD_S) + 1):
            await peer.after(1, data)
        assert peer.wire.closed and not peer.wire.written


@in_loop
async def test_a_later_head_has_its_time() -> None:
    """Of a connection that has been served; in between it may be idle as long as uvicorn's timer lets it, and while an
    answer is awaited, the next head waits, too."""
    peer = Peer()
    await peer.after(0, SHORT + b"{}")
    await peer.after(HEAD_S + 5)
    assert b"200" in peer.wire.written and not peer.wire.ended
    idle = await Peer().after(0, SHORT + b"{}")
    for _ in range(int(HEAD_S) + 2):
        await idle.after(1, b"\r\n")  # each of which ends the idle timer
    assert idle.wire.closed and idle.wire.written.count(b"HTTP/1.1") == 1
    peer.held = asyncio.Event()
    await peer.after(0, SHORT + b"{}GET /y HTTP")
    await peer.after(HEAD_S + 5)
    assert not peer.wire.ended
    peer.held.set()
    await peer.after(2)
    assert peer.wire.written.count(b"HTTP/1.1 200") == 2 and not peer.wire.ended
    await peer.after(HEAD_S + 1)
    assert peer.refused(408, "request_timeout")


@in_loop
async def test_a_body_has_its_time() -> None:
    """One that stops or trickles is answered 408 and the application is told; one that comes slowly but steadily is read."""
    for trickle in (b"", b"x", b"x" * (BODY_WINDOW_BYTES // int(BODY_WINDOW_S) - 100)):
        peer = await Peer().after(0, HEAD + b"{")
        for _ in range(int(BODY_WINDOW_S) + 2):
            await peer.after(1, trickle)
        assert peer.refused(408, "request_timeout") and peer.left == ["/x"]
    peer = await Peer().after(0, HEAD)
    for _ in range(50):
        await peer.after(1, b"x" * 2000)
    assert peer.wire.written.endswith(b"100000") and not peer.wire.ended


@in_loop
async def test_a_body_that_waits_for_us_is_not_late() -> None:
    """Nothing more is read of it while the application is busy, or before it has asked for it."""
    peer = Peer()
    peer.held = asyncio.Event()
    await peer.after(0, HEAD + b"x" * 70_000)  # over uvicorn's high-water mark: reading pauses
    await peer.after(3 * BODY_WINDOW_S)
    peer.held.set()
    await peer.after(1, b"x" * 30_000)
    assert peer.wire.written.endswith(b"100000") and not peer.wire.ended
    peer = Peer()
    peer.held = asyncio.Event()
    await peer.after(0, SHORT.replace(b"Host", b"Expect: 100-continue\r\nHost"))
    await peer.after(3 * BODY_WINDOW_S)
    assert not peer.wire.ended


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
@in_loop
async def test_malformed_http_is_answered_as_json(data: bytes) -> None:
    """In the shape of every other error, a bad chunk of a body included. Before: a line of plain text."""
    peer = await Peer().after(0, data)
    assert peer.refused(400, "invalid_http"), peer.wire.written
    head = peer.wire.written.partition(b"\r\n\r\n")[0].lower()
    assert b"content-type: application/json" in head and b"connection: close" in head


@in_loop
async def test_nothing_is_written_into_an_answer() -> None:
    """Bug: what was malformed behind a request got its 400 before, or in the middle of, the answer to that request."""
    peer = Peer()
    peer.held = asyncio.Event()
    await peer.after(0, SHORT + b"{}")
    await peer.after(0, b"nonsense\r\n\r\n")
    assert peer.wire.closed and not peer.wire.written


def test_a_million_warnings_are_few_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first at once, then one a minute that tells how many there were."""
    clock = [100.0]
    monkeypatch.setattr("depthbatch.common.logging.time.monotonic", lambda: clock[0])
    sparse = SparseLog(logging.getLogger("depthbatch.test"))
    for _ in range(1000):
        sparse.warning("refused: %s", "x")
    clock[0] += 61
    sparse.warning("refused: %s", "y")
    assert caplog.messages == ["refused: x", "refused: y (and 999 more before)"]


@pytest.fixture(scope="module")
def small(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with LiveServer(tokenizer, access_log="on") as small:
        yield small


def test_slow_clients_of_a_server(small: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loop sweeps, and the engine has nothing left of the request."""
    monkeypatch.setattr(server, "TICKS_PER_SWEEP", 1)
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    monkeypatch.setattr(connection, "BODY_WINDOW_S", 0.2)
    for data in (b"GET /ver", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"):
        with _connected(small) as client:
            client.sendall(data)
            answer = _all_of(client)
            assert (
                answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b'"type":"invalid_request_error"' in answer
            )
    assert small.service.limit.in_flight == 0


def test_connections_beyond_the_descriptors(small: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    """Each gets 503 with Retry-After, all together one line of the log; those that were there first go on, and there is
    room again when they leave. Before: libuv closed them without a word, or the accept failed without end."""
    limits = small.server.connection_limits
    limits.descriptors = limits.descriptors._replace(connections=3)
    kept = [_connected(small) for _ in range(3)]
    try:
        for client in kept:
            client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        for _ in range(50):
            with _connected(small) as client:
                answer = _all_of(client)
                assert answer.startswith(b"HTTP/1.1 503") and b"\r\nretry-after: 1\r\n" in answer
                assert b'"code":"overloaded"' in answer
        assert len([text for text in caplog.messages if "more than 3 connections" in text]) == 1
        kept[0].sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept[0].recv(100)
        kept.pop().close()
        for _ in range(100):
            if httpx.get(small.url + "/version").status_code == 200:
                break
        else:
            pytest.fail("the place did not come back")
    finally:
        limits.descriptors = connection.plan_descriptors()
        for client in kept:
            client.close()


def test_how_many_connections_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than descriptors: the process has others, and needs some. What waits to be accepted is accepted at once."""
    for limit in (20, 1024, 65536, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        plan = connection.plan_descriptors()
        if limit > 1000:
            assert 0.6 * limit < plan.connections and sum(plan) + 3 <= limit
        assert plan.connections >= 1 and 48 <= plan.backlog <= 4096


def test_access_log(small: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    """A line for each request with method, path, status and seconds, whoever answers it; no prompt, no query, no key."""
    caplog.set_level(logging.INFO, "depthbatch.access")
    body = {"prompt": "secret", "max_tokens": 2, "stream": True}
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=small.url, timeout=LIMIT_S) as client:
        client.post("/v1/completions?key=secret", json=body, headers=headers)
        client.post("/v1/completions", json={"prompt": 5})
        client.get("/nowhere%0Aat all")
        client.get("/health")
    for _ in range(500):  # a line is written when the answer has been sent
        lines = [record.getMessage() for record in caplog.records if record.name == "depthbatch.access"]
        if len(lines) >= 4:
            break
        time.sleep(0.01)
    assert sorted(line.rsplit(" ", 2)[0] for line in lines) == [
        "GET /health 200",
        "GET /nowhere%0Aat%20all 404",
        "POST /v1/completions 200",
        "POST /v1/completions 400",
    ]
    assert all(float(line.split()[3]) >= 0 and line.endswith(" s") for line in lines)
    assert "secret" not in caplog.text.replace("max_tokens", "")


def test_no_access_log_by_default(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "depthbatch.access")
    assert httpx.get(live.url + "/version").status_code == 200
    assert not [record for record in caplog.records if record.name == "depthbatch.access"]


def _connected(live: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(live.url.rsplit(":", 1)[1])), timeout=LIMIT_S)


def _all_of(client: socket.socket) -> bytes:
    answer = b""
    while data := client.recv(65536):
        answer += data
    return answer
