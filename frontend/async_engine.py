"""AsyncEngine: the engine inside an asyncio program, an async generator per request. No thread but one for encoding.

The event loop watches the client's descriptors; requests that were submitted together have one mailbox, and what has
piled up in it becomes one delta a request, so a slow reader gets fewer, larger deltas.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import DepthbatchError, EngineDeadError, RequestError
from depthbatch.common.messages import EngineInfo, FinishReason, SchedulerStats, Submit, TokenEvent
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend.background import background, failure_of, panics_as_errors
from depthbatch.frontend.engine_client import EngineClient
from depthbatch.frontend.grammar import GrammarChecker, host_of
from depthbatch.frontend.health import EngineHealth
from depthbatch.frontend.kept_answers import KeptAnswer, KeptAnswers, Numbered, open_answers, single_tokens
from depthbatch.frontend.live_requests import LiveRequest, News, Progress
from depthbatch.frontend.loading_progress import LoadingProgress
from depthbatch.frontend.mailbox import Mailbox, Place, Request
from depthbatch.frontend.output import IndexedDelta, OutputAssembler, OutputDelta
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.process_metrics import flat_stats
from depthbatch.frontend.processes import Processes
from depthbatch.frontend.prompt_checks import check_length
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
GOES_ON_ELSEWHERE = "request_id: the answer goes on over another connection"
TICK_S = 0.1  # missed deadlines, and a net under the edge-triggered socket descriptor


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
        self._kept: KeptAnswers | None = None
        self.loaded = (0, 0)  # bytes of the weights that are read, and of how many; before the first are, 0

    # --- life

    async def __aenter__(self) -> Self:
        loading = LoadingProgress(self.config.model)
        self._client.on_loading = lambda done, total: self._on_loading(loading, done, total)
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
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
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
            if isinstance(prompt, list) and len(prompt) > self.info.max_model_len:  # before any of them is looked at
                check_length(len(prompt), None, self.info.max_model_len)
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
        async with contextlib.aclosing(self.generate_all([(token_ids, params)], request_id)) as batches:
            async for batch in batches:
                for _, delta in batch:
                    yield delta

    async def generate_all(
        self,
        requests: Sequence[Request],
        request_id: str | None = None,
        client: int = 0,
        form: bytes | None = None,
        progress: Progress | None = None,
    ) -> AsyncGenerator[list[IndexedDelta], None]:
        """Requests (token ids and parameters) that are submitted together under one name: what has come for them, each
        time there is something, at most one delta a request. Otherwise like ``generate``; an error of one ends all.
        ``client``: a number of whoever asks; where requests wait, clients take turns. ``form``: the answer is kept under
        its name, with this. ``progress``: of the one request, which another engine has begun; what comes is new."""
        for token_ids, params in requests:
            check_stop(params, self.tokenizer)
            await self._prove_grammar(token_ids, params, client)
        assemblers = [self._assembler(request, request_id) for request in requests]
        internal_ids = self._client.submit_all(requests, client, progress)
        name = str(internal_ids[0]) if request_id is None else request_id
        kept = 0
        if self._kept is not None and form is not None:
            kept = self._kept.begin(name, form, list(map(self._client.kept_form, internal_ids)))
        places = {id_: Place(*numbered) for id_, numbered in zip(internal_ids, enumerate(assemblers), strict=True)}
        timeouts_s = [params.timeout_s for _, params in requests]
        with self._running(Mailbox(name, self._leave, kept), places, timeouts_s) as mailbox:
            if progress is not None:
                said = assemblers[0].skip(progress.token_ids, progress.exit_depths)
                if said.finish_reason is not None:
                    said.text, said.token_ids, said.exit_depths = "", [], []
                    yield [IndexedDelta(0, said)]
                    return
            while mailbox.places:
                if deltas := await mailbox.take():
                    yield deltas

    async def forward(self, submit: Submit, timeout_s: float | None) -> AsyncGenerator[list[TokenEvent], None]:
        """A request that another frontend has checked, as it stands: its events, as the scheduler tells them. Text is the
        other's, which may give the request up here and go on with it elsewhere. Raises like ``generate``."""
        (internal_id,) = self._client.accept([(LiveRequest.of(submit), timeout_s)])
        places = {internal_id: Place(0, OutputAssembler("", None))}
        with self._running(Mailbox(str(internal_id), self._leave), places, [timeout_s]) as mailbox:
            while mailbox.places:
                yield await mailbox.take_events()

    def keep_answers(self, keep_s: float) -> None:
        """From now on answers of a ``form`` can be asked for again, ``keep_s`` after their last news."""
        self._kept = open_answers(self.run_dir, keep_s)

    @property
    def keeps_answers(self) -> bool:
        return self._kept is not None

    def kept_answer(self, request_id: str) -> KeptAnswer | None:
        """What is kept under a name; None where there is nothing (any more)."""
        return None if self._kept is None else self._kept.find(request_id)

    async def resume_all(
        self, answer: KeptAnswer, requests: Sequence[Request], client: int = 0
    ) -> AsyncGenerator[list[IndexedDelta], None]:
        """A kept answer from its start, as ``generate_all`` gives it: first what was there, a token at a time, then an empty
        batch, then what it goes on with. ``requests``: as they were. A stream that still gives the answer ends."""
        assert self._kept is not None
        for former in self._named.get(answer.name, ()):
            if former.kept == answer.handle:
                self._give_up(former)
        taken = self._kept.go_on(answer.handle)
        if taken is None:
            raise RequestError(f"{GOES_ON_ELSEWHERE}, or is not kept any more", "request_id")
        try:
            lives = [LiveRequest.of(submit) for submit in taken.submits]
            assemblers = [self._assembler(request, answer.name) for request in requests]
            going_on = dict(enumerate(assemblers))
            for number, event in single_tokens(taken.news):
                if number in going_on:
                    delta = assemblers[number].push(event)
                    lives[number].extend(event)
                    if delta.finish_reason is not None:
                        del going_on[number]
                    yield [IndexedDelta(number, delta)]
                await asyncio.sleep(0)
            yield []
            again = [(lives[number], requests[number][1].timeout_s) for number in going_on]
            internal_ids = self._client.accept(again)
            places = {id_: Place(*place) for id_, place in zip(internal_ids, going_on.items(), strict=True)}
            mailbox = Mailbox(answer.name, self._leave, taken.handle)
            with self._running(mailbox, places, [timeout_s for _, timeout_s in again]):
                while mailbox.places:
                    if deltas := await mailbox.take():
                        yield deltas
        finally:
            if self._kept is not None:
                self._kept.leave(taken.handle)

    def _give_up_all(self, handles: list[int]) -> None:
        """Other frontends go on with these answers."""
        for mailbox in {id(each): each for each in self._mailboxes.values() if each.kept in handles}.values():
            self._give_up(mailbox)

    def _give_up(self, mailbox: Mailbox) -> None:
        """Its answer goes on elsewhere."""
        for internal_id in mailbox.places:
            if self._client.abort(internal_id):
                mailbox.put((internal_id, RequestError(GOES_ON_ELSEWHERE, "request_id")))
        self._after_send()

    def _assembler(self, request: Request, name: str | None) -> OutputAssembler:
        return assembler_of(name or "", *request, self.tokenizer)

    @contextlib.contextmanager
    def _running(
        self, mailbox: Mailbox, places: dict[int, Place], timeouts_s: Sequence[float | None]
    ) -> Iterator[Mailbox]:
        """What was submitted has its mailbox; whatever still runs at the end is aborted."""
        self._after_send()
        mailbox.places = places
        self._mailboxes.update(dict.fromkeys(places, mailbox))
        loop = asyncio.get_running_loop()
        deadlines = [loop.call_later(time_s + TIMER_S, self._pump) for time_s in timeouts_s if time_s is not None]
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
            if self._kept is not None:
                self._kept.leave(mailbox.kept)

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
        aborted = [id_ for mailbox in found for id_ in mailbox.places if self._client.abort(id_)]
        self._hand_out([(id_, TokenEvent(id_, (), (), FinishReason.ABORT)) for id_ in aborted])
        self._after_send()
        return bool(found)

    def abort_kept(self, request_id: str) -> bool:
        """The same for the kept answer of that name that nobody goes on with: who resumes it finds it aborted."""
        return self._kept is not None and self._kept.abort(request_id)

    async def abort_all(self) -> None:
        """Ends every request with finish reason "abort"."""
        for name in list(self._named):
            await self.abort(name)

    # --- the loop's side

    def _on_loading(self, progress: LoadingProgress, done: int, total: int) -> None:
        self.loaded = (done, total)
        if not self._quiet:
            progress(done, total)

    async def _in_tokenizer_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.tokenizer_thread, function, *arguments)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._pump()
            if self._kept is not None:
                self._give_up_all(self._kept.sweep())

    def _pump(self) -> None:
        """Handles what has come and gives all news to those who wait for it."""
        self._pump_is_due = False
        try:
            with panics_as_errors():
                self._hand_out(self._client.poll())
                self._watch()
        except Exception as error:
            self.fail("engine pump", error)
        self._changed.set()
        if self._client.failure is not None:
            self._failed.set()

    def _hand_out(self, news: list[News]) -> None:
        """What is kept is written before anybody reads it."""
        if self._kept is not None:
            self._keep(self._kept, news)
        for each in news:
            mailbox = self._mailboxes.get(each[0])
            if mailbox is not None:
                mailbox.put(each)

    def _keep(self, kept: KeptAnswers, news: list[News]) -> None:
        rows = []
        for request_id, event in news:
            mailbox = self._mailboxes.get(request_id)
            if mailbox is None or not mailbox.kept:
                continue
            if isinstance(event, TokenEvent):
                rows.append((mailbox.kept, Numbered(mailbox.places[request_id].number, event)))
            else:
                kept.drop(mailbox.kept)
        if taken := kept.add(rows):
            self._give_up_all(taken)

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
