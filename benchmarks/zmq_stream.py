"""Load over the native ZMQ API (docs/zmq-api.md): many requests at a time on one socket, recorded exits replayed."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from depthbatch.benchmarks.http_stream import Piece, ServerError
from depthbatch.benchmarks.workload import WorkloadRequest


class NativeClient:
    """One DEALER; a task hands every message to the request it belongs to."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._ids = itertools.count()
        self._inboxes: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._receiver: asyncio.Task[None] | None = None

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
