"""Policies that learn nothing: the paper's two algorithms and the full-depth baseline (scheduling.md). They go by the
sizes of the queues alone. With learned drafts refill learns which of them run (drafts.py), and nothing else."""

from depthbatch.common.frames import Stage
from depthbatch.scheduler.policy.drafts import Drafts, LearnedDrafts
from depthbatch.scheduler.policy.observed import Observed
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

    def __init__(self, min_coda_batch: int, drafts: Drafts | None = None) -> None:
        self._min_coda_batch = min_coda_batch
        self._drafts = drafts

    def choose(self, view: QueueView, now: float) -> Decision | None:
        if view.q_d:  # no decision lies between prefill or coda and prelude
            return PRELUDE
        if view.q_c >= self._min_coda_batch:
            return self._coda()
        if view.can_prefill():
            return PREFILL
        if self._drafts is not None and (coda := self._drafts.coda(view)) is not None:
            return coda
        if view.q_r:
            return CORE
        return self._coda() if view.q_c else None  # under-size, else K would deadlock at the tail

    def _coda(self) -> Decision:
        return CODA if self._drafts is None else CODA._replace(drafts=self._drafts.limit)


class LearnedDraftsRefill(Refill):
    """Refill whose drafts are learned."""

    learns = True

    def __init__(self, min_coda_batch: int, drafts: LearnedDrafts, observed: Observed) -> None:
        super().__init__(min_coda_batch, drafts)
        self.learned_drafts = drafts
        self._observed = observed

    def choose(self, view: QueueView, now: float) -> Decision | None:
        decision = super().choose(view, now)
        if decision is not None:
            self.learned_drafts.note(decision, view)
        return decision

    def observe(self, retired: RetiredStage) -> None:
        self._observed.add(retired)
