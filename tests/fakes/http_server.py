"""A real uvicorn on a real port, in a thread, over the fake engine."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop
from prometheus_client import generate_latest

from depthbatch.common.config import EngineConfig
from depthbatch.common.stats import CoreStats
from depthbatch.frontend.http.app import create_app
from depthbatch.frontend.http.generation import Service
from depthbatch.frontend.http.schemas import HealthAnswer, ProcessHealth
from depthbatch.frontend.http.server import Server, bind, serve, url_of
from depthbatch.frontend.http.settings import HttpConfig
from depthbatch.frontend.http.texts import Texts
from depthbatch.frontend.tokenizer import Tokenizer
from fakes.serving_engine import FakeEngine

START_S = 10.0


class FakeProbe:
    """Health as a test sets it."""

    def __init__(self, service: Service) -> None:
        self.status = "ok"
        self.stage_lines: list[bytes] | None = None
        self.config = EngineConfig(max_num_seqs=8)
        self.core: CoreStats | None = CoreStats()
        self._service = service

    def health(self) -> HealthAnswer:
        process = ProcessHealth(pid=1, state="running", steps=0, last_step_age_s=0.0, restarts=0)
        return HealthAnswer(status=self.status, processes=dict.fromkeys(("frontend", "scheduler", "worker"), process))

    async def core_stats(self) -> CoreStats | None:
        return self.core

    async def metrics_text(self) -> bytes:
        return generate_latest(self._service.metrics.registry)

    def stages(self) -> list[bytes] | None:
        return self.stage_lines


class LiveServer:
    """``with LiveServer(...) as server``: ``server.url`` answers."""

    def __init__(self, tokenizer: Tokenizer | None, engine: dict[str, Any] | None = None, **http: Any) -> None:
        self._tokenizer = tokenizer
        self._engine_options = engine or {}
        self._config = HttpConfig(**{"port": 0, **http})
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""
        self.engine: FakeEngine
        self.service: Service
        self.server: Server
        self.probe: FakeProbe
        self.loop: asyncio.AbstractEventLoop

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = FakeEngine(self._tokenizer, **self._engine_options)
        texts = Texts(self._tokenizer, self._config.template_names, ThreadPoolExecutor(1))
        self.service = Service(self.engine, texts, self._config, "fake")
        self.probe = FakeProbe(self.service)
        self.server = Server(create_app(self.service, self.probe), self._config)
        self.server.service = self.service
        listener = bind(self._config)
        self.url = url_of(listener)
        self._ready.set()  # from here on connections wait in the backlog
        await serve(self.server, listener)

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        assert self._ready.wait(START_S), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.call(lambda: setattr(self.server, "should_exit", True))
        self._thread.join(START_S)

    def call(self, function: Callable[[], object]) -> object:
        """Runs a function on the server's loop; its result."""

        async def run() -> object:
            return function()

        if not self._thread.is_alive():
            return None
        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(START_S)

    def join(self) -> bool:
        """True when the server ended by itself."""
        self._thread.join(START_S)
        return not self._thread.is_alive()
