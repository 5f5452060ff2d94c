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

**Where no request has to wait for a slot** more tokens per second bring nothing forward: what is left to order is who waits for whom, and
what is minimised is the p99 over requests of L, the time per token after the first one. Under the rule above a
deep row pays for the codas of others and comes back out of step, so that requests of a few dozen tokens come out far apart.

* Rows count by how late their requests are. A request that has given k tokens is off the mean of those that run by about 1 / sqrt(k) by
  chance alone, so z = sqrt(k) (L - mean) / s, with s^2 the mean of k (L - mean)^2, is its standard score. Its row counts
  w = e^z over the mean of these (``lateness``): a cost of the form sum(e^z) is one of the tail, and delay is taken from
  requests that are ahead. The rule is the same with sums of w in place of rows: theta sum(w) of exits against sum(w) held.
* theta is the one of the least mean + 2.33 standard deviations of L, the p99 of a normal distribution. What theta adds to their
  variance is S^2 E[1/n], for requests of n tokens, S^2 the mean over tokens of k (L - its mean)^2. A tournament of as many rows
  as run (down to a power of two) plays the rule with w, each row one request of 1 / E[1/n] tokens after another, and counts S^2.
  Requests come apart for other reasons, too, busy times above all: by what has been observed, less what the theta in force adds.
  The more there is of that, the less a spread of its own costs, and the more the mean counts.

None of this has a number of its own: 2.33 is the 99th percentile, e^z the exponential of a score, the rest is measured.
Approximations: arrivals and prefill, which all rows wait for, are not played; how long a request has waited for its first token
is not held in its favour, as codas cannot make up for it.

