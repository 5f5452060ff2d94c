"""What users get back, and how a request's token updates become it: text, ids, depths, one finish reason."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from depthbatch.frontend.detokenizer import Detokenizer, StopChecker
from depthbatch.frontend.logprobs import TokenLogprobs, read_scores


class Update(NamedTuple):
    """News of one request, in the order of its tokens. ``finish_reason`` or ``error`` is set on the last one."""

    request_id: int
    token_ids: Sequence[int] = ()
    exit_depths: Sequence[int] = ()
    finish_reason: str | None = None  # "stop", "length", "abort", "timeout"
    stop_reason: int | None = None  # the stop token id
    error: Exception | None = None  # RequestError or EngineDeadError: the request has failed
    logprobs: bytes = b""  # scores of the tokens, one row each (common.frames)
    prompt_logprobs: bytes = b""  # scores of all prompt tokens but the first, with the first output token

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass
class OutputDelta:
    """What is new since the last delta of this request."""

    request_id: str
    text: str
    token_ids: list[int]
    exit_depths: list[int]  # loops of each new token
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one a new token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first, once

    def append(self, later: "OutputDelta") -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.exit_depths += later.exit_depths
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


def mean_decode_depth(exit_depths: Sequence[int]) -> float | None:
    """Mean loops of a request's tokens but the first, which prefill runs at full depth; None when there is no other."""
    decoded = exit_depths[1:]
    return sum(decoded) / len(decoded) if decoded else None


@dataclass
class RequestOutput:
    """A finished request."""

    prompt: str | None  # None when the prompt was token ids
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)  # one a token; the first, from prefill, is r_max
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one a token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first, likewise

    @property
    def mean_exit_depth(self) -> float | None:
        """Mean depth of the decode tokens (the first comes from prefill); None when there is none."""
        return mean_decode_depth(self.exit_depths)

    def append(self, delta: OutputDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.exit_depths += delta.exit_depths
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Scoring(NamedTuple):
    """Which logprobs a request wants: how many likeliest tokens beside each of its own; None = no logprobs."""

    output: int | None
    prompt: int | None
    prompt_ids: Sequence[int]


NO_SCORING = Scoring(None, None, ())


class OutputAssembler:
    """One request's way from token updates to deltas. After a delta with a finish reason it takes no more."""

    def __init__(
        self,
        request_id: str,
        detokenizer: Detokenizer | None,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        scoring: Scoring = NO_SCORING,
    ) -> None:
        self._scoring = scoring
        self._request_id = request_id
        self._detokenizer = detokenizer
        self._checker = StopChecker(stop)
        self._min_tokens = min_tokens
        self._count = 0

    def push(self, update: Update) -> OutputDelta:
        """The delta of one update (which carries no error). A stop string ends it early with reason "stop"."""
        delta = OutputDelta(self._request_id, "", [], [])
        hidden = update.stop_reason if update.finish_reason == "stop" else None  # a stop token's text is not shown
        last = len(update.token_ids) - 1
        scoring, scored = self._scoring, list[TokenLogprobs]()
        if scoring.prompt is not None and update.prompt_logprobs:
            delta.prompt_logprobs = read_scores(update.prompt_logprobs, scoring.prompt_ids[1:], scoring.prompt)
        if scoring.output is not None:
            scored = read_scores(update.logprobs, update.token_ids, scoring.output)
        for i, (token, depth) in enumerate(zip(update.token_ids, update.exit_depths, strict=True)):
            self._count += 1
            delta.token_ids.append(token)
            delta.exit_depths.append(depth)
            delta.logprobs += scored[i : i + 1]
            if self._detokenizer is None or (i == last and token == hidden):
                continue
            if self._show(delta, self._detokenizer.push((token,))):
                return delta
        if update.finish_reason is not None:
            if self._detokenizer is not None and self._show(delta, self._detokenizer.finish()):
                return delta
            delta.text += self._checker.finish()
            delta.finish_reason, delta.stop_reason = update.finish_reason, update.stop_reason
        return delta

    def _show(self, delta: OutputDelta, text: str) -> bool:
        """Adds text to the delta; True when it completed a stop string."""
        shown, stop = self._checker.push(text, active=self._count >= self._min_tokens)
        delta.text += shown
        if stop is None:
            return False
        delta.finish_reason, delta.stop_reason = "stop", stop
        return True
