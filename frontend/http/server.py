"""The frontend program: uvicorn with bounded connections and a SIGTERM that drains. It listens at once, answers probes
while the engine loads, then serves it until drained. Knows no routes.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from typing import Any

import uvicorn
import uvloop
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from depthbatch.common.errors import ConfigError, DepthbatchError
from depthbatch.common.logging import get_logger
from depthbatch.common.os_process import tune_garbage_collection
from depthbatch.common.transport import API_ENDPOINT, endpoint
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.background import OnFailure, background, catch_the_rest, failure_of
from depthbatch.frontend.http.access_log import AccessLog
from depthbatch.frontend.http.app import create_app
from depthbatch.frontend.http.connection import ConnectionLimits, bounded_protocol, plan_descriptors
from depthbatch.frontend.http.error_answers import overloaded
from depthbatch.frontend.http.generation import Service
from depthbatch.frontend.http.operations import EngineProbe
from depthbatch.frontend.http.page import loading_page
from depthbatch.frontend.http.settings import HttpConfig
from depthbatch.frontend.http.texts import Texts
from depthbatch.frontend.loading_progress import share_of
from depthbatch.frontend.siblings import SharedMetrics, Siblings
from depthbatch.frontend.zmq_api import ZmqApi

log = get_logger("http")

ACCEPTS_PER_TURN = 16  # of the event loop; libuv takes one for each listening socket that it knows
TICKS_PER_SWEEP = 10
ABORT_GRACE_S = 3.0  # from the abort of everything to the end of the last answer


def bind(config: HttpConfig, shared: bool = False) -> socket.socket:
    """The listening socket; raises ConfigError at once when the port is taken. Done before any model is loaded. ``shared``:
    with others that say so, too; the kernel deals connections out."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {config.host}: {error.strerror}") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
        listener.listen(plan_descriptors().backlog)
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


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT: then no new work, running answers finish; a second signal aborts them.

    ``service`` is set once there is one; before that a signal ends the server at once. ``on_failure`` hears of a drain
    or an abort that has failed; by default the server then ends.
    """

    def __init__(self, app: ASGIApp, config: HttpConfig, on_failure: OnFailure | None = None) -> None:
        self.connection_limits = ConnectionLimits(config.max_header_bytes)
        super().__init__(
            uvicorn.Config(
                AccessLog(app) if config.access_log == "on" else app,
                loop="uvloop",
                http=bounded_protocol(self.connection_limits),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=self.connection_limits.descriptors.backlog,
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

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn every 0.1 s."""
        if counter % TICKS_PER_SWEEP == 0:
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                connection.sweep(now_s)  # type: ignore[union-attr]
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours instead of uvicorn's, which would stop listening at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # embedded: whoever owns the process owns its signals
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        """Stops listening and ends once open answers are complete."""
        self.should_exit = True

    def _leave_after(self, name: str, error: BaseException) -> None:
        failure_of(name, error)
        self.leave()

    def on_signal(self) -> None:
        """First: drain. Second: abort what runs. Third: leave."""
        self._signals += 1
        if self.service is None:
            self.leave()
        elif self._signals == 1:
            self.service.limit.drain()
            self._start(self._drain(self.service), "drain")
        elif self._signals == 2:
            log.warning("second signal: aborting %d sequences", self.service.limit.in_flight)
            self._start(self._abort(self.service), "abort")
        else:
            self.force_exit = True
            self.leave()

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = background(work, name, self._on_failure)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, service: Service) -> None:
        log.info("draining %d sequences, at most %g s", service.limit.in_flight, self._drain_s)
        try:
            async with asyncio.timeout(self._drain_s):
                await service.limit.idle.wait()
        except TimeoutError:
            log.warning("drain deadline: aborting %d sequences", service.limit.in_flight)
            await self._abort(service)
        self.leave()

    async def _abort(self, service: Service) -> None:
        await service.engine.abort_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_GRACE_S):
                await service.limit.idle.wait()
        self.leave()


async def serve(server: Server, listener: socket.socket) -> None:
    """Runs until drained; ``server.url`` is the address."""
    server.url = url_of(listener)
    await server.serve([listener, *(listener.dup() for _ in range(ACCEPTS_PER_TURN - 1))])


