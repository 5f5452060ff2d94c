"""A model of integers: what its cache holds, when its gates fire, what it says; and ``plain_decode``, its batch-1 loop.

A token leaves an entry in the cache at every loop. At loop r it sees, of every token before it, the entry that the KV
layout keeps there for loop r, and its state becomes a hash of its former state and of all it sees. Coda layers keep one
entry a token, a hash of the state it went out with and of all such entries before it. So one wrong entry, in any
plane, changes all that is said from there on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams
from depthbatch.scheduler.config import SchedulerConfig


def entry(token: int, position: int, loop: int) -> int:
    """What a token writes into the cache at a loop."""
    return hash((token, position, loop))


def seen(layout: KVLayout, token: int, position: int, depth: int, loop: int) -> int:
    """What a later token sees, at ``loop``, of one that went out after ``depth``."""
    if layout is KVLayout.SINGLE or (layout is KVLayout.FIRST_THEN_SHARED and loop > 1):
        return entry(token, position, depth)
    return entry(token, position, min(loop, depth))


def think(state: int, loop: int, context: Sequence[int]) -> int:
    """State after a loop that saw ``context``, the token's own entry last."""
    return hash((state, loop, tuple(context)))


def leave(state: int, coda_context: Sequence[int]) -> int:
    """What the coda layers keep of a token that goes out."""
    return hash((state, tuple(coda_context), 41))


def sample(state: int, left: int, vocab_size: int) -> int:
    """The next token, by the state and the coda layers' entry."""
    return (hash((state, left)) >> 7) % vocab_size


def gate_fires(seed: int, token: int, position: int, loop: int) -> bool:
    """The fake gate's decision at a loop."""
    return hash((seed, token, position, loop, 17)) % 3 == 0


def predicted_depth(seed: int, token: int, position: int) -> int:
    """The fake pre-loop gate."""
    return 1 + hash((seed, token, position, 23)) % 6


def draft(seed: int, position: int, depth: int, token: int | None, acceptance: float, vocab_size: int) -> int:
    """What a readout before the exit says ``position`` will be. ``token``: what it will be, as far as that is known.
    Right with a share of ``acceptance`` after one loop, and where it is right it stays right."""
    if token is None:
        return hash((seed, position, depth, 37)) % vocab_size
    knows = hash((seed, position, 31)) % 1000 < 1000 * acceptance ** (1 / depth)
    return token if knows else (token + 1) % vocab_size


@dataclass(frozen=True)
class Decoded:
    """What a request must give when nothing interferes."""

    tokens: list[int]
    depths: list[int]
    finish_reason: str


def exit_depth(params: RequestParams, token: int, position: int, index: int) -> int:
    """Depth of decode token ``index`` at ``position``, straight from the agreed semantics."""
    gate = params.gate
    if gate is Gate.REPLAY:
        recorded = params.exit_depths
        return min(recorded[index], params.max_loops) if index < len(recorded) else params.max_loops
    if gate is Gate.PRELOOP:
        return max(params.min_loops, min(predicted_depth(params.seed, token, position), params.max_loops))
    # The fake model has a convergence test, which OWN and DELAYED are then too: only LOOKAHEAD is cumulative.
    asked = gate.decides_on_device and (gate is not Gate.LOOKAHEAD or params.exit_threshold < 1.0)
    if (
        asked
        and gate is Gate.LOOKAHEAD
        and params.min_loops == 1
        and predicted_depth(params.seed, token, position) == 1
    ):
        return 1  # the fake model has a pre-loop head, too
    if asked:
        for loop in range(1, params.max_loops):
            if loop + gate.delay >= params.min_loops and gate_fires(params.seed, token, position, loop):
                return min(loop + gate.delay, params.max_loops)
    return params.max_loops


class _PlainCache:
    """One sequence's cache: what later tokens see, by loop, and the coda layers' entries."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._seen: list[list[int]] = [[] for _ in range(config.r_max + 1)]
        self._left: list[int] = []

    def feed(self, token: int, depth: int, says: bool) -> int:
        """The next token goes ``depth`` loops deep; what it says, if that is asked."""
        config, position, state, left = self._config, len(self._seen[1]), 0, 0
        if says or config.coda_layers:
            for loop in range(1, depth + 1):
                state = think(state, loop, [*self._seen[loop], entry(token, position, loop)])
        if config.coda_layers:
            left = leave(state, self._left)
            self._left.append(left)
        for loop in range(1, config.r_max + 1):
            self._seen[loop].append(seen(config.kv_layout, token, position, depth, loop))
        return sample(state, left, config.vocab_size) if says else -1


def plain_decode(prompt: Sequence[int], params: RequestParams, config: SchedulerConfig) -> Decoded:
    """One sequence, one token at a time."""
    cache = _PlainCache(config)
    for position, token in enumerate(prompt, start=1):
        said = cache.feed(token, config.r_max, says=position == len(prompt))
    tokens, depths = [said], [config.r_max]
    limit = min(params.max_tokens, config.max_model_len - len(prompt))
    while True:
        if tokens[-1] in params.stop_token_ids and len(tokens) > params.min_tokens:
            return Decoded(tokens, depths, "stop")
        if len(tokens) >= limit:
            return Decoded(tokens, depths, "length")
        index = len(tokens) - 1
        depth = exit_depth(params, tokens[-1], len(prompt) + index, index)
        tokens.append(cache.feed(tokens[-1], depth, says=True))
        depths.append(depth)
