"""/v1/completions: one or many prompts, text or token ids; how its body asks and its choices are written."""

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from depthbatch.common.messages import FinishReason
from depthbatch.frontend.http.answers import EventStream, answer, documented
from depthbatch.frontend.http.edge import client_of
from depthbatch.frontend.http.error_answers import bad_value
from depthbatch.frontend.http.generation import Call, Prompt, Service
from depthbatch.frontend.http.logprobs import CompletionLogprobs, Echo, TokenNames
from depthbatch.frontend.http.resumption import RequestNames
from depthbatch.frontend.http.schemas import CompletionAnswer, CompletionRequest
from depthbatch.frontend.output import OutputDelta

DEFAULT_MAX_TOKENS = 16


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", **documented(CompletionAnswer, generates=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues a prompt, or each of several; JSON, or server-sent events with stream."""
        service.check(body)
        names = RequestNames.of(request.headers)
        call = Call(service, body, CompletionSpelling(body, service), client_of(request), names)
        if body.stream:
            return EventStream(call.stream(), names.echoed)
        return await answer(request, call.collect(), names.echoed)

    return router


class CompletionSpelling:
    """Text that continues text; with ``echo`` after the prompt itself."""

    id_prefix = "cmpl"
    answer_object = event_object = "text_completion"

    def __init__(self, body: CompletionRequest, service: Service) -> None:
        """Raises ApiError."""
        self._body = body
        self._texts = service.texts
        self._max_model_len = service.engine.info.max_model_len
        self._prompts = _as_list(body.prompt)
        self._max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if not self._max_tokens and not body.echo:
            raise bad_value("max_tokens", "0 only with echo: there would be nothing to answer")
        self.num_prompts = len(self._prompts)

    async def prompts(self) -> list[Prompt]:
        return [await self._prompt(given) for given in self._prompts]

    async def _prompt(self, given: str | list[int]) -> Prompt:
        body, texts = self._body, self._texts
        scored = bool(body.echo) and body.logprobs is not None
        if not isinstance(given, str):
            text = await texts.decode(given) if body.echo else ""
            return Prompt(given, text, await texts.decoded_offsets(given) if scored else None)
        plain, special = body.add_special_tokens is not False, bool(body.parse_special_tokens)
        ids = await texts.encode(given, plain, special, self._max_model_len)
        if not ids:
            raise bad_value("prompt", "no tokens in it")
        offsets = await texts.offsets(given, plain, special) if scored else None
        return Prompt(ids, given if body.echo else "", offsets)

    def fields(self, prompt: Prompt) -> dict[str, Any]:
        body = self._body
        return {
            "max_tokens": max(self._max_tokens, 1),
            "logprobs": body.logprobs,
            "prompt_logprobs": body.logprobs if body.echo else None,
        }

    def logprob_format(self, prompt: Prompt) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        tokenizer = self._texts.tokenizer
        detokenizer = (
            tokenizer.detokenizer(prompt.ids, self._body.skip_special_tokens is not False)
            if tokenizer is not None
            else None
        )
        echo = None if prompt.offsets is None else Echo(prompt.ids, prompt.offsets, len(prompt.echo))
        return CompletionLogprobs(TokenNames(tokenizer, bool(self._body.return_tokens_as_token_ids)), detokenizer, echo)

    def shown(self, delta: OutputDelta) -> OutputDelta:
        """With max_tokens 0 the prompt alone: its scores come with a first token, which prefill samples anyway."""
        if self._max_tokens:
            return delta
        reason = FinishReason.LENGTH if delta.finish_reason is FinishReason.STOP else delta.finish_reason
        return dataclasses.replace(
            delta, text="", token_ids=[], exit_depths=[], logprobs=[], finish_reason=reason, stop_reason=None
        )

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def part(self, text: str, first: bool) -> dict[str, Any]:
        return {"text": text}


def _as_list(prompt: object) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    assert isinstance(prompt, list)
    return [prompt] if isinstance(prompt[0], int) else list(prompt)
