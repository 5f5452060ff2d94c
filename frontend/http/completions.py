"""/v1/completions: one or many prompts, text or token ids, plain or streamed."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from depthbatch.frontend.http.answers import EventStream, answer, event
from depthbatch.frontend.http.errors import bad_value
from depthbatch.frontend.http.generation import Job, Piece, Tally
from depthbatch.frontend.http.schemas import CompletionAnswer, CompletionRequest
from depthbatch.frontend.http.service import Service, documented

DEFAULT_MAX_TOKENS = 16


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", **documented(CompletionAnswer, generates=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues a prompt, or each of several; JSON, or server-sent events with stream."""
        service.check(body)
        call = _Call(service, body)
        if body.stream:
            return EventStream(call.stream())
        return await answer(request, call.collect())

    return router


class _Call:
    """One request."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self.service = service
        self.body = body
        self.head = service.head("cmpl", body.request_id)
        self.n = body.n or 1
        self.prompts: list[str | list[int]] = _prompts(body.prompt)
        self.max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if not self.max_tokens and not body.echo:
            raise bad_value("max_tokens", "0 only with echo: there would be nothing to answer")

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        with self.service.admission.admit(len(self.prompts) * self.n):
            jobs, heads = await self._prepare()
            choices = [self.service.choice(self.body, job) for job in jobs]
            texts = list(heads)
            tally = self._tally(jobs)
            async for piece in self.service.run(jobs, self.body, self.head.request_id):
                piece = self._shown(piece)
                texts[piece.choice] += piece.text
                choices[piece.choice].add(piece)
                tally.add(piece)
        return {
            **self.head.fields("text_completion"),
            "choices": [{**choice.fields(), "text": text} for choice, text in zip(choices, texts, strict=True)],
            "usage": tally.usage(),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The same as events; the prompt of an echo comes with a choice's first event."""
        with self.service.admission.admit(len(self.prompts) * self.n):
            jobs, heads = await self._prepare()
            choices = [self.service.choice(self.body, job) for job in jobs]
            fields = self.head.fields("text_completion")
            tally = self._tally(jobs)
            pieces = self.service.run(jobs, self.body, self.head.request_id)
            try:
                async for piece in pieces:
                    piece = self._shown(piece)
                    tally.add(piece)
                    text, heads[piece.choice] = heads[piece.choice] + piece.text, ""
                    choice = {**choices[piece.choice].news(piece), "text": text}
                    yield event({**fields, "choices": [choice]})
            finally:
                await pieces.aclose()
            if self.service.include_usage(self.body):
                yield event({**fields, "choices": [], "usage": tally.usage()})

    def _shown(self, piece: Piece) -> Piece:
        """With max_tokens 0 the prompt alone: its scores come with a first token, which prefill samples anyway."""
        if self.max_tokens:
            return piece
        reason = "length" if piece.finish_reason == "stop" else piece.finish_reason
        return piece._replace(
            text="", token_ids=(), exit_depths=(), logprobs=(), finish_reason=reason, stop_reason=None
        )

    def _tally(self, jobs: list[Job]) -> Tally:
        return Tally(sum(len(job.prompt_ids) for job in jobs[:: self.n]))

    async def _prepare(self) -> tuple[list[Job], list[str]]:
        """The jobs in choice order, and the text each choice starts with (its prompt with ``echo``)."""
        body, texts = self.body, self.service.texts
        jobs: list[Job] = []
        heads: list[str] = []
        for prompt in self.prompts:
            ids = prompt
            if isinstance(ids, str):
                ids = await texts.encode(ids, body.add_special_tokens is not False, bool(body.parse_special_tokens))
                if not ids:
                    raise bad_value("prompt", "no tokens in it")
            head = ""
            if body.echo:
                head = prompt if isinstance(prompt, str) else await texts.decode(ids)
            jobs += self.service.jobs(body, ids, max(self.max_tokens, 1), first_index=len(jobs))
            heads += [head] * self.n
        return jobs, heads


def _prompts(prompt: object) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    assert isinstance(prompt, list)
    return [prompt] if isinstance(prompt[0], int) else list(prompt)
