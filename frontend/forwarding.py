"""Requests of one frontend served by engines elsewhere: text here, tokens there. What any of them has begun another goes on
with, so the death of a replica is a pause.

Knows no transport: ``Replicas`` is how a request reaches some engine, and the engine's side is AsyncEngine.forward.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from depthbatch.common.errors import (
    DepthbatchError,
    EngineDeadError,
    OverloadedError,
    RequestError,
    RequestKillsWorkerError,
)
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import EngineInfo, FinishReason, Submit, TokenEvent
from depthbatch.frontend.kept_answers import KeptAnswer
from depthbatch.frontend.live_requests import LiveRequest, LiveRequests
from depthbatch.frontend.mailbox import Place, Request
from depthbatch.frontend.output import IndexedDelta, OutputDelta
from depthbatch.frontend.params import RequestDefaults
from depthbatch.frontend.prompts import assembler_of, check_stop
from depthbatch.frontend.routing import LoopForecast, Order
from depthbatch.frontend.tokenizer import Tokenizer

MAX_LOSSES = 5  # of replicas, with nothing between them: then it is not the replicas' fault
FIRST_WAIT_S = 0.1  # before the next replica is asked, doubled with each loss

log = get_logger("frontend")


class ReplicaLostError(Exception):
    """The engine that was asked has gone, or never got the request."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One request as it stands, and the seconds that it may still take."""

    submit: Submit
    timeout_s: float | None


class News(msgspec.Struct, frozen=True, array_like=True):
    """What has come of a call, or the error that ended it."""

    events: tuple[TokenEvent, ...] = ()
    error: str = ""  # its class, of _ERRORS
    message: str = ""
    param: str | None = None


_ERRORS: dict[str, type[DepthbatchError]] = {
    each.__name__: each for each in (RequestError, RequestKillsWorkerError, OverloadedError, EngineDeadError)
}
_encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_news = msgspec.msgpack.Decoder(News).decode


def encode_news(events: Sequence[TokenEvent]) -> bytes:
    return _encode(News(tuple(events)))


def encode_error(error: DepthbatchError) -> bytes:
    """An error of a class that is not known here counts as the engine's."""
    name = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS), "EngineDeadError")
    return _encode(News(error=name, message=str(error), param=getattr(error, "param", None)))


class Replicas(Protocol):
    """Engines with equal weights and options."""

    def ask(self, call: bytes, order: Order) -> AsyncGenerator[bytes, None]:
        """What some replica tells of a Call (News, all encoded); closing ends the request. Raises ReplicaLostError."""
        ...


_Item = list[TokenEvent] | Exception  # events have our ids


class Running(NamedTuple):
    """What was asked for together."""

    places: dict[int, Place]  # of what has not ended
    news: asyncio.Queue[_Item]


