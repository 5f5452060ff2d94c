"""When coda + prelude should run: an optimal stopping rule with one free number, and the tournament that finds it.

What is minimised. Costs that grow with rows (gamma, alpha) are paid once per token whatever the order of stages, so
only fixed costs depend on it: the time per token that order can change is

    (core steps * delta_core + codas * (delta_coda + delta_prelude)) / tokens.

(Where a stage's time follows its bucket rather than its rows, the padded rows of core and coda are counted with it.)

A core step that runs while c rows wait wastes c of its row-places; a coda serves all that wait for one fixed price.
Once a price theta (in row-places) is put on the service of one token, each coda is an optimal stopping problem: with c
rows waiting and A_s rows expected to exit within the next s core steps (A_1 is known, lookahead; the rest follows
from hazards), deferring by s steps lets A_s rows share the coda, worth theta A_s, and holds waiting rows for

    H_s = c s + sum_{j < s} A_j      row-places.

Rule: defer iff theta A_s > H_s for some s <= r_max. theta = 0 is K = 1, theta -> infinity is no-refill, and under a
steady trickle of a exits a step the rule is K = theta a. Approximation: the later fate of the rows served (that rows
restarted together exit together) is left out of the rule; it enters through the choice of theta, which is made by
playing all candidates against each other. On instances small enough for value iteration the rule with the best theta
is within 0.6 % of the optimum (tests/policy).

First guess, from the economic order quantity: under a trickle of a = W / depth exits a step, a coda every k steps costs
boundary_delta / (k a) + delta_core (k - 1) / (2 W) a token, least at k = sqrt(2 boundary_delta / delta_core * depth);
k = 1 (theta = 0) is better than k = 2 when boundary_delta / delta_core * depth < 1.

Knows neither the scheduler nor the device; times are seconds.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Int32Array
from depthbatch.scheduler.policy.cost_model import DecodeCosts
from depthbatch.scheduler.policy.exit_forecast import ExitForecast

FloatArray = npt.NDArray[np.float64]
THETAS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 6.5, 10.0, 16.0, 32.0, 1e6)
_MEMORY_ROW_STEPS = 40_000.0  # of the tournament's counts; older ones are forgotten
_DISCOUNT = 0.25  # of the counts whenever twice as many depths are known
_MIN_ROW_STEPS = 6_000  # played before its result counts


def first_guess(core_delta: float, boundary_delta: float, mean_depth: float) -> float:
    """theta of the economic order quantity."""
    ratio = boundary_delta / max(core_delta, 1e-12) * mean_depth
    return float(np.sqrt(2.0 * ratio)) if ratio >= 1.0 else 0.0


def defer(theta: float, waiting: int, exits: FloatArray) -> bool:
    """The rule: should the ``waiting`` rows wait for one more core step? ``exits`` [r_max]: rows expected to exit in
    the s-th next core step."""
    within = exits.cumsum()
    held = within.cumsum()
    held -= within  # sum over j < s
    held += waiting * _STEPS[: exits.size]
    within *= theta
    return bool((within > held).any())


_STEPS = np.arange(1.0, 257.0)


class Tournament:
    """Plays the rule with every theta in a small simulation of decode, one core step at a time.

    Rows never finish and draw their depths from the successive depths that real slots had lately, so distribution and
    correlation are those of the traffic. All candidates see the same depths. Sizes are relative (exits and waiting
    rows both scale with W), so up to 32 rows stand for any W. What it counts (core steps and codas a token) does not
    depend on stage costs; those are applied when the best theta is asked for.

    Rows start at loops spread over r_max: where depths have a common divisor, rows in step share their codas for free,
    and only a theta that brings rows back into step (as arrivals keep breaking it) may be credited with that.
    """

    def __init__(self, width: int, forecast: ExitForecast, bucket_of: Sequence[int] | None = None) -> None:
        """``bucket_of`` [W + 1]: padded rows by rows; None = no padding."""
        self._forecast = forecast
        self._rows = min(width, 32)
        sizes = [round(rows * width / self._rows) for rows in range(self._rows + 1)]  # at the real width
        self._padded = np.array([bucket_of[size] if bucket_of and size else size for size in sizes])
        self._keep = 1.0 - self._rows / _MEMORY_ROW_STEPS
        n = len(THETAS)
        self._theta = np.array(THETAS)[:, None]
        self._loops = np.zeros((n, self._rows), np.int64)
        started = 1 + np.arange(self._rows) * forecast.r_max // self._rows
        self._left = np.tile(started, (n, 1))  # [candidates, rows] loops to go, 0 = waits for coda
        self._visits = np.zeros((n, self._rows), np.int64)
        self._offset = (np.arange(n) * (forecast.r_max + 1))[:, None]
        self._step = np.arange(1.0, forecast.r_max + 1.0)
        self._counts = np.zeros((5, n))  # core steps, codas, tokens, padded rows of core and of coda, with forgetting
        self._depths: Int32Array | None = None
        self._tokens_known = 0
        self.steps = 0

    def refresh(self) -> None:
        """Takes the latest depths. As long as there are few, what was played on fewer still is discounted."""
        self._depths = self._forecast.sequences(self._rows)
        if self._forecast.tokens >= 2 * self._tokens_known and self._tokens_known < self._forecast.capacity:
            self._counts *= _DISCOUNT
            self._tokens_known = max(self._forecast.tokens, 1)

    def play(self, informed: bool) -> None:
        """One core step of every candidate; nothing before there are depths to draw. ``informed``: the exits of the
        next step are known when coda is decided (not so two core steps ahead of the device)."""
        if self._depths is None:
            return
        left = self._left
        idle = left == 0
        waiting = idle.sum(axis=1)
        go = ~self._defers(waiting, informed)
        go &= waiting > 0
        self._serve(idle & go[:, None])
        running = self._left > 0
        self._left -= running
        self._loops += running
        counts = self._counts
        counts *= self._keep
        counts[0] += 1.0
        counts[1] += go
        counts[2] += waiting * go
        counts[3] += self._padded[running.sum(axis=1)]
        counts[4] += self._padded[waiting] * go
        self.steps += 1

    @property
    def settled(self) -> bool:
        """True when enough has been played for a verdict."""
        return self.steps * self._rows >= _MIN_ROW_STEPS

    def best(self, costs: DecodeCosts) -> float | None:
        """theta of the least cost per token that order can change, None before enough has been played."""
        if not self.settled:
            return None
        core_steps, codas, tokens, core_padded, coda_padded = self._counts
        spent = core_steps * costs.core_delta + core_padded * costs.core_padded
        spent += codas * costs.boundary_delta + coda_padded * costs.boundary_padded
        return THETAS[int(np.argmin(spent / np.maximum(tokens, 1e-9)))]

    @property
    def counts(self) -> FloatArray:
        """[3, candidates]: core steps, codas, tokens."""
        return self._counts[:3]

    def _defers(self, waiting: npt.NDArray[np.int64], informed: bool) -> npt.NDArray[np.bool_]:
        left, n = self._left, len(THETAS)
        undecided = left > 1 if informed else left > 0
        cells = (self._loops + self._offset)[undecided]
        histogram = np.bincount(cells, minlength=n * (self._forecast.r_max + 1)).reshape(n, -1)
        exits = histogram @ (self._forecast.stay if informed else self._forecast.blind)
        if informed:
            exits[:, 0] += (left == 1).sum(axis=1)
        within = exits.cumsum(axis=1)
        held = within.cumsum(axis=1)
        held -= within
        held += waiting[:, None] * self._step
        within *= self._theta
        defers: npt.NDArray[np.bool_] = np.logical_or.reduce(within > held, axis=1)
        return defers

    def _serve(self, served: npt.NDArray[np.bool_]) -> None:
        candidates, rows = served.nonzero()
        if not candidates.size:
            return
        assert self._depths is not None
        visit = self._visits[candidates, rows]
        self._left[candidates, rows] = self._depths[rows, visit % self._depths.shape[1]]
        self._loops[candidates, rows] = 0
        self._visits[candidates, rows] = visit + 1
