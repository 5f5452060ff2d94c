"""Endpoints about the server: models, tokens, abort, health, readiness, metrics, stages, version."""

import asyncio
import contextlib
import os
import stat
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response

from depthbatch import __version__
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import EngineDeadError
from depthbatch.common.stats import CoreStats
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.http.answers import documented, json_answer
from depthbatch.frontend.http.edge import client_of
from depthbatch.frontend.http.error_answers import ApiError, bad_value
from depthbatch.frontend.http.generation import Service
from depthbatch.frontend.http.request_fields import check_body
from depthbatch.frontend.http.schemas import (
    AbortAnswer,
    AbortRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    HealthAnswer,
    ModelCard,
    ModelList,
    ProcessHealth,
    ReadyAnswer,
    StageTraceAnswer,
    TokenizeAnswer,
    TokenizeRequest,
    VersionAnswer,
)
from depthbatch.frontend.process_metrics import ProcessCollector
from depthbatch.frontend.siblings import SharedMetrics, Siblings

STATS_WAIT_S = 0.5
LAST_STAGES = 400  # that are told
STAGE_BYTES = 512  # a line of the trace is mostly shorter
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Probe(Protocol):
    """Health by progress and the joined metrics; never asks the engine, only reads what it has pushed."""

    @property
    def config(self) -> EngineConfig: ...
    def health(self) -> HealthAnswer: ...
    async def core_stats(self) -> CoreStats | None:
        """Of the scheduler's core, as it is now; None where there is none yet."""
        ...

    async def metrics_text(self) -> bytes: ...
    def stages(self) -> list[bytes] | None:
        """The last stages as JSON, oldest first; None where nothing writes them down."""
        ...


class EngineProbe:
    """Reads what scheduler and worker push, and asks the scheduler, between two stages, for its counters."""

    def __init__(
        self, engine: AsyncEngine, metrics: SharedMetrics, stall_s: float, siblings: Siblings | None = None
    ) -> None:
        self._siblings = siblings
        self._engine = engine
        self._stall_s = stall_s
        self._processes = ProcessCollector(lambda: engine.health(stall_s), engine.info)
        self._scraped = CollectorRegistry()
        self._scraped.register(metrics)
        self._scraped.register(self._processes)

    def health(self) -> HealthAnswer:
        health = self._engine.health(self._stall_s)
        processes = {name: ProcessHealth(**asdict(process)) for name, process in health.processes.items()}
        return HealthAnswer(status=health.status, processes=processes)

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    async def core_stats(self) -> CoreStats | None:
        await self._refresh()
        return None if self._processes.stats is None else self._processes.stats.core

    async def _refresh(self) -> None:
        """A scheduler that does not answer in time is reported with what it told last."""
        with contextlib.suppress(TimeoutError, EngineDeadError):
            async with asyncio.timeout(STATS_WAIT_S):
                self._processes.stats = await self._engine.scheduler_stats()

    async def metrics_text(self) -> bytes:
        """Everything that one scrape gets."""
        await self._refresh()
        if self._siblings is not None:
            await self._siblings.write_metrics()
        return generate_latest(self._scraped)

    def stages(self) -> list[bytes] | None:
        path = self._engine.config.stage_trace
        return None if path is None else last_lines(path, LAST_STAGES)


