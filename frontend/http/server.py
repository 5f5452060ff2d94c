"""uvicorn around the application: the socket, bounded request heads, SIGTERM that drains. Knows no routes."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from depthbatch.common.errors import ConfigError
from depthbatch.common.logging import get_logger
from depthbatch.frontend.background import OnFailure, background, failure_of
from depthbatch.frontend.http.errors import ApiError
from depthbatch.frontend.http.service import Service
from depthbatch.frontend.http.settings import DRAIN_NOTICE, HttpConfig

log = get_logger("http")

BACKLOG = 4096
ACCEPTS_PER_TURN = 16  # of the event loop; libuv takes one for each listening socket that it knows
ABORT_GRACE_S = 3.0  # from the abort of everything to the end of the last answer


def bind(config: HttpConfig) -> socket.socket:
    """The listening socket; raises ConfigError at once when the port is taken. Done before any model is loaded."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {config.host}: {error.strerror}") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {os.strerror(error.errno or 0)}") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """``http://host:port``, reachable from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def bounded_protocol(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """uvicorn's httptools protocol with a limit on the request head, and disconnects told to pipelined requests too."""

    class BoundedProtocol(HttpToolsProtocol):
        _head_bytes = 0
        _unfinished_bytes = 0
        _in_head = True
        _head_ended = False
        _active: RequestResponseCycle | None = None

        def on_message_begin(self) -> None:
            self._head_bytes = 0
            self._in_head = True
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value))
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_ended = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head = True
            self._head_bytes = 0
            super().on_message_complete()

        def data_received(self, data: bytes) -> None:
            was_in_head, self._head_ended = self._in_head, False
            super().data_received(data)
            if self._head_ended or not self._in_head:
                self._unfinished_bytes = 0
            elif was_in_head:  # a header is not told by the parser, hence not counted, until it is complete
                self._unfinished_bytes += len(data)
                if self._unfinished_bytes > max_header_bytes and not self.transport.is_closing():
                    self._head_bytes = self._unfinished_bytes
                    self.send_400_response("")

        def send_400_response(self, msg: str) -> None:
            if self._head_bytes <= max_header_bytes:
                super().send_400_response(msg)
                return
            body = ApiError(431, f"the request head is larger than {max_header_bytes} bytes").response().body
            head = f"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

        def _count(self, size: int) -> None:
            self._head_bytes += size
            if self._head_bytes > max_header_bytes:
                raise httptools.HttpParserError("request head too large")

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: object) -> None:
            self._active = cycle
            super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

        def connection_lost(self, exc: Exception | None) -> None:
            if self._active is not None and not self._active.response_complete:
                self._active.disconnected = True
                self._active.message_event.set()
            super().connection_lost(exc)

    return BoundedProtocol


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT: then no new work, running answers finish; a second signal aborts them. DRAIN_NOTICE
    only says that the first is on its way.

    ``service`` is set once there is one; before that a signal ends the server at once. ``on_failure`` hears of a drain
    or an abort that has failed; by default the server then ends.
    """

    def __init__(self, app: ASGIApp, config: HttpConfig, on_failure: OnFailure | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=bounded_protocol(config.max_header_bytes),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(ABORT_GRACE_S),
            )
        )
        self.service: Service | None = None
        self.url = ""
        self._on_failure = on_failure or self._leave_after
        self._drain_s = config.drain_s
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours instead of uvicorn's, which would stop listening at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # embedded: whoever owns the process owns its signals
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        loop.add_signal_handler(DRAIN_NOTICE, self.on_drain_notice)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            loop.remove_signal_handler(DRAIN_NOTICE)
            signal.signal(DRAIN_NOTICE, signal.SIG_IGN)  # by default it would end the process before its work is done

    def leave(self) -> None:
        """Stops listening and ends once open answers are complete."""
        self.should_exit = True

    def _leave_after(self, name: str, error: BaseException) -> None:
        failure_of(name, error)
        self.leave()

    def on_drain_notice(self) -> None:
        """No new work from now on. Not counted as a signal: the SIGTERM that follows is the first."""
        if self.service is not None:
            self.service.admission.drain()

    def on_signal(self) -> None:
        """First: drain. Second: abort what runs. Third: leave."""
        self._signals += 1
        if self.service is None:
            self.leave()
        elif self._signals == 1:
            self.service.admission.drain()
            self._start(self._drain(self.service), "drain")
        elif self._signals == 2:
            log.warning("second signal: aborting %d sequences", self.service.admission.in_flight)
            self._start(self._abort(self.service), "abort")
        else:
            self.force_exit = True
            self.leave()

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = background(work, name, self._on_failure)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, service: Service) -> None:
        log.info("draining %d sequences, at most %g s", service.admission.in_flight, self._drain_s)
        try:
            async with asyncio.timeout(self._drain_s):
                await service.admission.idle.wait()
        except TimeoutError:
            log.warning("drain deadline: aborting %d sequences", service.admission.in_flight)
            await self._abort(service)
        self.leave()

    async def _abort(self, service: Service) -> None:
        await service.registry.abort_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_GRACE_S):
                await service.admission.idle.wait()
        self.leave()


async def serve(server: Server, listener: socket.socket) -> None:
    """Runs until drained; ``server.url`` is the address."""
    server.url = url_of(listener)
    await server.serve([listener, *(listener.dup() for _ in range(ACCEPTS_PER_TURN - 1))])
