"""What routers in front of several servers ask beside the OpenAI API (docs/fleet.md): load, what server and model are, and
what tokens a prompt is."""

import uuid
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from depthbatch import __version__
from depthbatch.common.config import EngineConfig
from depthbatch.common.messages import EngineInfo
from depthbatch.common.stats import CoreStats
from depthbatch.frontend.http.answers import documented, json_answer
from depthbatch.frontend.http.chat import ChatSpelling
from depthbatch.frontend.http.completions import CompletionSpelling
from depthbatch.frontend.http.error_answers import ApiError
from depthbatch.frontend.http.generation import Service, Spelling
from depthbatch.frontend.http.operations import Probe
from depthbatch.frontend.http.schemas import (
    ChatRequest,
    CompletionRequest,
    LoadAnswer,
    LoadsAnswer,
    ModelInfoAnswer,
    RenderedPrompt,
    RenderedPrompts,
    ServerInfoAnswer,
)


def routes(service: Service, probe: Probe) -> APIRouter:
    router = APIRouter()

    async def core() -> CoreStats:
        """Raises ApiError (503)."""
        stats = await probe.core_stats()
        if stats is None:
            raise ApiError(503, "the engine starts", code="engine_dead", headers={"Retry-After": "5"})
        return stats

    @router.get("/get_load", **documented(LoadAnswer, starts=True))
    async def get_load() -> Response:
        """Sequences that run and wait, as one number."""
        stats = await core()
        return json_answer({"load": stats.running + stats.waiting})

    @router.get("/v1/loads", **documented(LoadsAnswer, starts=True))
    async def loads() -> Response:
        """Sequences and KV tokens, as SGLang names them; this engine is one rank."""
        return json_answer(
            {"version": __version__, "loads": [load_of(await core(), service.engine.info, probe.config)]}
        )

    @router.get("/get_server_info", **documented(ServerInfoAnswer))
    @router.get("/server_info", **documented(ServerInfoAnswer))
    async def server_info() -> Response:
        """What this server runs with."""
        info, config = service.engine.info, probe.config
        return json_answer(
            {
                "version": __version__,
                "model_path": config.model,
                "served_model_name": service.model_name,
                "tp_size": config.tensor_parallel_size,
                "dp_size": 1,
                "context_length": info.max_model_len,
                "page_size": info.block_size,
                "max_total_num_tokens": kv_tokens(info),
                "max_running_requests": config.max_num_seqs,
                "device": info.device,
                "dtype": info.dtype,
                "kv_layout": info.kv_layout,
                "kv_cache_dtype": info.kv_cache_dtype,
            }
        )

    @router.get("/get_model_info", **documented(ModelInfoAnswer))
    @router.get("/model_info", **documented(ModelInfoAnswer))
    async def model_info() -> Response:
        """What the model is."""
        info = service.engine.info
        return json_answer(
            {
                "model_path": probe.config.model,
                "model_type": info.architecture,
                "is_generation": True,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "preferred_sampling_params": dict(service.sampling_defaults) or None,
            }
        )

    @router.post("/v1/completions/render", **documented(RenderedPrompts))
    async def render(body: CompletionRequest) -> Response:
        """The prompts of a body of /v1/completions as tokens; nothing is generated."""
        service.check(body)
        return json_answer(await _rendered(CompletionSpelling(body, service)))

    @router.post("/v1/chat/completions/render", **documented(RenderedPrompt))
    async def render_chat(body: ChatRequest) -> Response:
        """The prompt of a body of /v1/chat/completions as tokens; nothing is generated."""
        service.check(body)
        (prompt,) = await _rendered(ChatSpelling(body, service))
        return json_answer(prompt)

    async def _rendered(spelling: Spelling) -> list[dict[str, Any]]:
        prompts = await spelling.prompts()
        return [
            {
                "request_id": f"{spelling.id_prefix}-{uuid.uuid4().hex}",
                "model": service.model_name,
                "token_ids": prompt.ids,
            }
            for prompt in prompts
        ]

    return router


def kv_tokens(info: EngineInfo) -> int:
    """Tokens that the KV blocks hold; block 0 is a dummy."""
    return (info.num_blocks - 1) * info.block_size


def load_of(stats: CoreStats, info: EngineInfo, config: EngineConfig) -> dict[str, Any]:
    """One rank of /v1/loads."""
    used = round(stats.kv_usage * (info.num_blocks - 1)) * info.block_size
    prefixes = stats.prefix_cache
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + stats.waiting_tokens,
        "max_total_num_tokens": kv_tokens(info),
        "max_running_requests": config.max_num_seqs,
        "token_usage": round(stats.kv_usage, 4),
        "cache_hit_rate": round(prefixes.hits / prefixes.queries, 4) if prefixes and prefixes.queries else 0.0,
    }
