"""What the HTTP layer needs of an engine; AsyncEngine has it, and so has the fake of the tests."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from depthbatch.common.messages import EngineInfo
from depthbatch.frontend.logprobs import TokenLogprobs
from depthbatch.frontend.params import SamplingParams


class Output(Protocol):
    """News of one sequence: ``text`` and ``token_ids`` are what was added since the last output."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def exit_depths(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprobs]: ...
    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]: ...


class Engine(Protocol):
    """A running engine. Closing the generator of ``generate`` aborts its sequence; ``abort`` ends it with "abort"."""

    @property
    def info(self) -> EngineInfo: ...
    def generate(self, prompt: list[int], params: SamplingParams, request_id: str) -> AsyncGenerator[Output, None]: ...
    async def abort(self, request_id: str) -> bool: ...
