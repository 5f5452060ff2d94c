"""One HTTP request as sequences of the engine: fan-out, merging, deadline, abort. Knows nothing of response shapes."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from depthbatch.common.errors import EngineDeadError
from depthbatch.frontend.background import panics_as_errors
from depthbatch.frontend.http.admission import Admission
from depthbatch.frontend.http.contract import Engine, Output
from depthbatch.frontend.http.errors import ApiError
from depthbatch.frontend.logprobs import TokenLogprobs
from depthbatch.frontend.metrics import FrontendMetrics, SequenceTimer
from depthbatch.frontend.params import SamplingParams


@dataclass(frozen=True)
class Job:
    """One sequence to generate: choice ``index`` of the answer."""

    index: int
    prompt_ids: list[int]
    params: SamplingParams


class Piece(NamedTuple):
    """News of one choice."""

    choice: int
    text: str
    token_ids: Sequence[int]
    exit_depths: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Sequence[TokenLogprobs]  # one a token, if asked for
    prompt_logprobs: Sequence[TokenLogprobs]  # of the prompt's tokens but the first, once, if asked for


@dataclass
class Tally:
    """Counts of one request for its ``usage``. A sequence's first token comes from prefill, at full depth: it counts in
    ``loops`` and not in the mean depth, which is that of the decoded tokens (as RequestOutput has it)."""

    prompt_tokens: int
    completion_tokens: int = 0
    loops: int = 0
    _prefill_loops: dict[int, int] = field(default_factory=dict)  # by choice

    def add(self, piece: Piece) -> None:
        self.completion_tokens += len(piece.token_ids)
        self.loops += sum(piece.exit_depths)
        if piece.exit_depths:
            self._prefill_loops.setdefault(piece.choice, piece.exit_depths[0])

    def usage(self) -> dict[str, object]:
        decoded = self.completion_tokens - len(self._prefill_loops)
        loops = self.loops - sum(self._prefill_loops.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "mean_exit_depth": loops / decoded if decoded else None,
            "loops": self.loops,
        }


@dataclass
class Registry:
    """Which engine sequences belong to which client id. Client ids repeat; internal ids are ours and never do."""

    engine: Engine
    _by_client_id: dict[str, set[str]] = field(default_factory=dict)
    _count: Iterator[int] = field(default_factory=itertools.count)

    @contextlib.contextmanager
    def sequence(self, client_id: str) -> Iterator[str]:
        internal_id = f"http-{next(self._count)}"
        self._by_client_id.setdefault(client_id, set()).add(internal_id)
        try:
            yield internal_id
        finally:
            ids = self._by_client_id[client_id]
            ids.discard(internal_id)
            if not ids:
                del self._by_client_id[client_id]

    async def abort(self, client_id: str) -> bool:
        """Ends every sequence of that client id; False if there is none. Twice, or for an unknown id, is fine."""
        ids = list(self._by_client_id.get(client_id, ()))
        for internal_id in ids:
            await self.engine.abort(internal_id)
        return bool(ids)

    async def abort_all(self) -> int:
        """Ends everything; returns how many client ids that were."""
        client_ids = list(self._by_client_id)
        for client_id in client_ids:
            await self.abort(client_id)
        return len(client_ids)


@dataclass
class Generation:
    """Runs jobs on the engine; every stream of every endpoint goes through ``run``."""

    engine: Engine
    admission: Admission
    registry: Registry
    metrics: FrontendMetrics

    async def run(self, jobs: list[Job], client_id: str, timeout_s: float | None) -> AsyncGenerator[Piece, None]:
        """The pieces of all jobs as they come; closing the generator aborts what still runs.

        Raises ApiError (504) at the deadline, (500) when the engine gives a sequence up.
        """
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        merged = self._one(jobs[0], client_id) if len(jobs) == 1 else self._many(jobs, client_id)
        async with contextlib.aclosing(merged) as pieces:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise ApiError(504, f"timeout_s: not finished after {timeout_s:g} s", code="timeout") from None
                yield piece

    async def _one(self, job: Job, client_id: str) -> AsyncGenerator[Piece, None]:
        timer = self.metrics.sequence(len(job.prompt_ids))
        with self.registry.sequence(client_id) as internal_id, timer:
            outputs = self.engine.generate(job.prompt_ids, job.params, internal_id)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield _piece(job.index, output, timer)
            if timer.finish_reason is None:
                raise EngineDeadError("the engine ended a request without an answer")

    async def _many(self, jobs: list[Job], client_id: str) -> AsyncGenerator[Piece, None]:
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

        async def pump(job: Job) -> None:
            try:
                with panics_as_errors():
                    async with contextlib.aclosing(self._one(job, client_id)) as pieces:
                        async for piece in pieces:
                            queue.put_nowait(piece)
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(job)) for job in jobs]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _piece(index: int, output: Output, timer: SequenceTimer) -> Piece:
    if output.finish_reason == "error":
        raise ApiError(500, "the engine failed on this request", code="engine_error")
    timer.tokens(output.exit_depths, output.finish_reason, time.monotonic())
    return Piece(
        index,
        output.text,
        output.token_ids,
        output.exit_depths,
        output.finish_reason,
        output.stop_reason,
        output.logprobs,
        output.prompt_logprobs,
    )
