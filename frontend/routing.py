"""Which of several equal engines a request goes to. Pure: knows loads, prefixes and depths, no engine.

A replica's load is the loops that wait in it: a token at depth 4 takes twice the device of one at depth 2. A prompt goes where
its beginning is cached as long as that replica's load is within a bound of the mean; otherwise to the least loaded
(consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam, arXiv:1608.01350, with a table in place of the
hash).
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from depthbatch.common.gates import Gate
from depthbatch.common.messages import Submit

BLOCK_TOKENS = 64  # of a prompt's beginning, for affinity
MAX_BLOCKS = 32
PREFIXES_REMEMBERED = 1 << 16
LOAD_BOUND = 1.25  # of the mean load, for affinity
FORECAST_TOKENS = 1000.0  # that the mean depth remembers


class LoopForecast:
    """Loops that a request will take: its tokens at the depth that it fixes, else at the mean of those so far."""

    def __init__(self, r_max: int) -> None:
        self._mean = float(r_max)

    def add(self, exit_depths: Sequence[int]) -> None:
        """Depths of tokens that have come."""
        for depth in exit_depths:
            self._mean += (depth - self._mean) / FORECAST_TOKENS

    def loops(self, submit: Submit) -> float:
        """Of the tokens that it may still get."""
        params, done = submit.params, len(submit.generated_depths)
        left = max(params.max_tokens - done, 0)
        if params.gate is Gate.REPLAY:
            known = params.exit_depths[max(done - 1, 0) :][:left]
            return float(sum(known) + (left - len(known)) * params.max_loops)
        if params.gate in (Gate.NONE, Gate.FIXED):
            return float(left * params.max_loops)
        return left * min(max(self._mean, params.min_loops), params.max_loops)


class Order(NamedTuple):
    """What routing is told of a request."""

    prefixes: tuple[int, ...]  # of its prompt's beginnings, shortest first
    loops: float

    @classmethod
    def of(cls, submit: Submit, forecast: LoopForecast) -> Self:
        return cls(prefixes_of(submit.prompt), forecast.loops(submit))


def prefixes_of(prompt: bytes) -> tuple[int, ...]:
    """A number for each beginning of whole blocks of a prompt (int32), equal for equal beginnings."""
    tokens = np.frombuffer(prompt, "<i4")
    found: list[int] = []
    key = 0
    for start in range(0, min(tokens.size // BLOCK_TOKENS, MAX_BLOCKS) * BLOCK_TOKENS, BLOCK_TOKENS):
        key = hash((key, tokens[start : start + BLOCK_TOKENS].tobytes()))
        found.append(key)
    return tuple(found)


class AffinityRouter:
    """Remembers where prompts went. ``Hashable`` names a replica."""

    def __init__(self, load_bound: float = LOAD_BOUND, remembered: int = PREFIXES_REMEMBERED) -> None:
        self._bound = load_bound
        self._remembered = remembered
        self._homes: OrderedDict[int, Hashable] = OrderedDict()

    def rank(self, order: Order, loads: Mapping[Hashable, float]) -> list[Hashable]:
        """The replicas, best first. ``loads``: queued loops of each."""
        ranked = sorted(loads, key=loads.__getitem__)
        home = next((self._homes[key] for key in reversed(order.prefixes) if self._homes.get(key) in loads), None)
        if home is not None:
            limit = self._bound * (sum(loads.values()) + order.loops) / len(loads)
            if loads[home] + order.loops <= max(limit, loads[ranked[0]] + order.loops):
                ranked.remove(home)
                ranked.insert(0, home)
        return ranked

    def went(self, order: Order, replica: Hashable) -> None:
        """The request was sent there."""
        for key in order.prefixes:
            self._homes[key] = replica
            self._homes.move_to_end(key)
        while len(self._homes) > self._remembered:
            self._homes.popitem(last=False)
