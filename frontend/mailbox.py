"""What has come for requests that were submitted together, until their reader takes it."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from depthbatch.common.errors import DepthbatchError
from depthbatch.common.messages import TokenEvent
from depthbatch.frontend.live_requests import News
from depthbatch.frontend.output import IndexedDelta, OutputAssembler, OutputDelta
from depthbatch.frontend.params import SamplingParams

Request = tuple[list[int], SamplingParams]  # token ids and parameters


class Place(NamedTuple):
    """A request among those that were submitted with it."""

    number: int
    assembler: OutputAssembler


class Mailbox:
    """Requests that were submitted together: those that still run, and their news that the reader has not taken yet."""

    def __init__(self, name: str, leave: Callable[[int], None], kept: int = 0) -> None:
        """``leave`` is told of each request whose last delta is taken; it may still run, after a stop string. ``kept``: the
        handle of the answer that they are, where it is kept."""
        self.name = name
        self.kept = kept
        self._leave = leave
        self.places: dict[int, Place] = {}  # by internal id
        self._news: list[News] = []
        self._wanted: asyncio.Future[None] | None = None

    def put(self, news: News) -> None:
        self._news.append(news)
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def _something(self) -> None:
        if not self._news:
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted

    async def take(self) -> list[IndexedDelta]:
        """Everything that has come, one delta a request; raises the error that one of them got, once what came before
        is taken. A request leaves its place with its last delta. Empty when all of it followed a stop string."""
        await self._something()
        deltas: dict[int, OutputDelta] = {}
        for position, (request_id, event) in enumerate(self._news):
            place = self.places.get(request_id)
            if place is None:
                continue
            if isinstance(event, DepthbatchError):
                if not deltas:
                    raise event
                self._news = self._news[position:]
                break
            delta = place.assembler.push(event)
            if delta.finish_reason is not None:
                del self.places[request_id]
                self._leave(request_id)
            if place.number in deltas:
                deltas[place.number].append(delta)
            else:
                deltas[place.number] = delta
        else:
            self._news = []
        return [IndexedDelta(index, delta) for index, delta in deltas.items()]

    async def take_events(self) -> list[TokenEvent]:
        """Like ``take``, as the scheduler has told it."""
        await self._something()
        events: list[TokenEvent] = []
        for position, (request_id, event) in enumerate(self._news):
            if isinstance(event, DepthbatchError):
                if not events:
                    raise event
                self._news = self._news[position:]
                return events
            events.append(event)
            if event.finish_reason is not None:
                del self.places[request_id]
                self._leave(request_id)
        self._news = []
        return events
