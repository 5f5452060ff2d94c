"""Streams that a client can take up again: the names it gives them, the ids of their events, how far it says it has come.

An event's id is ``NAME/COUNTS``: the request's name, and for each choice how many tokens were sent, its end counting as one
more. A client that has lost its connection sends the same request with the last id as ``Last-Event-ID``.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from depthbatch.common.errors import shown
from depthbatch.frontend.http.error_answers import ApiError
from depthbatch.frontend.http.schemas import SHAPES, GenerationFields
from depthbatch.frontend.kept_answers import KeptAnswer
from depthbatch.frontend.output import OutputDelta

MAX_CHOICES = 16  # whose counts an event's id holds; streams of more cannot be resumed
REQUEST_ID = "X-Request-Id"
LAST_EVENT_ID = "Last-Event-ID"
_NAME = re.compile(r"[!-~]{1,128}")
_EVENT_ID = re.compile(r"([!-~]{1,128})/(\d{1,9}(?:,\d{1,9}){0,15})")


def bad_header(name: str, message: str) -> ApiError:
    """400 for one header."""
    return ApiError(400, f"{name}: {message}", param=name, code="invalid_value")


class LastEvent(NamedTuple):
    """What a client says that it has."""

    request_id: str
    counts: tuple[int, ...]  # of each choice


class RequestNames(NamedTuple):
    """What a request's headers say of it."""

    request_id: str | None = None
    last_event: LastEvent | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "RequestNames":
        """Raises ApiError (400)."""
        name, last = headers.get(REQUEST_ID), headers.get(LAST_EVENT_ID)
        if name is not None and not _NAME.fullmatch(name):
            raise bad_header(REQUEST_ID, f"must be {SHAPES['request_id'].partition(' (')[0]}, not {shown(name)}")
        if last is None:
            return cls(name)
        found = _EVENT_ID.fullmatch(last)
        if found is None:
            raise bad_header(LAST_EVENT_ID, f"{shown(last)} is no event id of this server, as NAME/12")
        return cls(name, LastEvent(found[1], tuple(map(int, found[2].split(",")))))

    def name(self, body: GenerationFields) -> str | None:
        """What the client calls the request: in the body, else in the header, where proxies may put words of their own.
        Raises ApiError (400) where that is not the answer that it wants to go on with."""
        name, where = (body.request_id, "request_id") if body.request_id else (self.request_id, REQUEST_ID)
        if self.last_event is not None and name not in (None, self.last_event.request_id):
            last = self.last_event.request_id
            raise bad_header(LAST_EVENT_ID, f"it is of {last!r}, but {where} says {name!r}")
        return name

    @property
    def echoed(self) -> dict[str, str]:
        """Headers of the answer."""
        return {} if self.request_id is None else {REQUEST_ID.lower(): self.request_id}


def form_of(body: GenerationFields) -> bytes:
    """A kept answer's form: what it was asked for by. Its repr, as fields that nobody knows may hold what JSON can spell and
    UTF-8 cannot."""
    text = repr((type(body).__name__, body.model_dump(exclude={"request_id"})))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def check_resumable(answer: KeptAnswer | None, last: LastEvent, body: GenerationFields, keep_s: float) -> KeptAnswer:
    """The kept answer, if it can go on from there. Raises ApiError."""
    if not body.stream:
        raise bad_header(LAST_EVENT_ID, "only with stream")
    if answer is None:
        kept = f"streams for {keep_s:g} s after their last news" if keep_s else "none"
        message = f"no answer to {last.request_id!r} is here; this server keeps {kept}"
        raise ApiError(404, f"{LAST_EVENT_ID}: {message}", param=LAST_EVENT_ID, code="answer_not_found")
    if answer.form != form_of(body):
        raise bad_header(LAST_EVENT_ID, f"{last.request_id!r} was asked for with another body")
    sent = [0] * len(answer.submits)
    for number, event in answer.news:
        sent[number] += len(event.token_ids) + (event.finish_reason is not None)
    if len(last.counts) != len(sent):
        raise bad_header(LAST_EVENT_ID, f"{last.request_id!r} has {len(sent)} choices, not {len(last.counts)}")
    for number, (count, most) in enumerate(zip(last.counts, sent, strict=True)):
        if count > most + bool(body.stop):  # the end that a stop string makes is not among the news
            raise bad_header(LAST_EVENT_ID, f"{count} is more than the {most} that choice {number} has come to")
    return answer


class Positions:
    """How far each choice of a stream has come."""

    def __init__(self, choices: int, received: Sequence[int] | None = None) -> None:
        """``received``: what the client has, and is not sent again."""
        self._sent = [0] * choices
        self._received = received or [0] * choices

    def has(self, choice: int, news: OutputDelta) -> bool:
        """Counts news of a choice; True when the client has them."""
        self._sent[choice] += len(news.exit_depths) + (news.finish_reason is not None)
        return 0 < self._sent[choice] <= self._received[choice]

    def lacks_only_the_end(self, choice: int, news: OutputDelta) -> bool:
        """Whether the client has the tokens of the news that were counted last."""
        ends_with_tokens = news.finish_reason is not None and bool(news.exit_depths)
        return ends_with_tokens and self._sent[choice] - 1 == self._received[choice]

    def event_id(self, request_id: str) -> str:
        return f"{request_id}/{','.join(map(str, self._sent))}"