Knows neither the scheduler nor the device; times are seconds.
"""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Int32Array
from depthbatch.scheduler.policy.cost_model import DecodeCosts
from depthbatch.scheduler.policy.exit_forecast import ExitForecast

FloatArray = npt.NDArray[np.float64]
THETAS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 6.5, 10.0, 16.0, 32.0, 1e6)
_P99 = NormalDist().inv_cdf(0.99)  # standard deviations from the mean
LARGEST_GAME = 32  # rows of a tournament
_MEMORY_ROW_STEPS = 40_000.0  # of the tournament's counts; older ones are forgotten
_DISCOUNT = 0.25  # of the counts whenever twice as many depths are known
_MIN_ROW_STEPS = 6_000  # played before its result counts


def first_guess(core_delta: float, boundary_delta: float, mean_depth: float) -> float:
    """theta of the economic order quantity."""
    ratio = boundary_delta / max(core_delta, 1e-12) * mean_depth
    return float(np.sqrt(2.0 * ratio)) if ratio >= 1.0 else 0.0


def lateness(elapsed: FloatArray, tokens: FloatArray | npt.NDArray[np.int64]) -> FloatArray:
    """What each row counts, [..., rows], by how late its request is: e to its standard score, over their mean. ``tokens`` that it has
    given since its first one, which came ``elapsed`` ago, in any unit. Without tokens its score is 0."""
    known = tokens > 0
    per_token = np.where(known, elapsed, 0.0) / np.maximum(tokens, 1)
    mean = per_token.sum(axis=-1, keepdims=True) / np.maximum(known.sum(axis=-1, keepdims=True), 1)
    score = (per_token - mean) * np.sqrt(tokens)
    deviation = np.sqrt((score * score).mean(axis=-1, keepdims=True))
    out: FloatArray = np.exp(score / np.maximum(deviation, 1e-12))
    out /= out.mean(axis=-1, keepdims=True)
    return out


def defer(theta: float, waiting: float, exits: FloatArray) -> bool:
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

    With ``by_lateness`` rows count by how late they are, and each serves one request after another.
    """

    def __init__(
        self, width: int, forecast: ExitForecast, bucket_of: Sequence[int] | None = None, by_lateness: bool = False
    ) -> None:
        """``bucket_of`` [W + 1]: padded rows by rows; None = no padding. ``by_lateness``: rows count by how late they are."""
        self._forecast = forecast
        self._by_lateness = by_lateness
        self._rows = min(width, LARGEST_GAME)
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
        self._boundary = 1.0  # a coda and a prelude, in core steps
        self._length = np.inf  # tokens of a request
        self._clock = np.zeros((n, 1))  # core steps
        self._begun = np.full((n, self._rows), np.nan)  # on that clock, the row's request; nan = none yet
        self._served = np.zeros((n, self._rows))  # tokens that it has had since
        # Sums over tokens of k, k L and k L^2 (k tokens of L core steps each), with forgetting.
        self._apart = np.zeros((3, n))
        self._depths: Int32Array | None = None
        self._tokens_known = 0
        self.steps = 0

    def refresh(self, costs: DecodeCosts | None = None, length: float = np.inf) -> None:
        """Takes the latest depths and costs, and how many tokens a request has. As long as there are few depths, what was played
        on fewer still is discounted."""
        self._depths = self._forecast.sequences(self._rows)
        self._length = length
        if costs is not None:
            self._boundary = costs.boundary_delta / max(costs.core_delta, 1e-12)
        if self._forecast.tokens >= 2 * self._tokens_known and self._tokens_known < self._forecast.capacity:
            self._counts *= _DISCOUNT
            self._apart *= _DISCOUNT
            self._tokens_known = max(self._forecast.tokens, 1)

    def play(self, informed: bool) -> None:
        """One core step of every candidate; nothing before there are depths to draw. ``informed``: the exits of the
        next step are known when coda is decided (not so two core steps ahead of the device)."""
        if self._depths is None:
            return
        left = self._left
        idle = left == 0
        waiting = idle.sum(axis=1)
        weights = lateness(self._clock - self._begun, self._served) if self._by_lateness else None
        go = ~self._defers(waiting, weights, informed)
        go &= waiting > 0
        self._clock += self._boundary * go[:, None]
        self._serve(idle & go[:, None])
        self._clock += 1.0
        running = self._left > 0
        self._left -= running
        self._loops += running
        counts = self._counts
        counts *= self._keep
        self._apart *= self._keep
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
        return THETAS[int(np.argmin(self._cost_per_token(costs)))] if self.settled else None

    def best_tail(self, costs: DecodeCosts, length: float, variance: float, theta: float) -> float | None:
        """theta of the least p99 of a request's time per token, None before enough has been played: of requests of so many
        tokens, that were found to be apart by ``variance`` (seconds squared) under this ``theta``."""
        if not self.settled:
            return None
        own = (costs.core_delta * self.deviation) ** 2 / length
        others = max(0.0, variance - float(own[int(np.argmin(np.abs(self._theta[:, 0] - theta)))]))
        tail = self._rows * self._cost_per_token(costs) + _P99 * np.sqrt(others + own)
        return THETAS[-1 - int(np.argmin(tail[::-1]))]  # of equals the one that keeps rows in step

    def _cost_per_token(self, costs: DecodeCosts) -> FloatArray:
        core_steps, codas, tokens, core_padded, coda_padded = self._counts
        spent = core_steps * costs.core_delta + core_padded * costs.core_padded
        spent += codas * costs.boundary_delta + coda_padded * costs.boundary_padded
        out: FloatArray = spent / np.maximum(tokens, 1e-9)
        return out

    @property
    def deviation(self) -> FloatArray:
        """[candidates]: core steps by which requests of one token would be off the mean time; of n tokens, over sqrt(n)."""
        tokens, took, squares = self._apart
        variance = (squares - took * took / np.maximum(tokens, 1e-9)) / np.maximum(self._counts[2], 1e-9)
        out: FloatArray = np.sqrt(np.maximum(variance, 0.0))
        return out

    @property
    def counts(self) -> FloatArray:
        """[3, candidates]: core steps, codas, tokens."""
        return self._counts[:3]

    def _defers(
        self, waiting: npt.NDArray[np.int64], weights: FloatArray | None, informed: bool
    ) -> npt.NDArray[np.bool_]:
        left, n = self._left, len(THETAS)
        undecided = left > 1 if informed else left > 0
        cells = (self._loops + self._offset)[undecided]
        inside = None if weights is None else weights[undecided]
        histogram = np.bincount(cells, inside, n * (self._forecast.r_max + 1)).reshape(n, -1)
        exits = histogram @ (self._forecast.stay if informed else self._forecast.blind)
        if informed:
            exits[:, 0] += _total(left == 1, weights)
        within = exits.cumsum(axis=1)
        held = within.cumsum(axis=1)
        held -= within
        held += _total(left == 0, weights)[:, None] * self._step
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
        if self._by_lateness:
            self._count_token(candidates, rows)

    def _count_token(self, candidates: npt.NDArray[np.intp], rows: npt.NDArray[np.intp]) -> None:
        """Rows that are served: what their requests' tokens have taken so far, and whether the next one begins."""
        clock, begun = self._clock[:, 0][candidates], self._begun[candidates, rows]
        counts = ~np.isnan(begun)
        served = (self._served[candidates, rows] + 1.0) * counts
        took = np.where(counts, clock - begun, 0.0)
        for at, sums in enumerate((served, took, took * took / np.maximum(served, 1.0))):
            self._apart[at] += np.bincount(candidates, sums, self._apart.shape[1])
        ends = ~counts | (served >= self._length)
        self._served[candidates, rows] = np.where(ends, 0.0, served)
        self._begun[candidates[ends], rows[ends]] = clock[ends]


def _total(rows: npt.NDArray[np.bool_], weights: FloatArray | None) -> FloatArray | npt.NDArray[np.int64]:
    """[candidates]: of these rows, how many or how much."""
    out: FloatArray | npt.NDArray[np.int64] = rows.sum(axis=1) if weights is None else (weights * rows).sum(axis=1)
    return out
