"""One HTTP connection: uvicorn's httptools protocol with limits on the size of heads, on the time that heads and bodies
take, and on how many connections there are. What is refused here is answered as JSON, and the connection ends.
"""

import os
import resource
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from depthbatch.common.logging import SparseLog, get_logger
from depthbatch.frontend.http.error_answers import ApiError, overloaded

HEAD_S = 30.0  # from the start of a connection, or a head's first byte, to the end of the head
BODY_WINDOW_S = 20.0  # a body that is not whole has to bring
BODY_WINDOW_BYTES = 16 << 10  # so many bytes in each of these
MAX_BACKLOG = 4096
LINGER_S = 2.0  # a refused client may take to read its answer and close

log = get_logger("http")


class Descriptors(NamedTuple):
    """What file descriptors of this process are for."""

    connections: int  # that are served
    refused: int  # connections that are being told so
    backlog: int  # connections that may wait to be accepted: the loop takes all of them before it closes one


def plan_descriptors() -> Descriptors:
    """Of those that the process may have beside its open ones, an eighth is left to refusals and to all else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 30
    spare = max(96, limit // 8)
    used = len(os.listdir("/proc/self/fd"))
    return Descriptors(max(1, limit - used - spare), spare // 4, min(MAX_BACKLOG, spare // 2))


class ConnectionLimits:
    """What all connections of a server share."""

    def __init__(self, max_header_bytes: int) -> None:
        self.max_header_bytes = max_header_bytes
        self.descriptors = plan_descriptors()
        self.crowd_log = SparseLog(log)
        self.malformed_log = SparseLog(log)
        self.slow_log = SparseLog(log)


def bounded_protocol(limits: ConnectionLimits) -> type["BoundedProtocol"]:
    """The class of connections under ``limits``."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})


