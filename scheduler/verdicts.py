"""Whether the next stage waits for the result of a coda that says which guesses are right (docs/speculation.md).

Without waiting, the rows behind a wrong guess run once more for nothing, and their sequence goes on a core step later. With
waiting, the device stands still until the result has come and the next stage has arrived. With that standstill w, a core step
of c, shares a of the guesses right lately, and n sequences with a row in the coda whose successor may be wrong, of S active
ones, the device's time is lost by all, or by n (1 - a) of S: the coda is awaited iff

    w <= c (1 - a) n / S.

Where it is not, and w is shorter than a core step, the result is awaited behind the next one, so that no guess runs for two of them.
w is measured after codas that were awaited, so one of ``_MEASURE_EVERY`` is whatever this says. Approximation: the rows that
run for nothing cost nothing beside their sequence's time. The output is the same either way, as is every depth.
"""

from depthbatch.common.frames import Stage
from depthbatch.common.messages import StageResult
from depthbatch.scheduler.inflight import InFlightStep
from depthbatch.scheduler.lanes import Chains

_FORGET = 0.95  # of the means, a stage
_FORGET_OUTCOMES = 0.998  # a guess
_PRIOR_OUTCOMES = 4.0  # of which half are right
_MEASURE_EVERY = 16


class Verdicts:
    """Learns from every stage that has retired. Times in seconds on the worker's clock."""

    def __init__(self, chains: Chains | None) -> None:
        self._chains = chains
        self._core_s = 0.0
        self._standstill_s = 0.0
        self._right = self._wrong = 0.5 * _PRIOR_OUTCOMES
        self._counted = (0, 0)  # right and wrong guesses, as they were counted last
        self._last_end_s: float | None = None  # of the latest stage
        self.loss_s = 0.0  # of the latest coda that was asked about, by what is known
        self._was_awaited = False
        self._since_measured = 0  # codas

    def awaited(self, sequences: int, active: int) -> bool:
        """Is this coda, with rows of so many sequences whose successor may be wrong, of so many active ones?"""
        share_wrong = self._wrong / (self._right + self._wrong)
        going_on_s = self._core_s * share_wrong * sequences / max(active, 1)
        self.loss_s = min(self._standstill_s, going_on_s)
        self._since_measured += 1
        awaited = self._standstill_s <= going_on_s or self._since_measured >= _MEASURE_EVERY
        if awaited:
            self._since_measured = 0
        return awaited

    @property
    def due_behind_a_core_step(self) -> bool:
        """A result that is not awaited comes while the next core step runs."""
        return self._standstill_s < self._core_s

    def observe(self, step: InFlightStep, result: StageResult) -> None:
        """A stage has retired."""
        if self._chains is None:
            return
        if self._was_awaited and self._last_end_s is not None and not step.header.after_no_work:
            # at most a core step: whatever takes longer is no wait for a message
            standstill_s = min(max(0.0, result.start_s - result.moved_s - self._last_end_s), self._core_s)
            self._standstill_s += (1.0 - _FORGET) * (standstill_s - self._standstill_s)
        self._last_end_s = result.end_s
        self._was_awaited = step.chained is not None and step.blocks_next
        if step.stage is Stage.CORE:
            seconds = result.end_s - result.start_s
            self._core_s += (1.0 - _FORGET) * (seconds - self._core_s) if self._core_s else seconds
        elif step.chained is not None:
            self._count(self._chains)

    def _count(self, chains: Chains) -> None:
        right, wrong = int(chains.right.sum()), int(chains.wrong.sum())
        new_right, new_wrong = right - self._counted[0], wrong - self._counted[1]
        self._counted = right, wrong
        keep = _FORGET_OUTCOMES ** (new_right + new_wrong)
        self._right = keep * self._right + new_right
        self._wrong = keep * self._wrong + new_wrong
