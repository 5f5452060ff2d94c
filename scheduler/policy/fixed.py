"""Policies that learn nothing: the paper's two algorithms and the full-depth baseline (scheduling.md). They go by the
sizes of the queues alone."""

from depthbatch.common.frames import Stage
from depthbatch.scheduler.config import DraftLimit
from depthbatch.scheduler.policy.view import Decision, QueueView, RetiredStage

PREFILL, PRELUDE, CORE, CODA = (Decision(stage) for stage in Stage)


class _FixedPolicy:
    """Learns nothing."""

    full_depth = False
    learns = False

    def observe(self, retired: RetiredStage) -> None:
        """Never called: learns is False."""


class NoRefill(_FixedPolicy):
    """Algorithm 1: all permitted prefills, then one cohort through prelude, shrinking core steps and one coda."""

    def choose(self, view: QueueView, now: float) -> Decision | None:
        if view.q_r:
            return CORE
        if view.q_c:
            return CODA
        if view.can_prefill():
            return PREFILL
        return PRELUDE if view.q_d else None


class ContinuousBatching(NoRefill):
    """Token-level continuous batching at full depth: the baseline."""

    full_depth = True


class Refill(_FixedPolicy):
    """Algorithm 2 with its minimum coda batch K; with drafts, a coda as soon as one can be read."""

    def __init__(self, min_coda_batch: int, drafts: DraftLimit | None = None) -> None:
        self._min_coda_batch = min_coda_batch
        self._drafts = drafts
        self._coda = CODA._replace(drafts=drafts)

    def choose(self, view: QueueView, now: float) -> Decision | None:
        if view.q_d:  # no decision lies between prefill or coda and prelude
            return PRELUDE
        if view.q_c >= self._min_coda_batch:
            return self._coda
        if view.can_prefill():
            return PREFILL
        if self._drafts is not None and view.asks_for_coda(self._drafts):
            return self._coda
        if view.q_r:
            return CORE
        return self._coda if view.q_c else None  # under-size, else K would deadlock at the tail
