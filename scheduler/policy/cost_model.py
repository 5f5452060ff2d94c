"""What stages cost on this device, fitted online from stage times: t = delta + slopes . work (scheduling.md, cost model).

Decode stages run in buckets, so part of their time may follow the padded rows instead of the real ones: both are work.

Exponentially forgotten least squares over a handful of sums, so that a sample costs about a microsecond and memory is
constant. Knows nothing of schedules. Before the work of a stage has varied, delta and slopes cannot be told apart; a
weak prior then splits the time in halves, and fades as soon as the samples say more.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Stage

FloatArray = npt.NDArray[np.float64]

_FORGET = 0.998  # weight of a sample after one more: a memory of some 500 stages
_PRIOR_WEIGHT = 0.02  # in samples
_RIDGE = 1e-9  # relative
_TOLERANCE = 0.3  # relative; beyond it a sample pulls no harder than at it: stages that were interrupted are not slow
_MIN_SAMPLES = 3
_MOST_NOTED = 4096


class LinearFit:
    """t = delta + sum_i slope_i x_i with delta, slopes >= 0. Samples are only noted; ``solve`` takes them in."""

    def __init__(self, num_slopes: int, padded: bool = False) -> None:
        """``padded``: the last work is padded rows; as long as they never varied, delta has their share."""
        n = num_slopes + 1
        self._padded = padded
        self._xx = np.zeros((n, n))
        self._xy = np.zeros(n)
        self._noted: deque[tuple[float, ...]] = deque(maxlen=_MOST_NOTED)  # 1, work ..., seconds
        self._coefficients: list[float] | None = None
        self.samples = 0

    def add(self, work: Sequence[float], seconds: float) -> None:
        """One stage: its work (rows, context tokens, prompt tokens) and its time."""
        self._noted.append((1.0, *work, seconds))

    def solve(self) -> float | None:
        """Refits; returns delta in seconds, None before there are samples enough."""
        self._take_in()
        if self.samples < _MIN_SAMPLES:
            return None
        xx, xy = self._with_prior()
        keep = list(range(xy.size - 1 if self._padded and self._last_is_constant() else xy.size))
        while True:
            solution = np.linalg.solve(xx[np.ix_(keep, keep)], xy[keep])
            worst = int(np.argmin(solution))
            if solution[worst] >= 0 or len(keep) == 1:
                break
            del keep[worst]
        coefficients = np.zeros(xy.size)
        coefficients[keep] = np.maximum(solution, 0.0)
        self._coefficients = coefficients.tolist()
        return self._coefficients[0]

    def _last_is_constant(self) -> bool:
        mean = self._xx[0, -1] / self._xx[0, 0]
        square = self._xx[-1, -1] / self._xx[0, 0]
        return bool(square - mean * mean <= 1e-9 * square)

    def _take_in(self) -> None:
        """Adds the noted samples to the sums, with Huber's weights against the last fit."""
        if not self._noted:
            return
        noted = np.array(self._noted)
        self._noted.clear()
        n = len(noted)
        self.samples += n
        x, seconds = noted[:, :-1], noted[:, -1]
        expected = _first_fit(x, seconds) if self._coefficients is None else x @ self._coefficients
        trust = _trust(seconds, expected)
        if 2 * np.count_nonzero(trust < 1.0) > n:  # it is the device that has changed
            trust = np.ones(n)
        weighted = x * (trust * _FORGET ** np.arange(n - 1, -1, -1))[:, None]
        self._xx *= _FORGET**n
        self._xy *= _FORGET**n
        self._xx += weighted.T @ x
        self._xy += weighted.T @ seconds

    @property
    def coefficients(self) -> list[float] | None:
        """delta, slopes of the last solve, in seconds."""
        return self._coefficients

    def _with_prior(self) -> tuple[FloatArray, FloatArray]:
        """The normal equations plus a pseudo-sample 'no work takes half of the mean time', and a ridge that keeps them
        solvable when some work never varied."""
        mean_seconds = self._xy[0] / self._xx[0, 0]
        xx, xy = self._xx.copy(), self._xy.copy()
        xx.flat[:: xy.size + 1] *= 1.0 + _RIDGE
        xx[0, 0] += _PRIOR_WEIGHT
        xy[0] += _PRIOR_WEIGHT * 0.5 * mean_seconds
        return xx, xy


