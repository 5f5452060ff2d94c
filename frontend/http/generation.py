"""One HTTP request as sequences of the engine, whichever endpoint it came by: limit, submission, answer, events, usage.

An endpoint's Spelling says how its body asks and how its choices are written; the rest is here, once.
"""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from depthbatch.common.errors import RequestError
from depthbatch.common.messages import EngineInfo, FinishReason
from depthbatch.common.splitmix64 import ALL_BITS
from depthbatch.frontend.http.answers import EventEncoder
from depthbatch.frontend.http.error_answers import ApiError, bad_value
from depthbatch.frontend.http.logprobs import LogprobFormat
from depthbatch.frontend.http.request_fields import check_body, renamed, sampling_fields
from depthbatch.frontend.http.resumption import (
    MAX_CHOICES,
    LastEvent,
    Positions,
    RequestNames,
    check_resumable,
    form_of,
)
from depthbatch.frontend.http.schemas import GenerationFields
from depthbatch.frontend.http.settings import HttpConfig
from depthbatch.frontend.http.texts import Texts
from depthbatch.frontend.kept_answers import KeptAnswer
from depthbatch.frontend.metrics import FrontendMetrics, SequenceTimer
from depthbatch.frontend.output import IndexedDelta, OutputDelta
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.request_limit import RequestLimit


class Engine(Protocol):
    """What HTTP needs of a running engine; AsyncEngine has it, and so has the fake of the tests."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def keeps_answers(self) -> bool: ...
    def generate_all(
        self,
        requests: Sequence[tuple[list[int], SamplingParams]],
        request_id: str,
        client: int = 0,
        form: bytes | None = None,
    ) -> AsyncGenerator[list[IndexedDelta], None]: ...
    def kept_answer(self, request_id: str) -> KeptAnswer | None: ...
    def resume_all(
        self, answer: KeptAnswer, requests: Sequence[tuple[list[int], SamplingParams]], client: int = 0
    ) -> AsyncGenerator[list[IndexedDelta], None]: ...
    async def abort(self, request_id: str) -> bool: ...
    def abort_kept(self, request_id: str) -> bool: ...
    async def abort_all(self) -> None: ...


class Service:
    """The engine, its texts and its limit, handed to every router."""

    def __init__(
        self,
        engine: Engine,
        texts: Texts,
        config: HttpConfig,
        model_name: str,
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """``sampling_defaults``: fields of SamplingParams for requests that do not say."""
        self.sampling_defaults = sampling_defaults
        self.engine = engine
        self.texts = texts
        self.config = config
        self.model_name = model_name
        self.started_s = int(time.time())
        self.metrics = FrontendMetrics(engine.info.r_max)
        self.abort_named = engine.abort  # also those that run in other frontends, where there are some
        self.limit = RequestLimit(self.metrics, config.places, config.places_per_key, config.max_sequences)

    def check(self, body: GenerationFields) -> None:
        """Refuses what can be refused without tokens. Raises ApiError."""
        self.check_model(body.model)
        check_body(body)
        if (body.n or 1) > self.config.max_n:
            raise bad_value("n", f"{body.n} is more than this server's limit of {self.config.max_n}")
        if body.stream_options is not None and body.stream_options.include_usage and not body.stream:
            raise bad_value("stream_options", "only with stream")

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(404, f"model: {name[:200]!r} is not served here", param="model", code="model_not_found")

    async def abort(self, name: str, client: int) -> bool:
        """Ends every request that the client has given this name, also one that rests; False if there is none."""
        running = await self.abort_named(engine_name(name, client))
        return self.engine.abort_kept(engine_name(name, client)) or running


def engine_name(name: str, client: int) -> str:
    """A client's name for the engine, where those of other clients and APIs have names too: no other holds a space."""
    return f"http {client} {name}"


class Prompt(NamedTuple):
    """What the choices of one prompt continue."""

    ids: list[int]
    echo: str = ""  # what their text starts with
    offsets: list[int] | None = None  # where in it each id's text starts, where that is asked for


