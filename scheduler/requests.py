"""Requests and the queue of those that wait for prefill. Knows nothing of slots' device state or stages."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

import numpy as np

from depthbatch.common.frames import Int32Array
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams

_BELOW_ALL = 1 << 32  # beyond any two priorities' difference


class State(IntEnum):
    """Where a request is."""

    WAITING = 0  # for prefill, or for a second prefill after preemption
    ACTIVE = 1  # holds a slot
    DRAINING = 2  # its last token is dispatched, slot and blocks are given back
    DONE = 3  # answered


@dataclass(slots=True, eq=False)
class Request:
    """One request from submit to its terminal event."""

    request_id: int
    prompt: Int32Array
    params: RequestParams
    gate: Gate  # the gate that is in force; the policy may have overridden the request's
    limit: int  # output tokens at most, max_model_len respected
    order: int  # smaller = served first: priority, then arrival
    stop_ids: frozenset[int]
    first_exit: bool = False  # under gate LOOKAHEAD: a pre-loop head may end a token's loops after the first
    client: int = 0  # where requests wait, clients take turns
    output: list[int] = field(default_factory=list)  # tokens known here
    depths: bytearray = field(default_factory=bytearray)  # the exit depth of each: that of the token before it, if fed
    forced_decode: bool = (
        False  # its K/V come back by decoding its output as forced tokens (rebuild.py), not by prefill
    )
    dispatched: int = 0  # output tokens whose sampling stage has been dispatched
    computed: int = 0  # tokens of the running prefill that are dispatched
    prefill_tokens: Int32Array | None = None  # while prefilling: what the prefill runs over
    cuts: list[int] = field(default_factory=list)  # with forced decode: tokens of each chunk of the prompt's prefill
    slot: int = 0
    state: State = State.WAITING
    preemptions: int = 0  # times that it lost its slot
    admitted: int = 0  # the how manieth admission was its last one
    host_blocks: Int32Array | None = None  # its K/V, while it waits with them in host memory
    restored: bool = False  # its K/V came from there
    blocked_since: int | None = None  # admissions when it first lacked blocks at the head of the queue
    targets_sent: int = 0  # prompt tokens, the first apart, whose logprobs have been asked for
    targets_known: int = 0  # and answered
    prefix_keys: tuple[bytes, ...] | None = None  # of its prompt's full blocks, once they were asked for
    cached_tokens: int = 0  # found in the prefix cache by its last prefill; told with the first token
    overdue: bool = False  # waits behind all that are not (objective goodput)
    deaths: int = 0  # of workers, while a stage of this one was in flight, without getting past it since
    proof: int = 0  # output tokens with which it is past what it ran then
    arrived_s: float | None = None  # until it is first prefilled, on the caller's clock

    @property
    def may_have_drafts(self) -> bool:
        """Its tokens are a function of logits, seed and position alone, so that a draft is drawn as the token is."""
        params = self.params
        more = params.changes_logits or params.forbids_tokens or params.grammar
        return params.speculation and not more

    @property
    def preempted(self) -> bool:
        """It has lost its slot before."""
        return self.preemptions > 0

    @property
    def is_suspect(self) -> bool:
        """It has to show that it is not what kills workers (quarantine.py)."""
        return self.deaths >= 2

    @property
    def length(self) -> int:
        """Tokens a prefill of this request runs over: all but the one that decode goes on with, which is the last."""
        if self.forced_decode and not self.keeps_kv:
            return self.prompt.size
        return self.prompt.size + max(len(self.output) - 1, 0)

    @property
    def keeps_kv(self) -> bool:
        """Its K/V are not computed again."""
        return self.restored or self.host_blocks is not None

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return self.prompt.size + len(self.output)

    @property
    def pending(self) -> int:
        """Output tokens that are dispatched and not known yet."""
        return self.dispatched - len(self.output)

    def tokens_to_prefill(self) -> Int32Array:
        """[length]"""
        if self.length == self.prompt.size:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output[:-1], dtype=np.int32)])


class HeadPrompt(NamedTuple):
    """The prompt that prefill would go on with."""

    request_id: int
    waited_s: float  # since its request arrived; 0 where that is not known
    tokens: int  # still to prefill
    untouched: bool  # nothing of its request has run yet
    overdue: bool  # its request has been set behind all that are not


class PrefillLimit(NamedTuple):
    """What one prefill batch may hold."""

    tokens: int  # of prompts; at most M
    prompts: int  # that take a slot with it


Lane = OrderedDict[int, OrderedDict[int, Request]]  # of one priority: clients in turn, and the requests of each


class WaitingQueue:
    """Priority first, overdue requests last; within a priority clients take turns, and each client's requests go in the
    order of arrival. Every operation is independent of how many wait.

    Suspects come before all, one at a time, and as long as there are any, nothing else does."""

    def __init__(self) -> None:
        self._by_priority: dict[int, Lane] = {}
        self._priorities: list[int] = []  # descending
        self._size = 0
        self._suspects: OrderedDict[int, Request] = OrderedDict()
        self.alone: Request | None = None  # the suspect whose turn it is, until it is answered or cleared

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in no order."""
        yield from self._suspects.values()
        for lane in self._by_priority.values():
            for own in lane.values():
                yield from own.values()

    def push(self, request: Request) -> None:
        """Behind what waits of its priority and client."""
        self._size += 1
        if request.is_suspect:
            self._suspects[request.request_id] = request
            return
        own = self._lane(request).setdefault(request.client, OrderedDict())
        own[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """To the head of its priority: preempted requests keep their place."""
        self.push(request)
        if request.is_suspect:
            self._suspects.move_to_end(request.request_id, last=False)
            return
        lane = self._lane(request)
        lane[request.client].move_to_end(request.request_id, last=False)
        lane.move_to_end(request.client, last=False)

    def head(self) -> Request | None:
        if not self._size or self.alone is not None:
            return None
        if self._suspects:
            return next(iter(self._suspects.values()))
        lane = self._by_priority[self._priorities[0]]
        return next(iter(next(iter(lane.values())).values()))

    def behind_head(self, count: int) -> list[Request]:
        """Up to so many of those that follow the head, in the order of their turns; none while there are suspects."""
        if self._suspects or self.alone is not None:
            return []
        return list(islice(self._in_turn(), 1, count + 1))

    def _in_turn(self) -> Iterator[Request]:
        for priority in self._priorities:
            clients = deque(iter(own.values()) for own in self._by_priority[priority].values())
            while clients:
                own = clients.popleft()
                if (request := next(own, None)) is not None:
                    yield request
                    clients.append(own)

    def remove(self, request: Request) -> None:
        """Takes it out. If its turn it was, it is then the next client's."""
        if self._suspects.pop(request.request_id, None) is not None:
            self._size -= 1
            return
        priority, client = self._rank(request), request.client
        lane = self._by_priority[priority]
        was_first = next(iter(lane[client])) == request.request_id
        del lane[client][request.request_id]
        self._size -= 1
        if not lane[client]:
            del lane[client]
        elif was_first and next(iter(lane)) == client:
            lane.move_to_end(client)
        if not lane:
            del self._by_priority[priority]
            self._priorities.remove(priority)

    @property
    def has_suspects(self) -> bool:
        """Some wait."""
        return bool(self._suspects)

    def set_overdue(self, request: Request) -> None:
        """A waiting request goes behind all that are not overdue."""
        self.remove(request)
        request.overdue = True
        self.push(request)

    def _rank(self, request: Request) -> int:
        return request.params.priority - (_BELOW_ALL if request.overdue else 0)

    def _lane(self, request: Request) -> Lane:
        priority = self._rank(request)
        lane = self._by_priority.get(priority)
        if lane is None:
            lane = self._by_priority[priority] = OrderedDict()
            self._priorities = sorted(self._by_priority, reverse=True)
        return lane
