"""Oracle for the auto policy: the exact optimum of stage order on small instances, by value iteration in numpy.

The model: W rows that never finish (steady state). A row's type is (loop it runs next, whether it exits there); a
waiting row has exited and needs coda. Exits of the next step are known (lookahead), later ones follow the hazards of
the depth distribution. One epoch is one core step, before which coda + prelude may run over all waiting rows. Fixed
costs only: what grows with rows is paid once a token in any order. Objective: least fixed cost per token.

Slow and plain by design; knows nothing of depthbatch.
"""

import itertools
from collections.abc import Callable
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
State = tuple[int, ...]  # counts: (loop 1 stay, loop 1 exit, loop 2 stay, ..., loop r_max exit, waiting)
Decide = Callable[[State], bool]  # run coda + prelude before the next core step?
Outcomes = list[tuple[float, int]]  # probability, state


class Instance(NamedTuple):
    """W rows, weights of the depths 1..r_max, fixed costs of a core step and of coda + prelude."""

    width: int
    weights: tuple[float, ...]
    core_delta: float
    boundary_delta: float

    @property
    def hazards(self) -> FloatArray:
        """P(exit after loop l | not before), l = 1..r_max."""
        p = np.array(self.weights) / sum(self.weights)
        at_least = p[::-1].cumsum()[::-1]
        return np.minimum(p / np.maximum(at_least, 1e-300), 1.0)


class Transitions(NamedTuple):
    """Outcomes of a move from every state, end to end."""

    start: npt.NDArray[np.int64]  # [states] where a state's outcomes begin
    target: npt.NDArray[np.int64]
    prob: FloatArray
    legal: npt.NDArray[np.bool_]  # [states]

    def expect(self, values: FloatArray) -> FloatArray:
        return np.add.reduceat(self.prob * values[self.target], self.start)


def _binomial(n: int, p: float) -> list[tuple[int, float]]:
    return [(k, w) for k in range(n + 1) if (w := comb(n, k) * p**k * (1 - p) ** (n - k)) > 0]


def _pack(rows: list[Outcomes | None]) -> Transitions:
    filled: list[Outcomes] = [row if row is not None else [(1.0, 0)] for row in rows]
    start = np.concatenate([[0], np.cumsum([len(row) for row in filled])[:-1]])
    target = np.array([state for row in filled for _, state in row])
    prob = np.array([p for row in filled for p, _ in row])
    return Transitions(start, target, prob, np.array([row is not None for row in rows]))


class Model:
    """All states that can be reached, and what each move leads to."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.r_max = len(instance.weights)
        self._index: dict[State, int] = {}
        self.states: list[State] = []
        core: list[Outcomes | None] = []
        coda: list[Outcomes | None] = []
        self._number((0,) * (2 * self.r_max) + (instance.width,))
        for i in itertools.count():
            if i == len(self.states):
                break
            state = self.states[i]
            core.append(self._core(state) if sum(state[:-1]) else None)
            coda.append(self._coda(state) if state[-1] else None)
        self._core_moves, self._coda_moves = _pack(core), _pack(coda)
        self._exits = np.array([sum(state[1:-1:2]) for state in self.states], dtype=np.float64)

    def cost_per_token(self, decide: Decide | None = None) -> float:
        """Fixed cost per token in the long run: of the optimum, or of the policy ``decide``."""
        inst = self.instance
        forced = None if decide is None else np.array([decide(state) for state in self.states])
        price = inst.core_delta * self.r_max + inst.boundary_delta  # an upper bound
        value = np.zeros(len(self.states))
        for _ in range(60):  # Dinkelbach: at the right price the average gain is 0
            gain, tokens, value = self._average(price, forced, value)
            if abs(gain) < 1e-6 * price * tokens:
                break
            price -= gain / tokens
        return price

    def _average(
        self, price: float, forced: npt.NDArray[np.bool_] | None, value: FloatArray
    ) -> tuple[float, float, FloatArray]:
        """Gain (price a token, less cost) and tokens, both a core step, by damped relative value iteration."""
        core, coda = self._core_moves, self._coda_moves
        tokens = np.zeros_like(value)
        for step in range(20_000):
            go = np.where(core.legal, price * self._exits - self.instance.core_delta + core.expect(value), -1e18)
            serve = np.where(coda.legal, coda.expect(go) - self.instance.boundary_delta, -1e18)
            use = serve > go if forced is None else (forced | ~core.legal) & coda.legal
            new = np.where(use, serve, go)
            gained = new - value
            passed = np.where(core.legal, self._exits + core.expect(tokens), 0.0)
            passed = np.where(use, coda.expect(passed), passed)
            moved = passed - tokens
            value = value + 0.9 * gained
            value -= value[0]
            tokens += 0.9 * moved
            tokens -= tokens[0]
            if step > 20 and step % 10 == 0 and np.ptp(gained) < 1e-6 * price and np.ptp(moved) < 1e-5:
                break
        return float(gained.mean()), float(moved.mean()), value

    def _number(self, state: State) -> int:
        if state not in self._index:
            self._index[state] = len(self.states)
            self.states.append(state)
        return self._index[state]

    def _core(self, state: State) -> Outcomes:
        """Rows marked 'exit' come to wait; the others learn whether they exit at their next loop."""
        hazards = self.instance.hazards
        choices = [_binomial(state[2 * loop], hazards[loop + 1]) for loop in range(self.r_max - 1)]
        outcomes = []
        for combination in itertools.product(*choices):
            new, prob = [0] * len(state), 1.0
            for loop, (leaving, weight) in enumerate(combination):
                new[2 * loop + 2] = state[2 * loop] - leaving
                new[2 * loop + 3] = leaving
                prob *= weight
            new[-1] = state[-1] + sum(state[1:-1:2])
            outcomes.append((prob, self._number(tuple(new))))
        return outcomes

    def _coda(self, state: State) -> Outcomes:
        outcomes = []
        for leaving, prob in _binomial(state[-1], self.instance.hazards[0]):
            new = [*state[:-1], 0]
            new[0] += state[-1] - leaving
            new[1] += leaving
            outcomes.append((prob, self._number(tuple(new))))
        return outcomes
