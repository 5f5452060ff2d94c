"""HTTP answers that notice when the client goes away. Knows ASGI and how answers are documented; nothing of tokens."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from depthbatch.frontend.background import panics_as_errors
from depthbatch.frontend.http.error_answers import as_api_error
from depthbatch.frontend.http.schemas import ErrorAnswer

T = TypeVar("T")

COMMENT = b": waiting for the first token\n\n"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_S = 15.0  # without an event: proxies give up on a silent stream after 30 s or 60 s
LINE_ENDS = {"\u2028": b"\\u2028", "\u2029": b"\\u2029", "\u0085": b"\\u0085"}
_LINE_ENDS = [(char.encode(), escape) for char, escape in LINE_ENDS.items()]
_to_json = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The socket was closed before the answer was complete; nobody is left to tell."""


def _encode(payload: object) -> bytes:
    """As JSON on one line, whatever its reader takes for the end of a line."""
    data = _to_json(payload)
    for char, escape in _LINE_ENDS:
        if char in data:
            data = data.replace(char, escape)
    return data


def event(payload: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(payload) + b"\n\n"


class EventEncoder:
    """Server-sent events that begin with the same fields, which are encoded once."""

    def __init__(self, head: dict[str, Any]) -> None:
        """``head``: the fields, one or more."""
        self._start = b"data: " + _encode(head)[:-1] + b","

    def event(self, fields: dict[str, Any], event_id: str | None = None) -> bytes:
        """``fields``: those of its own, one or more. ``event_id``: for a Last-Event-ID."""
        event = self._start + _encode(fields)[1:] + b"\n\n"
        return event if event_id is None else b"id: " + event_id.encode() + b"\n" + event


def json_answer(payload: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(payload), media_type="application/json", headers=headers)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled, and waited for, when the client closes its socket (ClientGone)."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def answer(request: Request, work: Awaitable[object], headers: Mapping[str, str]) -> Response:
    """A plain JSON answer."""
    try:
        return json_answer(await unless_gone(request.receive, work), headers)
    except ClientGone:
        return Response(status_code=499)  # nobody reads it; the access log does


class EventStream(Response):
    """Server-sent events. The status is decided by the first event: an error before it is a plain JSON answer with
    its real status, an error after it an ``error`` payload, then the end of the stream. A first event that takes longer
    than KEEP_ALIVE_S is waited for with comments, which decide the status, too."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self.events = events
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with contextlib.aclosing(self.events) as events:
            try:
                with panics_as_errors():
                    first = asyncio.ensure_future(_next(events))
                    try:
                        while not (await asyncio.wait((first,), timeout=KEEP_ALIVE_S))[0]:
                            await self._write(send, COMMENT, started)
                            started = True
                    finally:
                        await _ended(first)
                    chunk = first.result()
                    while chunk is not None:
                        await self._write(send, chunk, started)
                        started = True
                        chunk = await _next(events)
            except Exception as error:
                failure = as_api_error(error)
                if not started:
                    await failure.response()(scope, receive, send)
                    return
                await send({"type": "http.response.body", "body": event(failure.body()), "more_body": True})
        if not started:
            await self._start(send)
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _write(self, send: Send, chunk: bytes, started: bool) -> None:
        if not started:
            await self._start(send)
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _start(self, send: Send) -> None:
        headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})


async def _next(events: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(events, None)


async def _ended(task: asyncio.Future[bytes | None]) -> None:
    """Nothing of the task runs any more; its result is for whoever wants it."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))


def documented(answer: type[BaseModel], *, generates: bool = False, starts: bool = False) -> dict[str, Any]:
    """Route arguments: the answer's shape for the OpenAPI document, and the errors it may have. ``starts``: 503 while the
    engine does."""
    statuses = [400, 401, 404, 413, 415, 431, *((500, 503, 504) if generates else (503,) if starts else ())]
    responses: dict[int | str, dict[str, Any]] = {200: {"model": answer}}
    responses |= {status: {"model": ErrorAnswer} for status in statuses}
    if generates:
        # No type: tools read a stream as its text or, event by event, as objects.
        stream = {"description": "server-sent events, one chunk of the answer each, then [DONE]"}
        responses[200]["content"] = {"text/event-stream": {"schema": stream}}
    return {"responses": responses, "response_model": None}