class BoundedProtocol(HttpToolsProtocol):
    """See the module docstring. Disconnects are told to pipelined requests too.

    A request that asks for another protocol is answered as if it had not: the parser takes what follows its head for that
    protocol, so what follows goes to a parser that has seen the head without the question."""

    limits: ConnectionLimits
    _head_bytes = 0
    _unfinished_bytes = 0
    _in_head = True
    _head_ended = False
    _head_s: float | None = None  # the loop's time when a head began that has not ended
    _begun = False  # something of that head has come
    _window_s = 0.0  # the loop's time when a body's window began
    _window_bytes = 0
    _refused_s: float | None = None
    _active: RequestResponseCycle | None = None
    _again = False  # the parser sees a head for the second time

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_s = self.loop.time()
        count, (most, refused, _) = len(self.connections), self.limits.descriptors
        if count > most:
            self.limits.crowd_log.warning("more than %d connections, as descriptors allow: refused with 503", most)
            refusal = overloaded(f"the server has {most} connections, which is all that it can have")
            self._refuse(refusal, linger=count <= most + refused)

    def on_message_begin(self) -> None:
        if not self._again:
            self._head_bytes = 0
            self._in_head = self._begun = True
            self._head_s = self._head_s or self.loop.time()
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._again:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._again:
            self._count(len(name) + len(value))
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._again:
            self._in_head = self._begun = False
            self._head_ended = True
            self._head_s = None
            self._window_s, self._window_bytes = self.loop.time(), 0
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._window_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return  # of the head alone
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data and self._refused_s is None and not self.transport.is_closing():
            if self._in_head and self._head_s is None:  # before any byte of a head there may be empty lines
                self._head_s = self.loop.time()
            data = self._feed(data)

    def _feed(self, data: bytes) -> bytes:
        """Parses; what it returns is for the next parser."""
        was_in_head, self._head_ended = self._in_head, False
        rest = b""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            if self.parser.get_method() == b"CONNECT":
                self.transport.close()
                return b""
            rest = data[stopped.args[0] :]
            self._start_parser_again()
        except httptools.HttpParserError as error:
            self._refuse_malformed(error)
            return b""
        if self._head_ended or not self._in_head:
            self._unfinished_bytes = 0
        elif was_in_head:  # a header is not told by the parser, hence not counted, until it is complete
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > self.limits.max_header_bytes:
                self._refuse_large_head()
        return rest

    def _start_parser_again(self) -> None:
        head = _without_upgrade(self.parser.get_method(), self.parser.get_http_version(), self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._again = True
        self.parser.feed_data(head)
        self._again = False

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limits.max_header_bytes:
            raise httptools.HttpParserError("request head too large")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: object) -> None:
        self._active = cycle
        if cycle.scope["http_version"] == "1.0":
            _end_with_connection(cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self._tell_disconnect()
        super().connection_lost(exc)

    # --- refusals

    def sweep(self, now_s: float) -> None:
        """Called now and then: ends what has taken too long. ``now_s``: the loop's time."""
        if self.transport.is_closing():
            return
        if self._refused_s is not None:
            if now_s - self._refused_s > LINGER_S:
                self.transport.close()
        elif self._in_head:
            self._sweep_head(now_s)
        else:
            self._sweep_body(now_s)

    def _sweep_head(self, now_s: float) -> None:
        if self._head_s is None:
            return  # the keep-alive timer is uvicorn's
        if self._active is not None and not self._active.response_complete:
            self._head_s = now_s  # the next request's; it may be waiting for us
        elif now_s - self._head_s > HEAD_S:
            if self._begun:
                self._refuse_slow(f"the request head did not come within {HEAD_S:g} s")
            else:
                self.transport.close()

    def _sweep_body(self, now_s: float) -> None:
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:  # it waits for us
            self._window_s, self._window_bytes = now_s, 0
        elif now_s - self._window_s > BODY_WINDOW_S:
            if self._window_bytes < BODY_WINDOW_BYTES:
                self._refuse_slow(f"less than {BODY_WINDOW_BYTES} bytes of the body came within {BODY_WINDOW_S:g} s")
            self._window_s, self._window_bytes = now_s, 0

    def _refuse_slow(self, message: str) -> None:
        self.limits.slow_log.warning("408: %s", message)
        self._refuse(ApiError(408, message, code="request_timeout"))

    def _refuse_malformed(self, error: httptools.HttpParserError) -> None:
        if self._head_bytes > self.limits.max_header_bytes:
            self._refuse_large_head()
            return
        of_us = isinstance(error, httptools.HttpParserCallbackError)  # the parser's own words say nothing then
        reason = "its request line cannot be read" if of_us else str(error)
        self.limits.malformed_log.warning("400: malformed HTTP: %s", reason)
        self._refuse(ApiError(400, f"the request is not valid HTTP: {reason}", code="invalid_http"))

    def _refuse_large_head(self) -> None:
        self._refuse(ApiError(431, f"the request head is larger than {self.limits.max_header_bytes} bytes"))

    def _refuse(self, error: ApiError, linger: bool = True) -> None:
        """Answers in place of the application. ``linger``: the client gets time to read that, since closing a socket with
        unread bytes in it takes back what was sent last."""
        self._refused_s = self.loop.time()
        if self._active is not None and not self._active.response_complete:
            other = self._active is not self.cycle or not self._active.more_body
            if self._active.response_started or other:  # an answer would be read as that one's
                self.transport.abort()
                return
            self._tell_disconnect()
        self.transport.write(_bytes_of(error))
        if linger and self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _tell_disconnect(self) -> None:
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()


def _bytes_of(error: ApiError) -> bytes:
    """A whole answer."""
    response = error.response()
    status = HTTPStatus(error.status)
    lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
    lines += [b"%s: %s" % header for header in (*response.raw_headers, (b"connection", b"close"))]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: a body whose length is not told ends where its connection does."""
    send, framed = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        nonlocal framed
        if message["type"] == "http.response.start":
            framed = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if framed else False
        elif not framed:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn holds the two against each other
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]


def _without_upgrade(method: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A request head that frames its body as these headers do, and asks for no other protocol."""
    lines = [b"%s / HTTP/%s" % (method, version.encode())]
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(token for part in value.split(b",") if (token := part.strip()).lower() != b"upgrade")
        if name != b"upgrade":
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"", b""])
