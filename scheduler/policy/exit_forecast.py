"""When rows will exit, as far as that can be known: hazards per loop from the depths that were seen lately.

Keeps the last depths of every slot in order, so that what is alike about neighbouring tokens is kept too. Knows
nothing of costs and policies.
"""

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Int32Array

FloatArray = npt.NDArray[np.float64]
_MEMORY_TOKENS = 2048  # depths remembered over all slots,
_MEMORY_PER_SLOT = 32  # or this many per slot where that is more
_FEWEST_PER_SLOT = 4  # depths of a slot that make it worth replaying
_PRIOR = 0.5  # pseudo-tokens at r_max: loops beyond all that was seen are possible, and end there


class ExitForecast:
    """Depth statistics of the last tokens of each slot.

    ``stay[l, s - 1]``: P(exit in the s-th next core step) of a row with l loops behind it that is known to survive the
    next one (so column 0 is 0). ``blind[l, s - 1]``: the same when nothing is known of the next one.
    """

    def __init__(self, width: int, r_max: int) -> None:
        self.r_max = r_max
        self.tokens = 0
        self._memory = max(_MEMORY_PER_SLOT, _MEMORY_TOKENS // width)
        self._depths = np.zeros((width, self._memory), np.int64)
        self._written = np.zeros(width, np.int64)
        self._loop_after = np.arange(r_max + 1)[:, None] + np.arange(1, r_max + 1)  # of a row with l loops, s steps on
        self.refresh()

    def add(self, slots: npt.NDArray[np.intp], depths: tuple[int, ...]) -> None:
        """Depths of tokens that went through coda, with their slots (1..W). With drafts a slot may have several."""
        rows = slots - 1
        times = np.bincount(rows, minlength=self._written.size)
        at = self._written[rows]
        if times.max(initial=0) > 1:
            at += _repeats(rows)
        self._depths[rows, at % self._memory] = depths
        self._written += times
        self.tokens += len(depths)

    def refresh(self) -> None:
        """Recomputes the tables from the depths remembered."""
        counts = np.bincount(self._depths.ravel(), minlength=self.r_max + 1)[: self.r_max + 1].astype(np.float64)
        counts[0] = 0.0
        counts[self.r_max] += _PRIOR
        at_least = counts[::-1].cumsum()[::-1]
        hazard = np.ones(2 * self.r_max + 1)
        hazard[: self.r_max] = counts[:-1] / at_least[:-1]
        now = hazard[self._loop_after]
        survive = 1.0 - now
        self.blind = now * _product_before(survive)
        survive[:, 0] = 1.0
        self.stay = now * _product_before(survive)
        self.stay[:, 0] = 0.0

    @property
    def capacity(self) -> int:
        """Depths that are remembered."""
        return self._depths.size

    @property
    def mean_depth(self) -> float:
        """Mean of the depths remembered, r_max when there are none."""
        known = self._depths[self._depths > 0]
        return float(known.mean()) if known.size else float(self.r_max)

    def remaining(self) -> FloatArray:
        """[r_max + 1]: expected core steps to the exit by the loops behind a row; 0 at r_max."""
        left: FloatArray = self.blind @ np.arange(1.0, self.r_max + 1.0)
        left[self.r_max] = 0.0
        return left

    def sequences(self, rows: int) -> Int32Array | None:
        """Successive depths of ``rows`` slots, [rows, n], of the slots that have seen enough; None when none has."""
        seen = np.minimum(self._written, self._memory)
        known = np.flatnonzero(seen >= _FEWEST_PER_SLOT)
        if not known.size:
            return None
        length = int(seen[known].min())
        chosen = known[np.arange(rows) % known.size]
        # the last `length` depths, oldest first; slots that are used more than once start at different places
        turn = (np.arange(rows) // known.size * 7)[:, None]
        last = (turn + np.arange(length)) % length
        at = (self._written[chosen][:, None] - length + last) % self._memory
        depths: Int32Array = self._depths[chosen[:, None], at].astype(np.int32)
        return depths


def _repeats(values: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """[n]: how often each value has stood before."""
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    out = np.empty_like(values)
    out[order] = np.arange(values.size) - np.searchsorted(ascending, ascending)
    return out


def _product_before(factors: FloatArray) -> FloatArray:
    """[:, s] = product of factors[:, :s]."""
    out = np.ones_like(factors)
    np.cumprod(factors[:, :-1], axis=1, out=out[:, 1:])
    return out