class LateApp:
    """Answers probes with "starting" until the application exists, so that a slow load is not a silent port; a browser that
    asks for the page gets one that says how far it is."""

    def __init__(
        self, health: Callable[[], dict[str, Any]], loaded: Callable[[], tuple[int, int]], page: bool = True
    ) -> None:
        """``loaded``: bytes of the weights that are read, and of how many."""
        self.app: ASGIApp | None = None
        self._health = health
        self._loaded = loaded
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            done, total = self._loaded()
            message = f"the model is loading: {share_of(done, total)}" if total else "the model is loading"
            response: Response = overloaded(message, retry_after_s=5).response()
            if self._page and scope["path"] == "/" and "text/html" in Headers(scope=scope).get("accept", ""):
                response = loading_page(message, done, total)
            elif scope["path"] == "/health":
                response = JSONResponse(self._health(), 503)
            elif scope["path"] == "/ready":
                response = JSONResponse({"status": "starting"}, 503, {"Retry-After": "5"})
            await response(scope, receive, send)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def run_frontend(
    engine: AsyncEngine, http: HttpConfig, listener: socket.socket, on_ready: Callable[[str], None], number: int = 0
) -> None:
    """Serves ``engine`` on ``listener`` until SIGTERM has drained it. ``on_ready`` gets the address. ``number``: which of
    ``http.frontends`` this is; the first one has the native API.

    Raises DepthbatchError when the engine does not start or is lost.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(engine, http, listener, on_ready, number))


async def _run(
    engine: AsyncEngine, http: HttpConfig, listener: socket.socket, on_ready: Callable[[str], None], number: int
) -> None:
    catch_the_rest(asyncio.get_running_loop(), engine.fail)
    app = LateApp(lambda: asdict(engine.health(http.stall_s)), lambda: engine.loaded, http.page == "on")
    server = Server(app, http, engine.fail)
    running = asyncio.create_task(_with_engine(engine, http, server, app, on_ready, number), name="frontend")
    running.add_done_callback(lambda _: server.leave())
    try:
        await serve(server, listener)
    finally:
        failure: BaseException | None = engine.failure  # the server may leave before ``running`` has heard of it
        running.cancel()
        result = (await asyncio.gather(running, return_exceptions=True))[0]
    if not isinstance(result, asyncio.CancelledError):
        failure = result
    if isinstance(failure, Exception) and not isinstance(failure, DepthbatchError):
        failure = failure_of("frontend", failure)
    if failure is not None:
        raise failure


async def _with_engine(
    engine: AsyncEngine,
    http: HttpConfig,
    server: Server,
    app: LateApp,
    on_ready: Callable[[str], None],
    number: int,
) -> DepthbatchError:
    async with engine, contextlib.AsyncExitStack() as links:
        if http.keep_answers_s:
            engine.keep_answers(http.keep_answers_s)
        texts = Texts(engine.tokenizer, http.template_names, engine.tokenizer_thread)
        service = Service(engine, texts, http, http.served_model_name or engine.config.model, engine.sampling_defaults)
        metrics = SharedMetrics(service.metrics.registry, engine.run_dir, number, http.frontends)
        siblings = None
        if http.frontends > 1:
            siblings = Siblings(engine.run_dir, number, http.frontends, engine.abort, metrics, engine.fail)
            service.abort_named = siblings.abort
            links.push_async_callback(siblings.close)
        app.app = create_app(service, EngineProbe(engine, metrics, http.stall_s, siblings))
        server.service = service
        if number == 0:
            address = endpoint(engine.run_dir, API_ENDPOINT)
            api = ZmqApi(engine, address, service.limit, http.default_timeout_s)
            links.push_async_callback(api.close)
            if http.zmq_bind is not None:
                remote = ZmqApi(engine, http.zmq_bind, service.limit, http.default_timeout_s, http.load_zmq_keys())
                links.push_async_callback(remote.close)
        tune_garbage_collection()
        on_ready(server.url)
        raise await engine.failed()
