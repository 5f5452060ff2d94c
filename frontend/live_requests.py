"""The requests of one engine that have not ended, with all it takes to submit them again. Knows no socket and no process."""

import heapq
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from depthbatch.common.errors import DepthbatchError, RequestError, RequestKillsWorkerError
from depthbatch.common.frames import logprob_fields
from depthbatch.common.messages import EngineInfo, FinishReason, RequestParams, Submit, SubmitAll, TokenEvent
from depthbatch.frontend.grammar import refusal
from depthbatch.frontend.params import INT32_MAX, SamplingParams

# a request's id with what has come for it; an event's prompt_logprobs are those of the whole prompt, with its first token
News = tuple[int, TokenEvent | DepthbatchError]


class Progress(NamedTuple):
    """How far a request has come elsewhere, in the words of a client."""

    token_ids: Sequence[int]
    exit_depths: Sequence[int]  # one a token
    cuts: Sequence[int] = ()  # tokens of each chunk of the prompt's prefill, where the first engine has told


@dataclass
class LiveRequest:
    """What it takes to submit a request again."""

    prompt: bytes  # int32
    params: RequestParams
    client: int = 0
    generated: "array[int]" = field(default_factory=lambda: array("i"))
    depths: bytearray = field(default_factory=bytearray)  # exit depth of each of them
    cuts: bytes = b""  # int32, where the prompt was cut, if that matters
    prompt_logprobs: list[bytes] = field(default_factory=list)  # until they go out with the first token
    prompt_logprobs_sent: int = 0  # prompt tokens whose logprobs have come

    @classmethod
    def begin(
        cls, prompt_ids: Sequence[int], params: RequestParams, client: int = 0, progress: Progress | None = None
    ) -> "LiveRequest":
        """One that begins, or goes on after what another engine has made of it."""
        live = cls(np.asarray(prompt_ids, dtype=np.int32).tobytes(), params, client)
        if progress is not None and progress.token_ids:
            live.generated.extend(progress.token_ids)
            live.depths.extend(progress.exit_depths)
            live.cuts = np.asarray(progress.cuts, dtype="<i4").tobytes()
            live.prompt_logprobs_sent = len(prompt_ids) - 1 if params.prompt_logprobs else 0
        return live

    @classmethod
    def of(cls, submit: Submit) -> "LiveRequest":
        """As it stood when it was submitted."""
        return cls(
            submit.prompt,
            submit.params,
            submit.client,
            array("i", submit.generated),
            bytearray(submit.generated_depths),
            submit.cuts,
            prompt_logprobs_sent=submit.prompt_logprobs_sent,
        )

    def extend(self, event: TokenEvent) -> None:
        """Tokens have come."""
        self.generated.extend(event.token_ids)
        self.depths.extend(event.exit_depths)
        self.cuts = event.cuts or self.cuts


def check_progress(progress: Progress, params: SamplingParams, max_tokens: int, info: EngineInfo) -> None:
    """Raises RequestError unless the request can go on from there, with the draws it would have had."""
    tokens, depths, cuts = progress
    for name, values in zip(("token_ids", "exit_depths", "cuts"), progress, strict=True):
        if set(map(type, values)) - {int}:
            raise RequestError(f"resume.{name} must be a list of whole numbers", "resume")
    if len(tokens) != len(depths):
        raise RequestError(f"resume: {len(tokens)} token_ids with {len(depths)} exit_depths", "resume")
    if len(tokens) > max_tokens:
        raise RequestError(f"resume: {len(tokens)} token_ids are more than max_tokens {max_tokens}", "resume")
    if tokens and (min(tokens) < 0 or max(tokens) >= info.vocab_size):
        raise RequestError(f"resume.token_ids: not all are below the vocabulary size {info.vocab_size}", "resume")
    if tokens and (min(depths) < 1 or max(depths) > info.r_max):
        raise RequestError(f"resume.exit_depths: not all are from 1 to {info.r_max}", "resume")
    if cuts and (min(cuts) < 1 or max(cuts) > INT32_MAX):
        raise RequestError("resume.cuts: not all are token counts", "resume")
    if tokens and params.temperature > 0 and params.seed is None:
        raise RequestError("seed: a request that goes on elsewhere has to name the one it began with", "seed")


class LiveRequests:
    """By id. An id is never used twice; ``next_id`` is the one that the next request gets."""

    def __init__(self, first_id: int, stride: int = 1) -> None:
        """``stride``: from one id to the next; others may have those between."""
        self.next_id = first_id
        self.stride = stride
        self._live: dict[int, LiveRequest] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (monotonic s, request id)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, live: LiveRequest, timeout_s: float | None = None) -> int:
        """A request with parameters that were checked; returns its id."""
        request_id = self.next_id
        self.next_id += self.stride
        self._live[request_id] = live
        if timeout_s is not None:
            heapq.heappush(self._deadlines, (time.monotonic() + timeout_s, request_id))
        return request_id

    def is_live(self, request_id: int) -> bool:
        return request_id in self._live

    def drop(self, request_id: int) -> bool:
        """False when it is not live (any more)."""
        return self._live.pop(request_id, None) is not None

    def submit(self, request_id: int) -> Submit:
        """The message that begins it, or goes on with it after the tokens that have come."""
        live = self._live[request_id]
        generated, depths = live.generated.tobytes(), bytes(live.depths)
        resumed = (generated, depths, live.prompt_logprobs_sent, live.cuts)
        return Submit(request_id, live.prompt, live.params, *resumed, live.client)

    def submit_all(self) -> SubmitAll:
        return SubmitAll(tuple(map(self.submit, self._live)))

    def take(self, event: TokenEvent, info: EngineInfo) -> News | None:
        """Books what the scheduler tells. None: there is nothing to tell yet, or nobody (aborted here, not yet there)."""
        live = self._live.get(event.request_id)
        if live is None:
            return None
        if event.prompt_logprobs:
            live.prompt_logprobs.append(event.prompt_logprobs)
            live.prompt_logprobs_sent += len(event.prompt_logprobs) // (4 * logprob_fields(info.max_logprobs))
        if event.finish_reason is None and not event.token_ids:
            return None
        live.extend(event)
        if event.finish_reason is not None:
            del self._live[event.request_id]
        if event.kills_worker:
            return event.request_id, RequestKillsWorkerError(event.failure)
        if event.finish_reason is FinishReason.ERROR:
            return event.request_id, refusal(live.params.grammar, event.failure)
        if live.prompt_logprobs:
            rows = b"".join(live.prompt_logprobs) if event.token_ids else b""  # else they are not all there
            event = msgspec.structs.replace(event, prompt_logprobs=rows)
            live.prompt_logprobs.clear()
        return event.request_id, event

    def seconds_to_deadline(self, most_s: float) -> float:
        """Until the first deadline, 0 to ``most_s``."""
        left_s = self._deadlines[0][0] - time.monotonic() if self._deadlines else most_s
        return max(0.0, min(most_s, left_s))

    def overdue(self) -> Iterator[int]:
        """Ids whose deadline is over, each once; some may have ended before."""
        now_s = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            yield heapq.heappop(self._deadlines)[1]

    def fail(self, error: DepthbatchError) -> list[News]:
        """Ends them all."""
        news: list[News] = [(request_id, error) for request_id in self._live]
        self._live.clear()
        return news
