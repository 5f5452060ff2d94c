"""Frontends that share a scheduler, among each other: aborts by a client's name, whose request may run in any of them, and what
all of them have counted."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import zmq
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from depthbatch.common.messages import AbortNamed, Message, SiblingAnswer, SiblingMessage, WriteMetrics
from depthbatch.common.run_dir import write_whole
from depthbatch.common.transport import Dealer, Router, endpoint
from depthbatch.frontend.background import OnFailure, background

ANSWER_S = 0.5  # one that is being started again does not answer
WRITE_EVERY_S = 1.0  # what a frontend has counted since is lost where it is killed
POLL_S = 0.1  # the sockets' descriptors only signal changes; this is the net under a missed one

Key = tuple[str, tuple[tuple[str, str], ...]]  # a sample's name and labels


class SavedSample(msgspec.Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class SavedFamily(msgspec.Struct, array_like=True):
    """One metric's samples."""

    name: str
    documentation: str
    kind: str
    samples: list[SavedSample]


_decode = msgspec.msgpack.Decoder(list[SavedFamily]).decode
_encode = msgspec.msgpack.Encoder().encode


def saved(families: Iterable[Metric]) -> list[SavedFamily]:
    return [
        SavedFamily(
            family.name,
            family.documentation,
            family.type,
            [SavedSample(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
        )
        for family in families
    ]


def summed(parts: Iterable[list[SavedFamily]]) -> list[SavedFamily]:
    """Sample by sample; families and samples in the order in which they are first met."""
    out: dict[str, SavedFamily] = {}
    known: dict[Key, SavedSample] = {}
    for part in parts:
        for family in part:
            total = out.setdefault(family.name, SavedFamily(family.name, family.documentation, family.kind, []))
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                if (found := known.get(key)) is not None:
                    found.value += sample.value
                    continue
                known[key] = SavedSample(sample.name, sample.labels, sample.value)
                total.samples.append(known[key])
    return list(out.values())


class SharedMetrics:
    """A collector of what all frontends have counted: this one as it is now, the others as they have last written it down. What a
    former process of this one had written counts on, so that no counter ever falls."""

    def __init__(self, own: CollectorRegistry, run_dir: str | Path, number: int = 0, count: int = 1) -> None:
        self._own = own
        self._path = Path(run_dir) / f"metrics-{number}"
        self._others = [Path(run_dir) / f"metrics-{other}" for other in range(count) if other != number]
        self._former = _read(self._path)

    def write(self) -> None:
        """Counters and histograms only: of these a sum means something."""
        write_whole(self._path, _encode(self._mine()))

    def collect(self) -> Iterator[Metric]:
        for family in summed([self._mine(), *map(_read, self._others)]):
            metric = Metric(family.name, family.documentation, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric

    def _mine(self) -> list[SavedFamily]:
        return summed([saved(self._own.collect()), self._former])


def _read(path: Path) -> list[SavedFamily]:
    """Nothing where nothing has been written yet."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return _decode(path.read_bytes())
    return []


class Siblings:
    """One frontend's link to the others, inside its event loop until closed."""

    def __init__(
        self,
        run_dir: str | Path,
        number: int,
        count: int,
        abort: Callable[[str], Awaitable[bool]],
        metrics: SharedMetrics,
        on_failure: OnFailure,
    ) -> None:
        """``abort``: ends requests of a name in this frontend."""
        self._abort = abort
        self._metrics = metrics
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = Router(self._context, endpoint(run_dir, f"sibling-{number}"), SiblingMessage)
        self._others = [
            Dealer(self._context, endpoint(run_dir, f"sibling-{other}"), SiblingMessage)
            for other in range(count)
            if other != number
        ]
        self._asked = 0
        self._answers: dict[int, asyncio.Queue[SiblingAnswer]] = {}
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._watched = [int(link.socket.getsockopt(zmq.FD)) for link in (self._router, *self._others)]
        for descriptor in self._watched:
            self._loop.add_reader(descriptor, self._wake.set)
        self._tasks = [
            background(self._serve(), "sibling link", on_failure),
            background(self._write(), "metrics writer", on_failure),
        ]

    async def abort(self, request_id: str) -> bool:
        """Ends requests of that name wherever they run; False where no frontend had one."""
        known = await self._abort(request_id)
        answers = await self._ask(lambda ask: AbortNamed(ask, request_id))
        return known or any(answer.known for answer in answers)

    async def write_metrics(self) -> None:
        """Every frontend writes down what it has counted, this one too: then what is read anywhere from now on is no less."""
        self._metrics.write()
        await self._ask(WriteMetrics)

    async def _ask(self, question: Callable[[int], Message]) -> list[SiblingAnswer]:
        """The answers of all others that give one in time."""
        self._asked = ask = self._asked + 1
        queue = self._answers[ask] = asyncio.Queue()
        answers: list[SiblingAnswer] = []
        try:
            for other in self._others:
                other.send(question(ask))
            async with asyncio.timeout(ANSWER_S):
                while len(answers) < len(self._others):
                    answers.append(await queue.get())
        except TimeoutError:
            pass
        finally:
            del self._answers[ask]
        return answers

    async def close(self) -> None:
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._metrics.write()
        for link in (self._router, *self._others):
            link.close(0)
        self._context.term()

    async def _write(self) -> None:
        while True:
            self._metrics.write()
            await asyncio.sleep(WRITE_EVERY_S)

    async def _serve(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()
            self._wake.clear()
            while (received := self._router.receive()) is not None:
                match received.message:
                    case AbortNamed(ask, name):
                        self._router.send(received.peer, SiblingAnswer(ask, await self._abort(name)))
                    case WriteMetrics(ask):
                        self._metrics.write()
                        self._router.send(received.peer, SiblingAnswer(ask))
            for other in self._others:
                while (received := other.receive()) is not None:
                    match received.message:
                        case SiblingAnswer(ask) as answer if ask in self._answers:
                            self._answers[ask].put_nowait(answer)
