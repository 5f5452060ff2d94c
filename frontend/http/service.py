"""What every endpoint shares: the engine with its edge, and the pieces that answers are made of."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from pydantic import BaseModel

from depthbatch.common.errors import RequestError
from depthbatch.frontend.http.admission import Admission
from depthbatch.frontend.http.choice import Choice
from depthbatch.frontend.http.constraint import constraint_fields, renamed
from depthbatch.frontend.http.contract import Engine
from depthbatch.frontend.http.errors import ApiError, bad_value
from depthbatch.frontend.http.generation import Generation, Job, Piece, Registry
from depthbatch.frontend.http.logprobs import ChatLogprobs, CompletionLogprobs, LogprobFormat
from depthbatch.frontend.http.schemas import ChatRequest, CompletionRequest, ErrorAnswer, GenerationFields
from depthbatch.frontend.http.settings import HttpConfig
from depthbatch.frontend.http.texts import Texts
from depthbatch.frontend.http.unsupported import check_extras
from depthbatch.frontend.metrics import FrontendMetrics
from depthbatch.frontend.params import SEED_MASK, SamplingParams, check_length, check_token_ids

GenerationRequest = CompletionRequest | ChatRequest

# body fields that go to the engine under their own name when the client sets them
ENGINE_FIELDS = (
    "temperature", "top_p", "min_p", "stop_token_ids", "min_tokens", "ignore_eos", "priority",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "gate", "exit_threshold", "min_loops", "max_loops", "num_loops", "exit_depths",
)  # fmt: skip


class Head(NamedTuple):
    """What all events of one answer share."""

    id: str
    request_id: str  # the client's name for it: what /abort takes
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Service:
    """The engine, its texts and its edge, handed to every router."""

    def __init__(self, engine: Engine, texts: Texts, config: HttpConfig, model_name: str) -> None:
        self.engine = engine
        self.texts = texts
        self.config = config
        self.model_name = model_name
        self.started_s = int(time.time())
        self.metrics = FrontendMetrics(engine.info.r_max)
        self.admission = Admission(config.max_requests, self.metrics)
        self.registry = Registry(engine)
        self._generation = Generation(engine, self.admission, self.registry, self.metrics)

    def check(self, body: GenerationFields) -> None:
        """Refuses what can be refused without tokens. Raises ApiError."""
        self.check_model(body.model)
        check_extras(body.model_extra)
        if (body.n or 1) > self.config.max_n:
            raise bad_value("n", f"{body.n} is more than this server's limit of {self.config.max_n}")
        if body.stream_options is not None and not body.stream:
            raise bad_value("stream_options", "only with stream")

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(404, f"model: {name[:200]!r} is not served here", param="model", code="model_not_found")

    def head(self, kind: str, client_id: str | None) -> Head:
        request_id = client_id or f"{kind}-{uuid.uuid4().hex}"
        return Head(request_id, request_id, int(time.time()), self.model_name)

    def include_usage(self, body: GenerationFields) -> bool:
        return bool(body.stream_options and body.stream_options.include_usage)

    def jobs(self, body: GenerationRequest, prompt_ids: list[int], max_tokens: int, first_index: int) -> list[Job]:
        """One job a choice of one prompt. Raises ApiError or RequestError (400)."""
        info = self.engine.info
        check_token_ids(prompt_ids, info)
        check_length(len(prompt_ids), max_tokens, info.max_model_len)
        fields = self._engine_fields(body, max_tokens)
        jobs = []
        try:
            for choice in range(body.n or 1):
                if body.seed is not None:
                    fields["seed"] = (body.seed + choice) & SEED_MASK
                jobs.append(Job(first_index + choice, prompt_ids, SamplingParams(**fields)))
        except RequestError as error:
            raise renamed(error, body) from None
        return jobs

    def _engine_fields(self, body: GenerationRequest, max_tokens: int) -> dict[str, Any]:
        fields = {name: value for name in ENGINE_FIELDS if (value := getattr(body, name)) is not None}
        fields.setdefault("temperature", 1.0)
        fields |= constraint_fields(body)
        fields["max_tokens"] = max_tokens
        fields["top_k"] = max(body.top_k or 0, 0)
        if isinstance(body, ChatRequest):
            if body.top_logprobs is not None and not body.logprobs:
                raise bad_value("top_logprobs", "only with logprobs")
            fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        else:
            fields["logprobs"] = body.logprobs
            fields["prompt_logprobs"] = body.logprobs if body.echo else None
        if body.stop:
            fields["stop"] = [body.stop] if isinstance(body.stop, str) else list(body.stop)
        return fields

    async def run(self, jobs: list[Job], body: GenerationRequest, client_id: str) -> AsyncGenerator[Piece, None]:
        """The pieces of all jobs. Raises ApiError; closing it aborts."""
        timeout_s = body.timeout_s if body.timeout_s is not None else self.config.default_timeout_s
        async with aclosing(self._generation.run(jobs, client_id, timeout_s)) as pieces:
            try:
                async for piece in pieces:
                    yield piece
            except RequestError as error:
                raise renamed(error, body) from None

    def choice(self, body: GenerationRequest, job: Job) -> Choice:
        """The shape of one choice of the answer."""
        form: LogprobFormat | None = None
        if isinstance(body, CompletionRequest) and body.logprobs is not None:
            form = CompletionLogprobs(self.texts.tokenizer, job.prompt_ids if body.echo else ())
        elif isinstance(body, ChatRequest) and body.logprobs:
            form = ChatLogprobs(self.texts.tokenizer)
        with_tokens = bool(body.return_token_ids) or self.texts.tokenizer is None
        return Choice(job.index, bool(body.return_exit_depths), with_tokens, form)


def documented(answer: type[BaseModel], *, generates: bool = False) -> dict[str, Any]:
    """Route arguments: the answer's shape for the OpenAPI document, and the errors it may have."""
    statuses = [400, 401, 404, 413, 431, *((500, 503, 504) if generates else ())]
    responses: dict[int | str, dict[str, Any]] = {200: {"model": answer}}
    responses |= {status: {"model": ErrorAnswer} for status in statuses}
    if generates:
        # No type: tools read a stream as its text or, event by event, as objects.
        stream = {"description": "server-sent events, one chunk of the answer each, then [DONE]"}
        responses[200]["content"] = {"text/event-stream": {"schema": stream}}
    return {"responses": responses, "response_model": None}
