"""Oracle for drafts: the least time per token of one sequence with a chain of drafts, by value iteration in numpy.

A chain is a tuple of lanes (loops run, state, draft depth of its input), oldest first; draft depth 0 is a certain input. After
each core step one may go on, or run a boundary, which reads what has exited, with or without a draft of the last lane. Whether
a draft was right shows when the lane before it is known, with the acceptance of its depth, independently of all others. Exits
follow the hazards of the depth distribution.

Slow and plain by design; knows nothing of depthbatch.
"""

import math
from collections.abc import Callable
from itertools import count, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
RUNS, EXITED, READ = range(3)
GO_ON, BOUNDARY, DRAFT = range(3)
Lane = tuple[int, int, int]
Chain = tuple[Lane, ...]
Decide = Callable[[Chain, int], int]  # chain and core steps since the last boundary -> GO_ON, BOUNDARY or DRAFT
HEAD: Lane = (0, RUNS, 0)


class DraftInstance(NamedTuple):
    """Weights of the depths 1 .. r_max; acceptance [r_max + 1] by draft depth; seconds."""

    weights: tuple[float, ...]
    accept: tuple[float, ...]
    lanes: int  # draft lanes at most, those that are read for good not counted,
    span: int  # and lanes at most, those and the head counted
    core: float
    core_row: float
    coda: float
    prelude: float  # after a coda that starts or restarts a lane
    coda_row: float = 0.0
    prelude_row: float = 0.0


class Outcome(NamedTuple):
    prob: float
    chain: Chain
    seconds: float
    tokens: float


def can_run(chain: Chain) -> list[bool]:
    """Which lanes may run a loop: one that has run as many as a lane ahead that is not read yet waits for that."""
    out: list[bool] = []
    fewest = math.inf
    for loops, state, _ in chain:
        out.append(state == RUNS and loops < fewest)
        if state != READ:
            fewest = min(fewest, loops)
    return out


def core_step(inst: DraftInstance, chain: Chain) -> list[Outcome]:
    """Every lane that can run does."""
    p = np.array(inst.weights) / sum(inst.weights)
    beyond = p[::-1].cumsum()[::-1]
    runs = can_run(chain)
    choices: list[list[tuple[float, Lane]]] = []
    for (loops, state, depth), does in zip(chain, runs, strict=True):
        if not does:
            choices.append([(1.0, (loops, state, depth))])
            continue
        hazard = p[loops] / beyond[loops]
        both = [(hazard, (loops + 1, EXITED, depth)), (1.0 - hazard, (loops + 1, RUNS, depth))]
        choices.append([(prob, lane) for prob, lane in both if prob > 1e-12])
    seconds = inst.core + inst.core_row * sum(runs) if any(runs) else 0.0
    return [
        Outcome(float(np.prod([prob for prob, _ in each])), tuple(lane for _, lane in each), seconds, 0.0)
        for each in product(*choices)
    ]


def boundary(inst: DraftInstance, chain: Chain, draft: bool) -> list[Outcome]:
    """Reads what has exited, starts the next lane, and commits what is certain."""
    lanes = [(loops, READ if state == EXITED else state, depth) for loops, state, depth in chain]
    rows = sum(state == EXITED for _, state, _ in chain)
    loops, state, _ = chain[-1]
    born = 0
    if len(chain) < inst.span and (state == EXITED or (draft and may_draft(inst, chain))):
        lanes.append((0, RUNS, 0 if state == EXITED else loops))
        rows += state == RUNS
        born = 1
    seconds = inst.coda + inst.coda_row * rows + (inst.prelude + inst.prelude_row) * born
    out: list[Outcome] = []
    _commit(inst, lanes, Outcome(1.0, (), seconds, 0.0), bool(born), out)
    return out


def _commit(inst: DraftInstance, lanes: list[Lane], so_far: Outcome, starts: bool, out: list[Outcome]) -> None:
    """``starts``: there is a prelude anyway."""
    prob, _, seconds, tokens = so_far
    if lanes[0][1] != READ:
        out.append(Outcome(prob, tuple(lanes), seconds, tokens))
        return
    prelude = inst.prelude_row + (0.0 if starts else inst.prelude)
    anew = Outcome(prob, (HEAD,), seconds + prelude, tokens + 1)
    if len(lanes) == 1:
        out.append(anew)
        return
    (loops, state, depth), rest = lanes[1], lanes[2:]
    right = inst.accept[depth] if depth else 1.0
    if right < 1.0:
        out.append(anew._replace(prob=prob * (1.0 - right)))
    if right > 0.0:
        _commit(inst, [(loops, state, 0), *rest], Outcome(prob * right, (), seconds, tokens + 1), starts, out)


