"""How often a draft is right, by the loops after which it was read: learned from drafts whose token has become known.

Outcomes of a depth are forgotten as newer ones of it come. What a shallow read knows a deeper one knows, too, so the estimate
never falls with depth: where single depths say otherwise they are pooled (isotonic regression, by weight), which also puts a
depth that was never tried between its neighbours. A weak prior keeps such depths attractive enough to be tried.
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
_MEMORY = 1000.0  # outcomes of a depth
_PRIOR_WEIGHT = 6.0  # in outcomes
_PRIOR = 0.85  # of the shallowest read; that of the deepest is 1


class Acceptance:
    """Shares of right drafts by draft depth."""

    def __init__(self, r_max: int) -> None:
        self._seen = np.zeros((2, r_max + 1))  # right and wrong drafts, as they were counted last
        self._outcomes = np.zeros((2, r_max + 1))
        depths = np.arange(r_max + 1)
        self._prior = _PRIOR + (1.0 - _PRIOR) * depths / r_max
        self.by_depth = self._estimate()  # [r_max + 1]; at r_max a read is final, and right

    def refresh(self, right: npt.NDArray[np.int64], wrong: npt.NDArray[np.int64]) -> None:
        """``right``, ``wrong`` [r_max + 1]: drafts by depth, counted from the start."""
        counted = np.array([right, wrong], np.float64)
        new = counted - self._seen
        self._seen = counted
        self._outcomes *= np.exp(-new.sum(axis=0) / _MEMORY)
        self._outcomes += new
        self.by_depth = self._estimate()

    def known(self, depth: int) -> float:
        """How many outcomes the estimate of a depth rests on."""
        return float(self._outcomes[:, depth].sum())

    def doubt(self, depth: int, outcomes: float) -> None:
        """What is known of a depth counts for no more than so many outcomes: it may have changed."""
        known = self._outcomes[:, depth].sum()
        self._outcomes[:, depth] *= outcomes / max(known, outcomes)

    def _estimate(self) -> FloatArray:
        right, wrong = self._outcomes
        weight = (right + wrong + _PRIOR_WEIGHT)[1:-1]
        share = (right[1:-1] + _PRIOR_WEIGHT * self._prior[1:-1]) / weight
        return np.concatenate([[0.0], _isotonic(share, weight), [1.0]])


def _isotonic(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The nearest non-decreasing values, by weighted squares: the largest over i <= k of the least over j >= k of the
    mean over i .. j."""
    n = values.size
    total = np.concatenate([[0.0], np.cumsum(values * weights)])
    weight = np.concatenate([[0.0], np.cumsum(weights)])
    first, last = np.arange(n)[:, None], np.arange(1, n + 1)[None, :]
    mean = np.full((n, n), np.inf)
    within = last > first
    mean[within] = ((total[last] - total[first]) / np.where(within, weight[last] - weight[first], 1.0))[within]
    least_from = np.minimum.accumulate(mean[:, ::-1], axis=1)[:, ::-1]
    least_from[~within] = -np.inf  # i > k
    out: FloatArray = least_from.max(axis=0, initial=0.0)
    return out