def _trust(seconds: FloatArray, expected: FloatArray) -> FloatArray:
    """Huber's weights [n]: 1 within the tolerance, falling beyond it."""
    off: FloatArray = np.abs(seconds - expected) / np.maximum(expected, 1e-12)
    return _TOLERANCE / np.maximum(off, _TOLERANCE)


def _first_fit(x: FloatArray, seconds: FloatArray) -> FloatArray:
    """Expected seconds [n] before there is a fit: least squares, reweighted a few times."""
    trust = np.ones(len(seconds))
    for _ in range(6):
        root = np.sqrt(trust)
        expected: FloatArray = x @ np.linalg.lstsq(x * root[:, None], seconds * root, rcond=None)[0]
        trust = _trust(seconds, expected)
    return expected


class DecodeCosts(NamedTuple):
    """What of core steps and of coda + prelude depends on the order of stages, in seconds."""

    core_delta: float
    core_padded: float  # a padded row
    boundary_delta: float
    boundary_padded: float


class RowCosts(NamedTuple):
    """Seconds that a row adds to a stage."""

    core: float
    coda: float
    prelude: float


class StageCosts:
    """Fits of all stages. Work: core = (rows, context tokens, padded rows), coda and prelude = (rows, padded rows),
    prefill = (tokens,)."""

    def __init__(self) -> None:
        self._fits = {
            Stage.CORE: LinearFit(3, padded=True),
            Stage.CODA: LinearFit(2, padded=True),
            Stage.PRELUDE: LinearFit(2, padded=True),
            Stage.PREFILL: LinearFit(1),
        }
        self.decode: DecodeCosts | None = None  # None: not known yet
        self.prefill_delta: float | None = None  # seconds
        self.prefill_gamma = 0.0  # seconds a prompt token, once the delta is known

    def add(self, stage: Stage, rows: int, padded: int, tokens: int, seconds: float) -> None:
        """One retired stage; ``tokens`` are context tokens (core) or prompt tokens (prefill)."""
        match stage:
            case Stage.CORE:
                self._fits[stage].add((rows, tokens, padded), seconds)
            case Stage.PREFILL:
                self._fits[stage].add((tokens,), seconds)
            case _:
                self._fits[stage].add((rows, padded), seconds)

    def refit(self) -> None:
        """Solves all fits anew."""
        for fit in self._fits.values():
            fit.solve()
        prefill = self._fits[Stage.PREFILL].coefficients
        if prefill is not None:
            self.prefill_delta, self.prefill_gamma = prefill
        core, coda, prelude = (self._fits[stage].coefficients for stage in (Stage.CORE, Stage.CODA, Stage.PRELUDE))
        if core is not None and coda is not None and prelude is not None:
            self.decode = DecodeCosts(core[0], core[-1], coda[0] + prelude[0], coda[-1] + prelude[-1])

    def delta(self, stage: Stage) -> float | None:
        """Seconds that a stage takes however few rows it has; None before it is known."""
        coefficients = self._fits[stage].coefficients
        return None if coefficients is None else coefficients[0]

    def row_costs(self, context: float) -> RowCosts | None:
        """What one more row with ``context`` tokens costs; None before it is known."""
        core, coda, prelude = (self._fits[stage].coefficients for stage in (Stage.CORE, Stage.CODA, Stage.PRELUDE))
        if core is None or coda is None or prelude is None:
            return None
        return RowCosts(core[1] + core[2] * context + core[3], coda[1] + coda[2], prelude[1] + prelude[2])

    def row_seconds(self, context: float, depth: float) -> float:
        """What one more row with ``context`` tokens adds to a core step and, at that mean depth, to its share of the
        boundary stages; 0 before it is known."""
        row = self.row_costs(context)
        return 0.0 if row is None else row.core + (row.coda + row.prelude) / max(depth, 1.0)
