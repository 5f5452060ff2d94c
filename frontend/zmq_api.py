"""The native API: a ROUTER at RUN_DIR/api, msgpack maps in and out (docs/zmq-api.md).

Every submit gets ``tokens`` messages and exactly one terminal one, ``finished`` or ``error``. Bytes that are no request
get a typed error and are counted. Ids are the client's and only looked up together with its connection.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, nullcontext
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from depthbatch.common.endpoints import is_ipv6
from depthbatch.common.errors import DecodeError, DepthbatchError, OverloadedError, RequestError
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import FinishReason
from depthbatch.common.transport import Received, Router
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.background import background, check, panics_as_errors
from depthbatch.frontend.live_requests import Progress
from depthbatch.frontend.output import IndexedDelta, OutputDelta
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.request_limit import RequestLimit
from depthbatch.frontend.zmq_keys import ServerKeys

log = get_logger("zmq_api")

MAX_NAME_CHARS = 128  # every message of a request repeats its id
ClientId = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] | int
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
NO_CLIENT = 0  # has no API key
HEARTBEAT_MS = 10_000
MAX_UNREAD = 1_000_000  # messages for one client beside those that lie in the sockets' buffers


class _Verb(msgspec.Struct, frozen=True, tag_field="verb", forbid_unknown_fields=True):
    """Base of all requests: a map whose ``verb`` says which one it is."""


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far another engine has come with a request (live_requests.Progress)."""

    token_ids: list[int]
    exit_depths: list[int]
    cuts: list[int] = []


class SubmitVerb(_Verb, frozen=True, tag="submit"):
    id: ClientId
    prompt: str | list[int]
    params: dict[str, Any] = {}  # fields of SamplingParams
    request_id: Name | None = None  # the answer can be resumed by this name
    resume: Begun | None = None


class ResumeVerb(_Verb, frozen=True, tag="resume"):
    id: ClientId
    request_id: Name
    after: int = 0  # tokens that the client has


class AbortVerb(_Verb, frozen=True, tag="abort"):
    id: ClientId


class StatsVerb(_Verb, frozen=True, tag="stats"):
    pass


class HealthVerb(_Verb, frozen=True, tag="health"):
    pass


ApiRequest = SubmitVerb | ResumeVerb | AbortVerb | StatsVerb | HealthVerb

_FIELDS = frozenset(SamplingParams.__struct_fields__)
_encode = msgspec.msgpack.Encoder().encode


def _engine_name(request_id: str) -> str:
    """A client's name for the engine; those of HTTP begin otherwise."""
    return f"zmq {request_id}"


class Key(NamedTuple):
    """A client's request: its connection and its own id."""

    peer: bytes
    id: ClientId


class ApiRouter(Router):
    """The socket; what is no request is answered at once."""

    def reply(self, peer: bytes, **fields: Any) -> bool:
        """Sends one map; False when the client has gone."""
        return self.send_bytes(peer, _encode(fields))

    def on_decode_error(self, peer: bytes, error: DecodeError) -> None:
        self.reply(peer, type="error", id=_id_in(error.data), error="decode", message=str(error), param=None)


def _id_in(data: bytes) -> ClientId | None:
    """The id of a map that is no request: its client may wait for an answer to just this one."""
    try:
        client_id = msgspec.msgpack.decode(data)["id"]
    except Exception:  # bytes of a stranger, of any shape
        return None
    return client_id if type(client_id) in (str, int) else None  # a bool is no id


