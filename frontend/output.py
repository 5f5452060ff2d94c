"""What users get back, and how a request's token events become it: text, ids, depths, one finish reason."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from depthbatch.common.messages import FinishReason, TokenEvent
from depthbatch.frontend.detokenizer import Detokenizer, StopChecker
from depthbatch.frontend.logprobs import TokenLogprobs, read_scores


class Growing:
    """A request's output, whole or in part, to which a later part can be added."""

    text: str
    token_ids: list[int]
    exit_depths: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    accepted_drafts: int
    rejected_drafts: int
    cuts: list[int]
    num_cached_tokens: int

    def append(self, later: "OutputDelta") -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.exit_depths += later.exit_depths
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.accepted_drafts += later.accepted_drafts
        self.rejected_drafts += later.rejected_drafts
        self.cuts += later.cuts
        self.num_cached_tokens += later.num_cached_tokens
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass
class OutputDelta(Growing):
    """What is new since the last delta of this request."""

    request_id: str
    text: str
    token_ids: list[int]
    exit_depths: list[int]  # loops of each new token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one a new token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first, once
    accepted_drafts: int = 0  # drafts that were the token they stood for (docs/speculation.md),
    rejected_drafts: int = 0  # and those that were not; new ones
    cuts: list[int] = field(
        default_factory=list
    )  # tokens of each chunk of the prompt's prefill, where going on elsewhere
    # with the same tokens takes that (with the first token, once)
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache; with the first token


class IndexedDelta(NamedTuple):
    """A piece of the output of the request at ``prompt_index`` of those that were submitted together."""

    prompt_index: int
    delta: OutputDelta


def mean_decode_depth(exit_depths: Sequence[int]) -> float | None:
    """Mean loops of a request's tokens but the first, which prefill runs at full depth; None when there is no other."""
    decoded = exit_depths[1:]
    return sum(decoded) / len(decoded) if decoded else None


@dataclass
class RequestOutput(Growing):
    """A finished request."""

    prompt: str | None  # None when the prompt was token ids
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)  # one a token; the first, from prefill, is r_max
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one a token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first, likewise
    accepted_drafts: int = 0  # drafts that were the token they stood for (docs/speculation.md),
    rejected_drafts: int = 0  # and those that were not
    cuts: list[int] = field(default_factory=list)  # tokens of each chunk of the prompt's prefill, as OutputDelta has it
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @property
    def mean_exit_depth(self) -> float | None:
        """Mean depth of the decode tokens (the first comes from prefill); None when there is none."""
        return mean_decode_depth(self.exit_depths)


class Scoring(NamedTuple):
    """Which logprobs a request wants: how many likeliest tokens beside each of its own; None = no logprobs."""

    output: int | None
    prompt: int | None
    prompt_ids: Sequence[int]


NO_SCORING = Scoring(None, None, ())


class OutputAssembler:
    """One request's way from token events to deltas. After a delta with a finish reason it takes no more."""

    def __init__(
        self,
        request_id: str,
        detokenizer: Detokenizer | None,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        scoring: Scoring = NO_SCORING,
        shows_stop: bool = False,
    ) -> None:
        """``shows_stop``: the text ends with the stop string, or the stop token's text, not before it."""
        self._scoring = scoring
        self._scored = scoring.output is not None or scoring.prompt is not None
        self._request_id = request_id
        self._detokenizer = detokenizer
        self._checker = StopChecker(stop, shows_stop)
        self._min_tokens = min_tokens
        self._count = 0  # tokens so far

    def push(self, event: TokenEvent) -> OutputDelta:
        """The delta of one event. A stop string ends it early with reason STOP."""
        ids = event.token_ids
        delta = OutputDelta(self._request_id, "", list(ids), list(event.exit_depths))
        delta.accepted_drafts, delta.rejected_drafts = event.accepted_drafts, event.rejected_drafts
        if event.cuts:
            delta.cuts = array("i", event.cuts).tolist()
        delta.num_cached_tokens = event.cached_tokens
        if self._scored:
            self._read_scores(event, delta)
        if self._detokenizer is not None:
            stopped = event.finish_reason is FinishReason.STOP and ids[-1:] == (event.stop_reason,)
            shown = ids[:-1] if stopped and not self._checker.shows_stop else ids
            if not self._checker:
                delta.text = self._detokenizer.push(shown)
            elif self._finds_stop(delta, shown, self._detokenizer):
                return delta
            self._count += len(ids) - len(shown)
        if event.finish_reason is not None:
            if self._detokenizer is not None and self._show(delta, self._detokenizer.finish()):
                return delta
            delta.text += self._checker.finish()
            delta.finish_reason, delta.stop_reason = event.finish_reason, event.stop_reason
        return delta

    def skip(self, token_ids: Sequence[int], exit_depths: Sequence[int]) -> OutputDelta:
        """Takes tokens that have been told elsewhere; a finish reason says that a stop string was among them."""
        scored, self._scored = self._scored, False
        delta = self.push(TokenEvent(0, tuple(token_ids), tuple(exit_depths)))
        self._scored = scored
        return delta

    def _finds_stop(self, delta: OutputDelta, shown: Sequence[int], detokenizer: Detokenizer) -> bool:
        """Adds the text token by token; True when one completed a stop string, which ends the delta with it."""
        for number, token in enumerate(shown, 1):
            self._count += 1
            if self._show(delta, detokenizer.push((token,))):
                del delta.token_ids[number:], delta.exit_depths[number:], delta.logprobs[number:]
                return True
        return False

    def _read_scores(self, event: TokenEvent, delta: OutputDelta) -> None:
        scoring = self._scoring
        if scoring.prompt is not None and event.prompt_logprobs:
            delta.prompt_logprobs = read_scores(event.prompt_logprobs, scoring.prompt_ids[1:], scoring.prompt)
        if scoring.output is not None:
            delta.logprobs = read_scores(event.logprobs, event.token_ids, scoring.output)

    def _show(self, delta: OutputDelta, text: str) -> bool:
        """Adds text to the delta; True when it completed a stop string."""
        shown, stop = self._checker.push(text, active=self._count >= self._min_tokens)
        delta.text += shown
        if stop is None:
            return False
        delta.finish_reason, delta.stop_reason = FinishReason.STOP, stop
        return True
