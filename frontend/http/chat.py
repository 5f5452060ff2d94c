"""/v1/chat/completions: the model's own chat template, then the same generation as completions."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from depthbatch.frontend.http.answers import EventStream, answer, event
from depthbatch.frontend.http.errors import ApiError
from depthbatch.frontend.http.generation import Job, Tally
from depthbatch.frontend.http.schemas import ChatAnswer, ChatRequest
from depthbatch.frontend.http.service import Service, documented


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", **documented(ChatAnswer, generates=True))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation through the model's own chat template."""
        service.check(body)
        call = _Call(service, body)
        if body.stream:
            return EventStream(call.stream())
        return await answer(request, call.collect())

    return router


class _Call:
    """One request."""

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self.service = service
        self.body = body
        self.head = service.head("chatcmpl", body.request_id)
        self.n = body.n or 1

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        with self.service.admission.admit(self.n):
            jobs = await self._prepare()
            choices = [self.service.choice(self.body, job) for job in jobs]
            texts = [""] * len(jobs)
            tally = Tally(len(jobs[0].prompt_ids))
            async for piece in self.service.run(jobs, self.body, self.head.request_id):
                texts[piece.choice] += piece.text
                choices[piece.choice].add(piece)
                tally.add(piece)
        return {
            **self.head.fields("chat.completion"),
            "choices": [
                {**choice.fields(), "message": {"role": "assistant", "content": text}}
                for choice, text in zip(choices, texts, strict=True)
            ],
            "usage": tally.usage(),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The same as events; the first event of a choice names the role."""
        with self.service.admission.admit(self.n):
            jobs = await self._prepare()
            choices = [self.service.choice(self.body, job) for job in jobs]
            fields = self.head.fields("chat.completion.chunk")
            tally = Tally(len(jobs[0].prompt_ids))
            silent = set(range(len(jobs)))
            pieces = self.service.run(jobs, self.body, self.head.request_id)
            try:
                async for piece in pieces:
                    tally.add(piece)
                    delta = {"content": piece.text}
                    if piece.choice in silent:
                        silent.discard(piece.choice)
                        delta = {"role": "assistant", **delta}
                    yield event({**fields, "choices": [{**choices[piece.choice].news(piece), "delta": delta}]})
            finally:
                await pieces.aclose()
            if self.service.include_usage(self.body):
                yield event({**fields, "choices": [], "usage": tally.usage()})

    async def _prepare(self) -> list[Job]:
        body = self.body
        ids = await self.service.texts.encode_chat(body.messages, body)
        room = self.service.engine.info.max_model_len - len(ids)
        if room < 1:
            raise ApiError(
                400,
                f"messages of {len(ids)} tokens leave no room: max_model_len is {self.service.engine.info.max_model_len}",
                param="messages",
                code="context_length_exceeded",
            )
        return self.service.jobs(body, ids, body.max_completion_tokens or body.max_tokens or room, first_index=0)
