"""The frontend program (engine, HTTP, ZMQ API) over the fake engine's processes, in a thread of the test."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.client import Client
from depthbatch.frontend.http import server as program
from depthbatch.frontend.http.server import Server, bind
from depthbatch.frontend.http.settings import HttpConfig
from fakes.install import use_fake_engine

LIMIT_S = 30.0


class RunningFrontend:
    """run_frontend over the fake engine, in a thread; ``error`` is what it ended with."""

    def __init__(self, patch: pytest.MonkeyPatch, wait: bool = True) -> None:
        use_fake_engine(patch)
        patch.setattr(logging.getLogger("depthbatch"), "propagate", True)
        patch.setattr(program, "Server", self._make_server)
        self._wait = wait
        self.engine = AsyncEngine.from_config(EngineConfig(), quiet=True)
        self.server: Server | None = None
        self.asker: Client | None = None  # kept: a client that is forgotten takes back what it has sent
        self.error: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.loop_thread = 0
        self._listener = bind(HttpConfig(port=0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _make_server(self, *args: Any) -> Server:
        self.server = Server(*args)
        return self.server

    def _run(self) -> None:
        try:
            program.run_frontend(self.engine, HttpConfig(drain_s=0.1), self._listener, self._on_ready)
        except BaseException as error:
            self.error = error

    def _on_ready(self, _: str) -> None:
        self.loop, self.loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._ready.set()

    def __enter__(self) -> "RunningFrontend":
        self._thread.start()
        assert not self._wait or self._ready.wait(LIMIT_S), self.error
        return self

    def __exit__(self, *_: object) -> None:
        if self.loop is not None and self.server is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.server.leave)
        self._thread.join(LIMIT_S)
        self._listener.close()

    def call(self, function: Callable[[], object]) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(function)

    def end(self) -> BaseException | None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the frontend goes on"
        return self.error
