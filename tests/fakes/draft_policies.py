"""Policies that no one would serve with: they bring chains into the states that good ones rarely reach."""

from depthbatch.common.frames import Stage
from depthbatch.scheduler.config import DraftLimit
from depthbatch.scheduler.policy.view import Decision, QueueView, RetiredStage


class OneCodaEach:
    """A coda, with drafts, between any two core steps, where there is something to read."""

    full_depth = learns = False

    def __init__(self, limit: DraftLimit) -> None:
        self._limit, self._read = limit, False

    def choose(self, view: QueueView, now: float) -> Decision | None:
        if view.can_prefill():
            return Decision(Stage.PREFILL)
        if view.q_d:
            return Decision(Stage.PRELUDE)
        if not self._read and (view.q_c or view.asks_for_coda(self._limit)):
            self._read = True
            return Decision(Stage.CODA, drafts=self._limit)
        self._read = False
        return Decision(Stage.CORE) if view.q_r else None

    def observe(self, retired: RetiredStage) -> None:
        """Never called: learns is False."""


class CoreFirst:
    """Drafts as soon as they can be read, and some codas as soon as a row has exited; else core steps as long as any row
    can run, however many have exited."""

    full_depth = learns = False

    def __init__(self, limit: DraftLimit, codas: int) -> None:
        self._limit, self._codas = limit, codas

    def choose(self, view: QueueView, now: float) -> Decision | None:
        if view.can_prefill():
            return Decision(Stage.PREFILL)
        if view.q_d:
            return Decision(Stage.PRELUDE)
        if view.drafts(self._limit) or (view.q_c and (self._codas > 0 or not view.q_r)):
            self._codas -= 1
            return Decision(Stage.CODA, drafts=self._limit)
        return Decision(Stage.CORE) if view.q_r else None

    def observe(self, retired: RetiredStage) -> None:
        """Never called: learns is False."""
