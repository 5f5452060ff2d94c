"""Clients of a load generator: ``/v1/completions`` with server-sent events, and the native ZMQ API (docs/zmq-api.md).

HTTP is a small streaming client of its own: one POST a connection, no pool, no redirects, no compression; http and https.
httpx took 1.6 to 1.9 times the processor time an event, and client and server often share the cores that are measured.
"""

import asyncio
import itertools
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgpack
import zmq
import zmq.asyncio

from depthbatch.benchmarks.workload import WorkloadRequest
from depthbatch.common.errors import ConfigError

_MAX_LINE_BYTES = 1 << 20
ANSWER_S = 10  # of a server that is there


class ServerError(Exception):
    """The server answered with an error, or with something that is no answer; the message says what it said."""


class Piece(NamedTuple):
    """Tokens of a request that came together."""

    tokens: int  # 0 where the server does not say
    total: int | None = None  # of the whole request; such a piece carries no token of its own


class Client(Protocol):
    """One server, many requests at a time."""

    def stream(self, request: WorkloadRequest, prompt: list[int]) -> AsyncIterator[Piece]:
        """Sends a request and yields its pieces as they come. Raises ServerError or OSError."""
        ...

    async def close(self) -> None: ...


class Endpoint:
    """A server's address and the headers that every request carries."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises ConfigError for a URL that is not http or https."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:  # of a port, or of brackets
            raise ConfigError(f"url {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url {url!r}: not an http or https address")
        self.host, self.port = parts.hostname, port
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {self.host}:{self.port}\r\nConnection: close\r\nAccept-Encoding: identity\r\n"
        if api_key is not None:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def get_json(self, path: str) -> Any:
        """The answer to a GET. Raises ServerError or OSError."""
        return json.loads(await self.get_text(path))

    async def get_text(self, path: str) -> str:
        """The same as it came, but for its line ends."""
        return b"\n".join([line async for line in self._exchange("GET", path, b"")]).decode()

    async def post_lines(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Lines of the answer to a POST of JSON. Raises ServerError or OSError."""
        async for line in self._exchange("POST", path, json.dumps(body).encode()):
            yield line

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self._ssl, limit=_MAX_LINE_BYTES)
        try:
            head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            status, headers = await _read_head(reader)
            chunks = _chunks(reader, headers)
            if status != 200:
                text = b"".join([chunk async for chunk in chunks]).decode("utf-8", "replace")
                raise ServerError(f"HTTP {status}: {text[:300]}")
            async for line in _lines(chunks):
                yield line
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status_line = (await reader.readline()).decode("latin-1").split()
    if len(status_line) < 2 or not status_line[0].startswith("HTTP/") or not status_line[1].isdecimal():
        raise ServerError("the answer is not HTTP")
    headers = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip().lower()
    return int(status_line[1]), headers


async def _chunks(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body's bytes as they come, without their framing."""
    try:
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readline()).split(b";")[0], 16):
                yield await reader.readexactly(size)
                await reader.readexactly(2)
        elif "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while data := await reader.read(1 << 16):
                yield data
    except (ValueError, asyncio.IncompleteReadError):
        raise ServerError("the answer was cut off") from None


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


class OpenAIClient:
    """``/v1/completions`` with server-sent events."""

    def __init__(self, endpoint: Endpoint, model: str, extra: dict[str, Any]) -> None:
        self._endpoint = endpoint
        self._model = model
        self._extra = extra

    async def stream(self, request: WorkloadRequest, prompt: list[int]) -> AsyncIterator[Piece]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | self._extra
        async for line in self._endpoint.post_lines("/v1/completions", body):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ServerError(str(event["error"])[:300])
            if event.get("choices"):
                yield Piece(tokens=0)
            if usage := event.get("usage"):
                yield Piece(tokens=0, total=int(usage["completion_tokens"]))

    async def close(self) -> None:
        """Connections are closed one by one."""


class NativeClient:
    """One DEALER; a task hands every message to the request it belongs to."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for what is no address."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ConfigError(f"url {address!r}: not http or https, nor an address of zmq ({error.strerror})") from None
        self._ids = itertools.count()
        self._inboxes: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._receiver: asyncio.Task[None] | None = None

    async def wait_for_server(self) -> None:
        """Before the first request. Raises ServerError where nobody answers: zmq would wait for ever."""
        await self._socket.send(msgpack.packb({"verb": "health"}))
        if not await self._socket.poll(1000 * ANSWER_S):
            raise ServerError(f"no answer within {ANSWER_S} s")
        await self._socket.recv()

    async def stream(self, request: WorkloadRequest, prompt: list[int]) -> AsyncIterator[Piece]:
        """Sends a request and yields its pieces. Raises ServerError on an error message."""
        if self._receiver is None:
            self._receiver = asyncio.create_task(self._receive())
        request_id = next(self._ids)
        inbox = self._inboxes[request_id] = asyncio.Queue()
        params: dict[str, Any] = {"max_tokens": request.output_tokens, "temperature": 0.0, "ignore_eos": True}
        if request.exit_depths is not None:
            params["exit_depths"] = list(request.exit_depths)
        await self._socket.send(msgpack.packb({"verb": "submit", "id": request_id, "prompt": prompt, "params": params}))
        try:
            while True:
                message = await inbox.get()
                if message["type"] == "tokens":
                    yield Piece(len(message["token_ids"]))
                elif message["type"] == "finished":
                    return
                else:
                    raise ServerError(str(message.get("message", message)))
        finally:
            del self._inboxes[request_id]

    async def _receive(self) -> None:
        while True:
            message = msgpack.unpackb(await self._socket.recv())
            inbox = self._inboxes.get(message.get("id"))
            if inbox is not None:
                inbox.put_nowait(message)

    async def close(self) -> None:
        if self._receiver is not None:
            self._receiver.cancel()
        self._socket.close()
        self._context.term()
