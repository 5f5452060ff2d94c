"""Policies: which of the legal moves comes next (scheduling.md). A policy sees queue sizes, never rows."""

from enum import Enum
from typing import NamedTuple, Protocol

from depthbatch.common.frames import Stage
from depthbatch.scheduler.inflight import InFlightStep
from depthbatch.scheduler.rows import DecodingRows, ReadyRows


class Move(Enum):
    """A stage that could run now."""

    PREFILL = Stage.PREFILL
    PRELUDE = Stage.PRELUDE
    CORE = Stage.CORE
    CODA = Stage.CODA


class PrefillLimit(NamedTuple):
    """What one prefill batch may hold."""

    tokens: int  # of prompts; at most M
    prompts: int  # that take a slot with it


class HeadPrompt(NamedTuple):
    """The prompt that prefill would go on with."""

    waited_s: float  # since its request arrived; 0 where that is not known
    tokens: int  # still to prefill
    untouched: bool  # nothing of its request has run yet
    overdue: bool  # its request has been set behind all that are not


class QueueView(Protocol):
    """What a policy may look at. The same in every async mode, so that overlap never changes a decision: ``q_c``
    already counts the rows that exit with the core step in flight."""

    @property
    def width(self) -> int:
        """W."""
        ...

    @property
    def free_slots(self) -> int: ...

    @property
    def q_p(self) -> int:
        """Requests waiting for prefill; a partly prefilled one is not counted."""
        ...

    @property
    def q_d(self) -> int:
        """Decode tokens waiting for prelude."""
        ...

    @property
    def q_r(self) -> int:
        """Rows ready for their next loop."""
        ...

    @property
    def q_c(self) -> int:
        """Exited rows waiting for coda."""
        ...

    @property
    def informed(self) -> bool:
        """False when a core step is in flight whose flags will say more of the next exits."""
        ...

    def can_prefill(self, min_free_slots: int | None = None) -> bool:
        """CanPrefill of scheduling.md; with another S than the configured one, if given."""
        ...

    def ready_rows(self) -> ReadyRows:
        """Loops of the rows of Q_R, and which of them certainly exit at their next one."""
        ...

    @property
    def now_s(self) -> float:
        """When the next stage is asked for, on the clock of stage times."""
        ...

    def decoding_rows(self) -> DecodingRows:
        """Every row that carries a token."""
        ...

    def head_prompt(self) -> HeadPrompt | None:
        """The partly prefilled prompt, else the head of the waiting queue, if any."""
        ...

    def set_head_overdue(self) -> None:
        """The head of the waiting queue goes behind all that are not overdue."""
        ...

    def next_exits(self) -> int:
        """Rows of Q_R that are known to exit at their next loop (known depths and loop limits)."""
        ...


class Policy(Protocol):
    """One decision: the next move, or None when nothing can run."""

    full_depth: bool  # True: gates and recorded depths are not used, every token runs its max_loops
    learns: bool  # True: wants to observe retired stages, context tokens included
    prefill_limit: PrefillLimit | None  # of the prefill that choose has just asked for; None = M tokens, all free slots

    def choose(self, view: QueueView) -> Move | None: ...

    def observe(self, step: InFlightStep, start_s: float, end_s: float) -> None:
        """A stage has retired; times on the worker's clock, stages in order."""
        ...


class _FixedPolicy:
    """Learns nothing."""

    full_depth = False
    learns = False
    prefill_limit: PrefillLimit | None = None

    def observe(self, step: InFlightStep, start_s: float, end_s: float) -> None:
        """Never called: learns is False."""


class NoRefill(_FixedPolicy):
    """Algorithm 1: all permitted prefills, then one cohort through prelude, shrinking core steps and one coda."""

    def choose(self, view: QueueView) -> Move | None:
        if view.q_r:
            return Move.CORE
        if view.q_c:
            return Move.CODA
        if view.can_prefill():
            return Move.PREFILL
        return Move.PRELUDE if view.q_d else None


class ContinuousBatching(NoRefill):
    """Token-level continuous batching at full depth: the baseline."""

    full_depth = True


class Refill(_FixedPolicy):
    """Algorithm 2 with its minimum coda batch K."""

    def __init__(self, min_coda_batch: int) -> None:
        self._min_coda_batch = min_coda_batch

    def choose(self, view: QueueView) -> Move | None:
        if view.q_d:  # no decision lies between prefill or coda and prelude
            return Move.PRELUDE
        if view.q_c >= self._min_coda_batch:
            return Move.CODA
        if view.can_prefill():
            return Move.PREFILL
        if view.q_r:
            return Move.CORE
        return Move.CODA if view.q_c else None  # under-size, else K would deadlock at the tail