def last_lines(path: str, count: int) -> list[bytes] | None:
    """Whole lines at the end of a file that may be written to; None where it is no ordinary file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not make the event loop wait
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        start = max(0, found.st_size - count * STAGE_BYTES)
        file.seek(start)
        lines = file.read(found.st_size - start).split(b"\n")[:-1]
    return lines[1 if start else 0 :][-count:]


def routes(service: Service, probe: Probe) -> APIRouter:
    router = APIRouter()
    _add_models(router, service)
    _add_tokens(router, service)
    _add_state(router, service, probe)
    return router


def _add_models(router: APIRouter, service: Service) -> None:
    def card() -> dict[str, Any]:
        info = service.engine.info
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started_s,
            "owned_by": "depthbatch",
            "max_model_len": info.max_model_len,
            "min_loops": info.r_min,
            "max_loops": info.r_max,
            "gates": [gate.label for gate in info.gates],
            "gate": info.default_gate.label,
            "exit_threshold": info.default_threshold,
            "max_logprobs": info.max_logprobs,
            "draft_lanes": info.draft_lanes,
        }

    @router.get("/v1/models", **documented(ModelList))
    async def models() -> Response:
        """The served model."""
        return json_answer({"object": "list", "data": [card()]})

    @router.get("/v1/models/{model:path}", **documented(ModelCard))
    async def model_card(model: str) -> Response:
        """One model by name."""
        service.check_model(model)
        return json_answer(card())


def _add_tokens(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", **documented(TokenizeAnswer))
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or a conversation."""
        service.check_model(body.model)
        check_body(body)
        if (body.prompt is None) == (body.messages is None):
            raise bad_value("prompt", "give either prompt or messages")
        most = service.engine.info.max_model_len
        if body.messages is not None:
            ids = await service.texts.encode_chat(body.messages, body, most)
        else:
            assert body.prompt is not None
            ids = await service.texts.encode(
                body.prompt, body.add_special_tokens is not False, bool(body.parse_special_tokens), most
            )
        answer = {"count": len(ids), "max_model_len": most, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = await service.texts.token_strings(ids)
        return json_answer(answer)

    @router.post("/detokenize", **documented(DetokenizeAnswer))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        service.check_model(body.model)
        check_body(body)
        if len(body.tokens) > (most := service.engine.info.max_model_len):
            raise bad_value("tokens", f"{len(body.tokens)} are more than a sequence may hold, {most}")
        largest = max(body.tokens, default=0)
        if largest >= service.engine.info.vocab_size:
            raise bad_value("tokens", f"{largest} is not below the vocabulary size {service.engine.info.vocab_size}")
        return json_answer({"prompt": await service.texts.decode(body.tokens)})

    @router.get("/tokenizer_info", responses={404: {"description": "no tokenizer"}}, response_model=None)
    async def tokenizer_info() -> Response:
        """Facts about the tokenizer."""
        return json_answer(await service.texts.describe())


def _add_state(router: APIRouter, service: Service, probe: Probe) -> None:
    @router.post("/abort", **documented(AbortAnswer))
    async def abort(body: AbortRequest, request: Request) -> Response:
        """Ends requests by name, which belong to the key that they came with; answers which of them were running."""
        client = client_of(request)
        ids = [body.request_id] if isinstance(body.request_id, str) else body.request_id
        names = list(dict.fromkeys(ids))
        found = await asyncio.gather(*(service.abort(name, client) for name in names))
        return json_answer({"aborted": [name for name, known in zip(names, found, strict=True) if known]})

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=None, responses={200: {"model": HealthAnswer}, 503: {"model": HealthAnswer}})
    async def health() -> Response:
        """200 exactly when requests make progress, or none is there."""
        answer = probe.health()
        return JSONResponse(answer.model_dump(), 200 if answer.status == "ok" else 503)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=None, responses={200: {"model": ReadyAnswer}, 503: {"model": ReadyAnswer}})
    async def ready() -> Response:
        """200 when new requests are taken."""
        status = "draining" if service.limit.draining else probe.health().status
        headers = {} if status == "ok" else {"Retry-After": "5"}
        return JSONResponse({"status": status}, 200 if status == "ok" else 503, headers)

    @router.get("/metrics", response_class=PlainTextResponse, response_model=None)
    async def metrics() -> Response:
        """Prometheus metrics of all processes."""
        return Response(await probe.metrics_text(), media_type=METRICS_TYPE)

    @router.get("/stage_trace", **documented(StageTraceAnswer))
    async def stage_trace() -> Response:
        """The last stages that ran, where the server was started with stage-trace."""
        stages = probe.stages()
        if stages is None:
            raise ApiError(404, "this server was started without --stage-trace FILE")
        return Response(b'{"stages":[' + b",".join(stages) + b"]}", media_type="application/json")

    @router.get("/version", response_model=None, responses={200: {"model": VersionAnswer}})
    async def version() -> Response:
        """The server's version."""
        return json_answer({"version": __version__})
