"""/v1/chat/completions: a conversation in the model's own chat template; how its body asks and its choices are written."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from depthbatch.frontend.http.answers import EventStream, answer, documented
from depthbatch.frontend.http.edge import client_of
from depthbatch.frontend.http.error_answers import ApiError, bad_value
from depthbatch.frontend.http.generation import Call, Prompt, Service
from depthbatch.frontend.http.logprobs import ChatLogprobs, TokenNames
from depthbatch.frontend.http.resumption import RequestNames
from depthbatch.frontend.http.schemas import ChatAnswer, ChatRequest
from depthbatch.frontend.output import OutputDelta


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", **documented(ChatAnswer, generates=True))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation through the model's own chat template."""
        service.check(body)
        names = RequestNames.of(request.headers)
        call = Call(service, body, ChatSpelling(body, service), client_of(request), names)
        if body.stream:
            return EventStream(call.stream(), names.echoed)
        return await answer(request, call.collect(), names.echoed)

    return router


class ChatSpelling:
    """A message of the assistant."""

    id_prefix = "chatcmpl"
    answer_object = "chat.completion"
    event_object = "chat.completion.chunk"
    num_prompts = 1

    def __init__(self, body: ChatRequest, service: Service) -> None:
        self._body = body
        self._texts = service.texts
        self._default_max_tokens: int | None = service.sampling_defaults.get("max_tokens")
        self._max_model_len = service.engine.info.max_model_len

    async def prompts(self) -> list[Prompt]:
        ids = await self._texts.encode_chat(self._body.messages, self._body, self._max_model_len)
        if len(ids) >= self._max_model_len:
            raise ApiError(
                400,
                f"messages of {len(ids)} tokens leave no room: max_model_len is {self._max_model_len}",
                param="messages",
                code="context_length_exceeded",
            )
        return [Prompt(ids)]

    def fields(self, prompt: Prompt) -> dict[str, Any]:
        body = self._body
        if body.top_logprobs and not body.logprobs:
            raise bad_value("top_logprobs", "only with logprobs")
        room = self._max_model_len - len(prompt.ids)
        default = min(self._default_max_tokens or room, room)
        return {
            "max_tokens": body.max_completion_tokens or body.max_tokens or default,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }

    def logprob_format(self, prompt: Prompt) -> ChatLogprobs | None:
        names = TokenNames(self._texts.tokenizer, bool(self._body.return_tokens_as_token_ids))
        return ChatLogprobs(names) if self._body.logprobs else None

    def shown(self, delta: OutputDelta) -> OutputDelta:
        return delta

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def part(self, text: str, first: bool) -> dict[str, Any]:
        """The first event of a choice names the role."""
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}