class Spelling(Protocol):
    """How one endpoint's body asks for sequences, and how it writes a choice of the answer."""

    id_prefix: str
    answer_object: str
    event_object: str
    num_prompts: int

    async def prompts(self) -> list[Prompt]:
        """Raises ApiError."""
        ...

    def fields(self, prompt: Prompt) -> dict[str, Any]:
        """The fields of SamplingParams that have another meaning, or another name, elsewhere. Raises ApiError."""
        ...

    def logprob_format(self, prompt: Prompt) -> LogprobFormat | None: ...

    def shown(self, delta: OutputDelta) -> OutputDelta:
        """What of the engine's news the client asked for."""
        ...

    def whole(self, text: str) -> dict[str, Any]:
        """A plain answer's text."""
        ...

    def part(self, text: str, first: bool) -> dict[str, Any]:
        """An event's text; ``first``: of its choice."""
        ...


@dataclass
class Choice:
    """One sequence of the answer."""

    index: int
    prompt: Prompt
    params: SamplingParams
    timer: SequenceTimer
    logprob_format: LogprobFormat | None
    started: bool = False  # something of it was written


@dataclass
class Tally:
    """Counts of one request for its ``usage``. A sequence's first token comes from prefill, at full depth: it counts in
    ``loops`` and not in the mean depth, which is that of the decoded tokens (as RequestOutput has it)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    loops: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    _prefill_loops: dict[int, int] = field(default_factory=dict)  # by choice
    _cached: dict[int, int] = field(
        default_factory=dict
    )  # prompt tokens that no choice of it had to prefill, by prompt

    def add(self, choice: int, prompt: int, delta: OutputDelta) -> None:
        self.accepted_drafts += delta.accepted_drafts
        self.rejected_drafts += delta.rejected_drafts
        exit_depths = delta.exit_depths
        if exit_depths:
            self.completion_tokens += len(exit_depths)
            self.loops += sum(exit_depths)
            if choice not in self._prefill_loops:
                self._prefill_loops[choice] = exit_depths[0]
                self._cached[prompt] = min(self._cached.get(prompt, delta.num_cached_tokens), delta.num_cached_tokens)

    def usage(self) -> dict[str, object]:
        decoded = self.completion_tokens - len(self._prefill_loops)
        loops = self.loops - sum(self._prefill_loops.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "mean_exit_depth": loops / decoded if decoded else None,
            "loops": self.loops,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_drafts,
                "rejected_prediction_tokens": self.rejected_drafts,
            },
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class Call:
    """One request of a generating endpoint."""

    def __init__(
        self, service: Service, body: GenerationFields, spelling: Spelling, client: int, names: RequestNames
    ) -> None:
        """``client``: the number of its API key. Raises ApiError for a ``Last-Event-ID`` that nothing can follow."""
        self._client = client
        self._service = service
        self._body = body
        self._spelling = spelling
        self._n = body.n or 1
        self._timeout_s = body.timeout_s if body.timeout_s is not None else service.config.default_timeout_s
        self._with_depths = bool(body.return_exit_depths)
        self._with_tokens = bool(body.return_token_ids) or service.texts.tokenizer is None
        name = names.name(body)
        self._id = name or f"{spelling.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices: list[Choice] = []
        self._tally = Tally()
        self._number = spelling.num_prompts * self._n
        kept = name is not None and body.stream and self._number <= MAX_CHOICES and service.engine.keeps_answers
        self._form = form_of(body) if kept else None
        self._answer: KeptAnswer | None = None  # that goes on
        self._positions = Positions(self._number)
        if names.last_event is not None:
            self._go_on_after(names.last_event)

    def _go_on_after(self, last: LastEvent) -> None:
        service = self._service
        answer = service.engine.kept_answer(engine_name(last.request_id, self._client))
        keep_s = service.config.keep_answers_s if service.engine.keeps_answers else 0.0
        self._answer = check_resumable(answer, last, self._body, keep_s)
        self._id, self._created, self._form = last.request_id, self._answer.created, self._answer.form
        self._positions = Positions(self._number, last.counts)

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        outputs: dict[int, OutputDelta] = {}
        async with self._running() as batches:
            async for batch in batches:
                for index, news in batch:
                    delta = self._taken(self._choices[index], news)
                    if index in outputs:
                        outputs[index].append(delta)
                    else:
                        outputs[index] = delta
        return {
            **self._head(self._spelling.answer_object),
            "choices": [self._whole(choice, outputs[choice.index]) for choice in self._choices],
            "usage": self._tally.usage(),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The same as server-sent events, one for what has come for one choice; those that are there at once come
        together."""
        event = EventEncoder(self._head(self._spelling.event_object)).event
        async with self._running() as batches:
            replayed = self._answer is not None
            async for batch in batches:
                replayed = replayed and bool(batch)
                events = []
                for index, news in batch:
                    choice = self._choices[index]
                    part = self._part(choice, self._taken(choice, news, replayed))
                    if self._form is None:
                        events.append(event({"choices": [part]}))
                    elif not self._positions.has(index, news):
                        if replayed and self._positions.lacks_only_the_end(index, news):
                            part = self._part(choice, replace(news, text="", token_ids=[], exit_depths=[], logprobs=[]))
                        events.append(event({"choices": [part]}, self._positions.event_id(self._id)))
                if events:
                    yield events[0] if len(events) == 1 else b"".join(events)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event({"choices": [], "usage": self._tally.usage()})

    def _head(self, kind: str) -> dict[str, Any]:
        """What all events of one answer share."""
        return {"id": self._id, "object": kind, "created": self._created, "model": self._service.model_name}

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[AsyncGenerator[list[IndexedDelta], None]]:
        """The engine's news of all choices; leaving aborts what still runs. Raises ApiError."""
        service = self._service
        with service.limit.places(self._number, self._client):
            try:
                await self._prepare()
                with contextlib.ExitStack() as timers:  # inside: a refusal of the engine was never started
                    for choice in self._choices:
                        timers.enter_context(choice.timer)
                    requests = [(choice.prompt.ids, choice.params) for choice in self._choices]
                    if self._answer is None:
                        name = engine_name(self._id, self._client)
                        news = service.engine.generate_all(requests, name, self._client, self._form)
                    else:
                        news = service.engine.resume_all(self._answer, requests, self._client)
                    async with contextlib.aclosing(news) as batches:
                        yield batches
            except RequestError as error:
                raise renamed(error, self._body) from None

    async def _prepare(self) -> None:
        """The choices, ``n`` of each prompt in turn. Raises ApiError or RequestError (400)."""
        service, body, spelling = self._service, self._body, self._spelling
        for prompt in await spelling.prompts():
            fields = (
                {**service.sampling_defaults, **sampling_fields(body)}
                | spelling.fields(prompt)
                | {"timeout_s": self._timeout_s}
            )
            self._tally.prompt_tokens += len(prompt.ids)
            for number in range(self._n):
                if body.seed is not None:
                    fields["seed"] = (body.seed + number) & ALL_BITS
                self._choices.append(
                    Choice(
                        len(self._choices),
                        prompt,
                        SamplingParams(**fields),
                        service.metrics.sequence(len(prompt.ids)),
                        spelling.logprob_format(prompt),
                    )
                )

    def _taken(self, choice: Choice, news: OutputDelta, replayed: bool = False) -> OutputDelta:
        """What the client is shown of the news, which are counted; times are those of what is new. Raises ApiError (504) at
        the deadline."""
        if news.finish_reason is FinishReason.TIMEOUT:
            raise ApiError(504, f"timeout_s: not finished after {self._timeout_s:g} s", code="timeout")
        depths = [] if replayed else news.exit_depths
        choice.timer.tokens(depths, news.finish_reason, time.monotonic())
        delta = self._spelling.shown(news)
        self._tally.add(choice.index, choice.index // self._n, delta)
        return delta

    def _whole(self, choice: Choice, output: OutputDelta) -> dict[str, Any]:
        return {**self._fields(choice, output), **self._spelling.whole(choice.prompt.echo + output.text)}

    def _part(self, choice: Choice, delta: OutputDelta) -> dict[str, Any]:
        first, choice.started = not choice.started, True
        text = choice.prompt.echo + delta.text if first else delta.text
        return {**self._fields(choice, delta), **self._spelling.part(text, first)}

    def _fields(self, choice: Choice, delta: OutputDelta) -> dict[str, Any]:
        """A choice apart from its text."""
        fields: dict[str, Any] = {
            "index": choice.index,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "logprobs": None,
        }
        if choice.logprob_format is not None:
            fields["logprobs"] = choice.logprob_format(delta.prompt_logprobs, delta.logprobs)
        if self._with_depths:
            fields["exit_depths"] = delta.exit_depths
        if self._with_tokens:
            fields["token_ids"] = delta.token_ids
        return fields
