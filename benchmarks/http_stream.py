"""A small streaming HTTP/1.1 client on asyncio: one POST a connection, lines of the answer as they come.

Just what a load generator needs: no pool, no redirects, no compression; http and https.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from depthbatch.common.errors import ConfigError

_MAX_LINE_BYTES = 1 << 20


class ServerError(Exception):
    """The server answered with an error, or with something that is no answer; the message says what it said."""


class Piece(NamedTuple):
    """Tokens of a request that came together."""

    tokens: int  # 0 where the server does not say
    total: int | None = None  # of the whole request; such a piece carries no token of its own


class Endpoint:
    """A server's address and the headers that every request carries."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises ConfigError for a URL that is not http or https."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url {url!r}: not an http or https address")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {self.host}:{self.port}\r\nConnection: close\r\nAccept-Encoding: identity\r\n"
        if api_key is not None:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def get_json(self, path: str) -> Any:
        """The answer to a GET. Raises ServerError or OSError."""
        body = b"".join([line async for line in self._exchange("GET", path, b"")])
        return json.loads(body)

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