def may_draft(inst: DraftInstance, chain: Chain) -> bool:
    """The last lane runs and may have a successor."""
    loops, state, _ = chain[-1]
    return len(chain) < inst.span and running(chain) <= inst.lanes and state == RUNS and loops > 0


def running(chain: Chain) -> int:
    """Lanes that are not read for good, nor will be by the next boundary."""
    return sum(state == RUNS for _, state, _ in chain)


class ChainModel:
    """All chains that can be reached after a core step, with the core steps since the last boundary up to ``pauses``."""

    def __init__(self, inst: DraftInstance, pauses: int = 1) -> None:
        self.inst = inst
        self._pauses = pauses
        self._index: dict[tuple[Chain, int], int] = {}
        self.states: list[tuple[Chain, int]] = []
        moves: list[list[list[tuple[float, int, float, float]] | None]] = []
        self._number(((0, RUNS, 0),), 1)
        for i in count():
            if i == len(self.states):
                break
            moves.append(self._moves(*self.states[i]))
        most = max(len(move) for each in moves for move in each if move is not None)
        shape = (len(moves), 3, most)
        self._prob, self._target = np.zeros(shape), np.zeros(shape, np.int64)
        self._seconds, self._tokens = np.zeros(shape[:2]), np.zeros(shape[:2])
        self._legal = np.zeros(shape[:2], np.bool_)
        for (i, each), action in product(enumerate(moves), range(3)):
            move = each[action]
            if move is None:
                continue
            self._legal[i, action] = True
            for j, (prob, target, seconds, tokens) in enumerate(move):
                self._prob[i, action, j], self._target[i, action, j] = prob, target
                self._seconds[i, action] += prob * seconds
                self._tokens[i, action] += prob * tokens

    def seconds_per_token(self, decide: Decide | None = None) -> float:
        """In the long run: of the optimum, or of ``decide``."""
        legal = self._legal
        if decide is not None:
            chosen = np.array([decide(*state) for state in self.states])
            legal = legal & (np.arange(3) == chosen[:, None])
            assert legal.any(axis=1).all()
        price = float(self._seconds.max())
        value = np.zeros(len(self.states))
        for _ in range(60):  # Dinkelbach
            gain, tokens, value = self._average(price, legal, value)
            if abs(gain) < 1e-7 * price:
                break
            price -= gain / tokens
        return price

    def _average(
        self, price: float, legal: npt.NDArray[np.bool_], value: FloatArray
    ) -> tuple[float, float, FloatArray]:
        """Gain (price a token, less seconds) and tokens, both a core step, by damped relative value iteration."""
        reward = np.where(legal, price * self._tokens - self._seconds, -1e18)
        count_value = np.zeros_like(value)
        rows = np.arange(value.size)
        for step in range(5_000):
            total = reward + (self._prob * value[self._target]).sum(axis=2)
            best = total.argmax(axis=1)
            gained = total[rows, best] - value
            moved = self._tokens[rows, best] - count_value
            moved += (self._prob[rows, best] * count_value[self._target[rows, best]]).sum(axis=1)
            value = value + 0.8 * gained
            value -= value[0]
            count_value = count_value + 0.8 * moved
            count_value -= count_value[0]
            if step % 20 == 0 and np.ptp(gained) < 1e-8 * price and np.ptp(moved) < 1e-6:
                break
        return float(gained.mean()), float(moved.mean()), value

    def _moves(self, chain: Chain, since: int) -> list[list[tuple[float, int, float, float]] | None]:
        inst = self.inst
        moves: list[list[tuple[float, int, float, float]] | None] = [None, None, None]
        if any(can_run(chain)):
            moves[GO_ON] = self._then_core([Outcome(1.0, chain, 0.0, 0.0)], since + 1)
        if any(state == EXITED for _, state, _ in chain):
            moves[BOUNDARY] = self._then_core(boundary(inst, chain, draft=False), 1)
        if may_draft(inst, chain):
            moves[DRAFT] = self._then_core(boundary(inst, chain, draft=True), 1)
        return moves

    def _then_core(self, outcomes: list[Outcome], since: int) -> list[tuple[float, int, float, float]]:
        out = []
        for first in outcomes:
            for then in core_step(self.inst, first.chain):
                target = self._number(then.chain, min(since, self._pauses))
                out.append((first.prob * then.prob, target, first.seconds + then.seconds, first.tokens))
        return out

    def _number(self, chain: Chain, since: int) -> int:
        key = chain, since
        if key not in self._index:
            self._index[key] = len(self.states)
            self.states.append(key)
        return self._index[key]