class ForwardingEngine:
    """An engine for HTTP that has none of its own."""

    keeps_answers = False

    def __init__(self, replicas: Replicas, info: EngineInfo, tokenizer: Tokenizer | None, seed: int = 0) -> None:
        self.info = info
        self._replicas = replicas
        self._tokenizer = tokenizer
        self._defaults = RequestDefaults(info, seed)
        self._requests = LiveRequests(secrets.randbits(40))  # several frontends: seeds of requests without one differ
        self._named: dict[str, list[Running]] = {}
        self._forecast = LoopForecast(info.r_max)

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return len(self._requests)

    def kept_answer(self, request_id: str) -> KeptAnswer | None:
        return None

    def abort_kept(self, request_id: str) -> bool:
        return False

    def resume_all(
        self, answer: KeptAnswer, requests: Sequence[Request], client: int = 0
    ) -> AsyncGenerator[list[IndexedDelta], None]:
        raise RequestError("request_id: this server keeps no answers", "request_id")

    async def generate_all(
        self, requests: Sequence[Request], request_id: str, client: int = 0, form: bytes | None = None
    ) -> AsyncGenerator[list[IndexedDelta], None]:
        """As of AsyncEngine, over as many replicas as it takes."""
        encode = None if self._tokenizer is None else self._tokenizer.encode_bare
        lives = []
        for ordinal, (token_ids, params) in enumerate(requests, self._requests.next_id):
            check_stop(params, self._tokenizer)
            lives.append(
                LiveRequest.begin(token_ids, self._defaults.resolve(params, len(token_ids), ordinal, encode), client)
            )
        news: asyncio.Queue[_Item] = asyncio.Queue()
        places: dict[int, Place] = {}
        readers: dict[int, asyncio.Task[None]] = {}
        for number, (live, request) in enumerate(zip(lives, requests, strict=True)):
            id_ = self._requests.add(live)
            places[id_] = Place(number, assembler_of(request_id, *request, self._tokenizer))
            readers[id_] = asyncio.create_task(self._read(id_, request[1].timeout_s, news), name="forwarded request")
        running = Running(places, news)
        self._named.setdefault(request_id, []).append(running)
        try:
            while places:
                if deltas := self._taken(await news.get(), places):
                    yield deltas
                for id_ in readers.keys() - places.keys():
                    readers.pop(id_).cancel()  # a stop string may have ended what still runs there
        finally:
            for reader in readers.values():
                reader.cancel()
            await asyncio.gather(*readers.values(), return_exceptions=True)
            for id_ in places:
                self._requests.drop(id_)
            self._named[request_id].remove(running)
            if not self._named[request_id]:
                del self._named[request_id]

    async def abort(self, request_id: str) -> bool:
        """Ends every request of that name with finish reason "abort"; False if there is none."""
        found = self._named.get(request_id, [])
        for places, news in found:
            news.put_nowait([TokenEvent(id_, (), (), FinishReason.ABORT) for id_ in places])
        return bool(found)

    async def abort_all(self) -> None:
        for name in list(self._named):
            await self.abort(name)

    def _taken(self, item: _Item, places: dict[int, Place]) -> list[IndexedDelta]:
        """One delta a request, of all that has come; a request leaves with its last."""
        if isinstance(item, Exception):
            raise item
        deltas: dict[int, OutputDelta] = {}
        for event in item:
            place = places.get(event.request_id)
            if place is None:
                continue
            delta = place.assembler.push(event)
            if place.number in deltas:
                deltas[place.number].append(delta)
            else:
                deltas[place.number] = delta
            if delta.finish_reason is not None:
                del places[event.request_id]
                self._requests.drop(event.request_id)
        return [IndexedDelta(*each) for each in deltas.items()]

    async def _read(self, id_: int, timeout_s: float | None, news: asyncio.Queue[_Item]) -> None:
        """Asks replica after replica for the rest of a request; all that comes, or the error that ends it, goes into
        ``news``."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        losses = 0
        try:
            while self._requests.is_live(id_):
                try:
                    async for events in self._from_one_replica(id_, deadline_s):
                        losses = 0
                        news.put_nowait(events)
                except ReplicaLostError as error:
                    losses += 1
                    log.warning("a replica is lost (%s): a request goes on elsewhere", error)
                    if losses > MAX_LOSSES:
                        raise EngineDeadError(f"{losses} replicas in a row were lost: {error}") from None
                    await asyncio.sleep(FIRST_WAIT_S * 2 ** (losses - 1))
        except Exception as error:
            news.put_nowait(error)

    async def _from_one_replica(self, id_: int, deadline_s: float | None) -> AsyncGenerator[list[TokenEvent], None]:
        """News of the rest of a request, from one replica. Raises ReplicaLostError, or what the replica raised."""
        submit = self._requests.submit(id_)
        left_s = None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
        order = Order.of(submit, self._forecast)
        async with contextlib.aclosing(self._replicas.ask(_encode(Call(submit, left_s)), order)) as stream:
            async for data in stream:
                told = _decode_news(data)
                if told.error == "EngineDeadError":
                    raise ReplicaLostError(told.message)
                if told.error:
                    kind = _ERRORS[told.error]
                    raise kind(told.message, told.param) if kind is RequestError else kind(told.message)
                taken = []
                for event in told.events:
                    self._forecast.add(event.exit_depths)
                    booked = self._requests.take(msgspec.structs.replace(event, request_id=id_), self.info)
                    if booked is None:
                        continue
                    if isinstance(booked[1], DepthbatchError):
                        raise booked[1]
                    taken.append(booked[1])
                if taken:
                    yield taken
        if self._requests.is_live(id_):
            raise ReplicaLostError("it ended its answer early")