class ZmqApi:
    """Serves an AsyncEngine on one socket, inside its event loop, until closed."""

    def __init__(
        self,
        engine: AsyncEngine,
        address: str,
        limit: RequestLimit | None = None,
        default_timeout_s: float | None = None,
        keys: ServerKeys | None = None,
    ) -> None:
        """``limit``: what requests of all APIs share, in places and in metrics. ``default_timeout_s``: of requests that
        name none. ``keys``: with which the socket is secured, and its clients are told from others."""
        self._limit = limit
        self._default_timeout_s = default_timeout_s
        self.address = address
        self._engine = engine
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._keys = keys
        self._router = ApiRouter(self._context, address, ApiRequest, self._prepare)
        self._streams: dict[Key, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._router.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._receive)
        self._ticker = background(self._tick(), "ZMQ API ticker", engine.fail)

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        """A client that does not read counts as gone before its messages fill the memory. One whose machine is gone closes no
        connection: over tcp it is asked now and then."""
        socket.setsockopt(zmq.SNDHWM, MAX_UNREAD)
        if self.address.startswith("tcp://"):
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
            socket.setsockopt(zmq.IPV6, int(is_ipv6(self.address)))
        if self._keys is not None:
            self._authenticator = self._keys.secure(self._context, socket)

    @property
    def decode_errors(self) -> int:
        """Messages that were no request."""
        return self._router.decode_errors

    async def close(self) -> None:
        """Aborts what runs; every stream still gets its terminal message."""
        self._loop.remove_reader(self._descriptor)
        for task in (self._ticker, *self._streams.values(), *self._tasks):
            task.cancel()
        await asyncio.gather(self._ticker, *self._streams.values(), *self._tasks, return_exceptions=True)
        self._router.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    async def _tick(self) -> None:
        """The socket's descriptor only signals changes; this is the net under a missed one."""
        while True:
            await asyncio.sleep(0.1)
            self._receive()

    def _receive(self) -> None:
        try:
            with panics_as_errors():
                while (received := self._router.receive()) is not None:
                    self._dispatch(received)
        except Exception as error:
            self._engine.fail("ZMQ API receiver", error)

    def _dispatch(self, received: Received) -> None:
        peer = received.peer
        match received.message:
            case SubmitVerb() | ResumeVerb() as verb:
                self._submit(Key(peer, verb.id), verb)
            case AbortVerb(client_id):
                stream = self._streams.get(Key(peer, client_id))
                if stream is not None:
                    stream.cancel()
                self._router.reply(peer, type="aborted", id=client_id, known=stream is not None)
            case StatsVerb():
                task = background(self._stats(peer), "ZMQ API stats", self._engine.fail)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case HealthVerb():
                self._router.reply(peer, type="health", **dataclasses.asdict(self._engine.health()))

    def _submit(self, key: Key, verb: SubmitVerb | ResumeVerb) -> None:
        if key in self._streams:
            error = RequestError(f"id {verb.id!r} is in use by this client", "id")
            self._router.reply(key.peer, **_error_fields(key, error))
            return
        task = self._loop.create_task(self._stream(key, verb), name="ZMQ API stream")
        self._streams[key] = task
        task.add_done_callback(lambda task: self._on_stream_end(key, task))

    def _on_stream_end(self, key: Key, task: asyncio.Task[None]) -> None:
        """A cancelled stream, which may never have begun to run, is owed its terminal message here."""
        del self._streams[key]
        check(task, self._engine.fail)
        if task.cancelled():
            self._router.reply(key.peer, type="finished", id=key.id, finish_reason="abort", stop_reason=None)

    async def _stream(self, key: Key, verb: SubmitVerb | ResumeVerb) -> None:
        """One request from submit to its terminal message."""
        try:
            place = nullcontext() if self._limit is None else self._limit.places(1, NO_CLIENT)
            with panics_as_errors(), place:
                if isinstance(verb, SubmitVerb):
                    await self._serve(key, verb)
                else:
                    await self._resume(key, verb)
        except DepthbatchError as error:
            self._router.reply(key.peer, **_error_fields(key, error))
        except Exception as error:
            log.exception("a request failed")
            self._router.reply(key.peer, **_error_fields(key, error))

    async def _serve(self, key: Key, verb: SubmitVerb) -> None:
        """A request that has its place."""
        fields = {**self._engine.sampling_defaults, **verb.params}
        params = self._params(fields)
        token_ids = await self._engine.encode(verb.prompt, params)
        progress = None if verb.resume is None else Progress(*msgspec.structs.astuple(verb.resume))
        name = None if verb.request_id is None else _engine_name(verb.request_id)
        form = None if name is None else _encode(fields)
        news = self._engine.generate_all([(token_ids, params)], name, form=form, progress=progress)
        await self._send_news(key, news, len(token_ids))

    def _params(self, fields: dict[str, Any]) -> SamplingParams:
        """Raises RequestError."""
        params = _params(fields)
        if params.timeout_s is None and self._default_timeout_s is not None:
            return msgspec.structs.replace(params, timeout_s=self._default_timeout_s)
        return params

    async def _resume(self, key: Key, verb: ResumeVerb) -> None:
        """The rest of a kept answer."""
        answer = self._engine.kept_answer(_engine_name(verb.request_id))
        if answer is None:
            raise RequestError(f"request_id: no answer to {verb.request_id[:80]!r} is kept", "request_id")
        known = sum(len(event.token_ids) for _, event in answer.news)
        if not 0 <= verb.after <= known:
            raise RequestError(f"after: {verb.after} is not among the {known} tokens of this answer so far", "after")
        prompt_ids = np.frombuffer(answer.submits[0].prompt, "<i4").tolist()
        params = self._params(msgspec.msgpack.decode(answer.form))
        news = self._engine.resume_all(answer, [(prompt_ids, params)])
        await self._send_news(key, news, len(prompt_ids), verb.after, replayed=True)

    async def _send_news(
        self,
        key: Key,
        news: AsyncGenerator[list[IndexedDelta], None],
        prompt_tokens: int,
        after: int = 0,
        replayed: bool = False,
    ) -> None:
        """Returns early when the client has gone: leaving closes the generator, which aborts the request. ``after``: tokens
        that it has. ``replayed``: the news up to an empty batch were there before."""
        accepted = rejected = cached = sent = 0
        async with AsyncExitStack() as stack:
            timer = None
            if self._limit is not None:
                timer = stack.enter_context(self._limit.metrics.sequence(prompt_tokens))
            batches = await stack.enter_async_context(aclosing(news))
            async for batch in batches:
                replayed = replayed and bool(batch)
                for _, delta in batch:
                    if timer is not None:
                        reason = None if delta.finish_reason is FinishReason.TIMEOUT else delta.finish_reason
                        timer.tokens([] if replayed else delta.exit_depths, reason, time.monotonic())
                    accepted += delta.accepted_drafts
                    rejected += delta.rejected_drafts
                    cached += delta.num_cached_tokens
                    sent += len(delta.token_ids)
                    there = (replayed and sent <= after) or self._reply_tokens(key, delta)
                    if delta.finish_reason is not None:
                        self._router.reply(
                            key.peer,
                            type="finished",
                            id=key.id,
                            finish_reason=delta.finish_reason,
                            stop_reason=delta.stop_reason,
                            accepted_drafts=accepted,
                            rejected_drafts=rejected,
                            num_cached_tokens=cached,
                        )
                    if not there:
                        return

    def _reply_tokens(self, key: Key, delta: OutputDelta) -> bool:
        """False when the client has gone."""
        if not delta.token_ids and not delta.text:
            return True
        extras = {name: rows for name in ("logprobs", "prompt_logprobs", "cuts") if (rows := getattr(delta, name))}
        return self._router.reply(
            key.peer,
            type="tokens",
            id=key.id,
            text=delta.text,
            token_ids=delta.token_ids,
            exit_depths=delta.exit_depths,
            **extras,
        )

    async def _stats(self, peer: bytes) -> None:
        try:
            values = await self._engine.stats()
        except DepthbatchError as error:
            self._router.reply(peer, **_error_fields(Key(peer, ""), error) | {"id": None})
            return
        self._router.reply(peer, type="stats", values={**values, "api_decode_errors": self.decode_errors})


def _params(fields: dict[str, Any]) -> SamplingParams:
    """Raises RequestError."""
    unknown = fields.keys() - _FIELDS
    if unknown:
        raise RequestError(f"unknown parameter {min(unknown)!r}", min(unknown))
    try:
        return SamplingParams(**fields)
    except RecursionError:
        raise RequestError("params are nested too deeply", "params") from None


def _error_fields(key: Key, error: Exception) -> dict[str, Any]:
    kind = "request" if isinstance(error, RequestError) else "engine"
    return {
        "type": "error",
        "id": key.id,
        "error": "overloaded" if isinstance(error, OverloadedError) else kind,
        "message": str(error),
        "param": error.param if isinstance(error, RequestError) else None,
    }
