"""The frontend program: listens at once, answers probes while the engine loads, then serves it until drained."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from socket import socket
from typing import Any

import uvloop
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from depthbatch.common.errors import DepthbatchError
from depthbatch.common.logging import get_logger
from depthbatch.common.os_process import tune_garbage_collection
from depthbatch.common.transport import API_ENDPOINT, endpoint
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.background import catch_the_rest, failure_of
from depthbatch.frontend.http.app import create_app
from depthbatch.frontend.http.errors import overloaded
from depthbatch.frontend.http.probe import EngineProbe
from depthbatch.frontend.http.server import Server, serve
from depthbatch.frontend.http.service import Service
from depthbatch.frontend.http.settings import HttpConfig
from depthbatch.frontend.http.texts import Texts
from depthbatch.frontend.zmq_api import ZmqApi

log = get_logger("http")


class LateApp:
    """Answers probes with "starting" until the application exists, so that a slow load is not a silent port."""

    def __init__(self, health: Callable[[], dict[str, Any]]) -> None:
        self.app: ASGIApp | None = None
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            response = overloaded("the model is loading", retry_after_s=5).response()
            if scope["path"] == "/health":
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


def run_frontend(engine: AsyncEngine, http: HttpConfig, listener: socket, on_ready: Callable[[str], None]) -> None:
    """Serves ``engine`` on ``listener`` until SIGTERM has drained it. ``on_ready`` gets the address.

    Raises DepthbatchError when the engine does not start or is lost.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(engine, http, listener, on_ready))


async def _run(engine: AsyncEngine, http: HttpConfig, listener: socket, on_ready: Callable[[str], None]) -> None:
    catch_the_rest(asyncio.get_running_loop(), engine.fail)
    app = LateApp(lambda: asdict(engine.health(http.stall_s)))
    server = Server(app, http, engine.fail)
    running = asyncio.create_task(_with_engine(engine, http, server, app, on_ready), name="frontend")
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
    engine: AsyncEngine, http: HttpConfig, server: Server, app: LateApp, on_ready: Callable[[str], None]
) -> DepthbatchError:
    async with engine:
        texts = Texts(engine.tokenizer, http.template_names, engine.tokenizer_thread)
        service = Service(engine, texts, http, http.served_model_name or engine.config.model)
        app.app = create_app(service, EngineProbe(engine, service.metrics, http.stall_s))
        server.service = service
        api = ZmqApi(engine, endpoint(engine.run_dir, API_ENDPOINT))
        tune_garbage_collection()
        try:
            on_ready(server.url)
            raise await engine.failed()
        finally:
            await api.close()
