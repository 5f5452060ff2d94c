"""AsyncEngine: the engine inside an asyncio program, an async generator per request. No thread but one for encoding.

The event loop watches the client's descriptors; requests that were submitted together have one mailbox, and what has
piled up in it becomes one delta a request, so a slow reader gets fewer, larger deltas.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Self

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import DepthbatchError, EngineDeadError
from depthbatch.common.messages import EngineInfo, FinishReason, SchedulerStats, TokenEvent
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend.background import background, failure_of, panics_as_errors
from depthbatch.frontend.engine_client import EngineClient
from depthbatch.frontend.grammar import GrammarChecker, host_of
from depthbatch.frontend.health import EngineHealth
from depthbatch.frontend.live_requests import News
from depthbatch.frontend.loading_progress import LoadingProgress
from depthbatch.frontend.output import IndexedDelta, OutputAssembler, OutputDelta
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.process_metrics import flat_stats
from depthbatch.frontend.processes import Processes
from depthbatch.frontend.prompts import (
    Prompt,
    assembler_of,
    check_stop,
    encode_prompt,
    load_texts,
    print_start,
)
from depthbatch.frontend.tokenizer import Tokenizer

TIMER_S = 0.001  # the loop's timers may be as much too early
TICK_S = 0.1  # missed deadlines, and a net under the edge-triggered socket descriptor


class Place(NamedTuple):
    """A request among those that were submitted with it."""

    number: int
    assembler: OutputAssembler


class Mailbox:
    """Requests that were submitted together: those that still run, and their news that the reader has not taken yet."""

    def __init__(self, name: str, leave: Callable[[int], None]) -> None:
        """``leave`` is told of each request whose last delta is taken; it may still run, after a stop string."""
        self.name = name
        self._leave = leave
        self.places: dict[int, Place] = {}  # by internal id
        self._news: list[News] = []
        self._wanted: asyncio.Future[None] | None = None

    def put(self, news: News) -> None:
        self._news.append(news)
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def take(self) -> list[IndexedDelta]:
        """Everything that has come, one delta a request; raises the error that one of them got, once what came before
        is taken. A request leaves its place with its last delta. Empty when all of it followed a stop string."""
        if not self._news:
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
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


class AsyncEngine:
    """Use as ``async with AsyncEngine("demo") as engine``; options as of LLM.

    Entering raises ConfigError, ModelError or EngineDeadError. Belongs to the event loop it was entered in.
    """

    def __init__(self, model: str = "demo", *, quiet: bool = False, **options: Any) -> None:
        self._setup(EngineConfig.from_values({"model": model, **options}), quiet)

    @classmethod
    def from_config(
        cls, config: EngineConfig, quiet: bool = False, processes: Processes | None = None
    ) -> "AsyncEngine":
        """``processes``: scheduler and worker that somebody else runs."""
        engine = cls.__new__(cls)
        engine._setup(config, quiet, processes)
        return engine

    def _setup(self, config: EngineConfig, quiet: bool, processes: Processes | None = None) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.sampling_defaults: dict[str, Any] = {}  # of requests that do not say
        self._quiet = quiet
        self._client = EngineClient(config, self._unwatch, processes)
        self._mailboxes: dict[int, Mailbox] = {}  # by internal id
        self._named: dict[str, list[Mailbox]] = {}  # by the caller's name
        self._watched: set[int] = set()
        self._changed = asyncio.Event()  # something was polled
        self._failed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        # One thread owns the tokenizer, whatever API a prompt comes by; long prompts do not block the loop.
        self.tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._grammars = GrammarChecker(lambda: host_of(self.config.model, self.info))
        self._pump_is_due = False

    # --- life

    async def __aenter__(self) -> Self:
        loading = LoadingProgress(self.config.model)
        if not self._quiet:
            self._client.on_loading = loading
        try:
            await self._in_tokenizer_thread(resolve_model_dir, self.config.model)  # a wrong name costs nothing
            self._client.launch()
            self._ticker = background(self._tick(), "engine ticker", self.fail)
            self._pump()
            self.tokenizer, self.sampling_defaults = await self._in_tokenizer_thread(load_texts, self.config)
            if self.tokenizer is not None:
                self._client.encode = self.tokenizer.encode_bare
            while self._client.info is None:
                self._raise_failure()
                await self._next_news()
            self._raise_failure()
            loading.close()
            if not self._quiet:
                print_start(self.info, self.sampling_defaults)
        except BaseException:
            loading.close()
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the engine; requests that still run get EngineDeadError."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None
        self._unwatch()
        await asyncio.get_running_loop().run_in_executor(None, self._client.close)
        for internal_id, mailbox in self._mailboxes.items():
            mailbox.put((internal_id, EngineDeadError("the engine is closed")))
        self.tokenizer_thread.shutdown(wait=False)
        self._grammars.close()

    @property
    def info(self) -> EngineInfo:
        """What the engine is. Raises EngineDeadError before it has been ready."""
        if self._client.info is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._client.info

    @property
    def run_dir(self) -> str:
        return str(self._client.run_dir)

    def health(self, stall_s: float = 30.0) -> EngineHealth:
        """Judged by progress; enqueues nothing. ``stall_s``: no step for this long, with work waiting, is a stall."""
        return self._client.health(stall_s)

    async def stats(self) -> dict[str, float]:
        """The scheduler's counters since its start, by name. Raises EngineDeadError."""
        return flat_stats(await self.scheduler_stats())

    async def scheduler_stats(self) -> SchedulerStats:
        """The same as typed numbers."""
        self._client.ask_stats()
        self._after_send()
        while self._client.stats is None:
            self._raise_failure()
            await self._next_news()
        return self._client.stats

    @property
    def failure(self) -> DepthbatchError | None:
        """Why the engine is lost for good, or closed; None while it is neither."""
        return self._client.failure

    async def failed(self) -> DepthbatchError:
        """Waits until the engine is lost for good; returns why."""
        await self._failed.wait()
        assert self._client.failure is not None
        return self._client.failure

    def fail(self, name: str, error: BaseException) -> None:
        """Ends the engine because background work of this process has failed, which would hang requests: each open
        one gets EngineDeadError, new ones are refused, ``failed`` returns. ``name``: the task, for the log."""
        failure = failure_of(name, error)
        if self._client.failure is not None:
            return
        self._client.failure = failure
        for internal_id, mailbox in self._mailboxes.items():
            mailbox.put((internal_id, failure))
        self._changed.set()
        self._failed.set()

    # --- requests

    async def encode(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Token ids of a prompt, in the thread that owns the encoding. Raises RequestError."""
        if not isinstance(prompt, str):
            return encode_prompt(prompt, params, self.tokenizer)
        token_ids: list[int] = await self._in_tokenizer_thread(
            encode_prompt, prompt, params, self.tokenizer, self.info.max_model_len
        )
        return token_ids

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Deltas of one request as they come; the last one carries the finish reason.

        ``request_id`` is the caller's name for ``abort``; names may repeat, each request is its own. Closing the
        generator, or cancelling the task that iterates, aborts. Raises RequestError or EngineDeadError.
        """
        params = params or SamplingParams(**self.sampling_defaults)
        token_ids = await self.encode(prompt, params)
        await self._prove_grammar(token_ids, params)
        with self._submitted([(token_ids, params)], request_id) as mailbox:
            while mailbox.places:
                for _, delta in await mailbox.take():
                    yield delta

    async def generate_all(
        self, requests: Sequence[tuple[list[int], SamplingParams]], request_id: str | None = None, client: int = 0
    ) -> AsyncGenerator[list[IndexedDelta], None]:
        """Requests (token ids and parameters) that are submitted together under one name: what has come for them, each
        time there is something, at most one delta a request. Otherwise like ``generate``; an error of one ends all.
        ``client``: a number of whoever asks; where requests wait, clients take turns."""
        for token_ids, params in requests:
            check_stop(params, self.tokenizer)
            await self._prove_grammar(token_ids, params, client)
        with self._submitted(requests, request_id, client) as mailbox:
            while mailbox.places:
                if deltas := await mailbox.take():
                    yield deltas

    @contextlib.contextmanager
    def _submitted(
        self, requests: Sequence[tuple[list[int], SamplingParams]], request_id: str | None, client: int = 0
    ) -> Iterator[Mailbox]:
        """Submits; whatever still runs at the end is aborted. Raises like EngineClient.submit_all."""
        internal_ids = self._client.submit_all(requests, client)
        self._after_send()
        mailbox = Mailbox(str(internal_ids[0]) if request_id is None else request_id, self._leave)
        deadlines = []
        for index, (internal_id, (token_ids, params)) in enumerate(zip(internal_ids, requests, strict=True)):
            assembler = assembler_of(mailbox.name, token_ids, params, self.tokenizer)
            mailbox.places[internal_id] = Place(index, assembler)
            self._mailboxes[internal_id] = mailbox
            if params.timeout_s is not None:
                deadlines.append(asyncio.get_running_loop().call_later(params.timeout_s + TIMER_S, self._pump))
        self._named.setdefault(mailbox.name, []).append(mailbox)
        try:
            yield mailbox
        finally:
            for deadline in deadlines:
                deadline.cancel()
            for internal_id in mailbox.places:
                self._leave(internal_id)
            self._named[mailbox.name].remove(mailbox)
            if not self._named[mailbox.name]:
                del self._named[mailbox.name]

    def _leave(self, internal_id: int) -> None:
        """Nobody reads of the request any more; it is aborted if it still runs."""
        self._mailboxes.pop(internal_id, None)
        if self._client.abort(internal_id):
            self._after_send()

    async def _prove_grammar(self, token_ids: Sequence[int], params: SamplingParams, client: int = 0) -> None:
        """Has a request's grammar compiled beside the loop. Raises RequestError, also when that takes too much."""
        if params.constraint is None:
            return
        future = self._grammars.submit(self._client.check(token_ids, params).grammar, client)
        if future is not None:
            await asyncio.shield(asyncio.wrap_future(future))  # others may wait for it

    async def abort(self, request_id: str) -> bool:
        """Ends every request of that name with finish reason "abort"; False if there is none, which is fine."""
        found = [mailbox for mailbox in self._named.get(request_id, ()) if mailbox.places]
        for mailbox in found:
            for internal_id in mailbox.places:
                if self._client.abort(internal_id):
                    mailbox.put((internal_id, TokenEvent(internal_id, (), (), FinishReason.ABORT)))
        self._after_send()
        return bool(found)

    async def abort_all(self) -> None:
        """Ends every request with finish reason "abort"."""
        for name in list(self._named):
            await self.abort(name)

    # --- the loop's side

    async def _in_tokenizer_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.tokenizer_thread, function, *arguments)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._pump()

    def _pump(self) -> None:
        """Handles what has come and gives all news to those who wait for it."""
        self._pump_is_due = False
        try:
            with panics_as_errors():
                for news in self._client.poll():
                    mailbox = self._mailboxes.get(news[0])
                    if mailbox is not None:
                        mailbox.put(news)
                self._watch()
        except Exception as error:
            self.fail("engine pump", error)
        self._changed.set()
        if self._client.failure is not None:
            self._failed.set()

    def _watch(self) -> None:
        """Keeps the loop's readers in step with the client's descriptors, which change when processes restart."""
        loop = asyncio.get_running_loop()
        wanted = set() if self._client.failure is not None else self._client.descriptors()
        for descriptor in self._watched - wanted:
            loop.remove_reader(descriptor)
        for descriptor in wanted - self._watched:
            loop.add_reader(descriptor, self._pump)
        self._watched = wanted

    def _unwatch(self) -> None:
        """Before descriptors are closed: their numbers may come back as others."""
        for descriptor in self._watched:
            asyncio.get_running_loop().remove_reader(descriptor)
        self._watched = set()

    def _after_send(self) -> None:
        """Sending may swallow the socket's readiness edge, so look once more."""
        if not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    async def _next_news(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _raise_failure(self) -> None:
        if self._client.failure is not None:
            raise self._client.failure
