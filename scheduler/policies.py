"""Policies: which of the legal moves comes next (scheduling.md). A policy sees queue sizes, never rows."""

from enum import Enum
from typing import Protocol

from depthbatch.common.frames import Stage


class Move(Enum):
    """A stage that could run now."""

    PREFILL = Stage.PREFILL
    PRELUDE = Stage.PRELUDE
    CORE = Stage.CORE
    CODA = Stage.CODA


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

    def can_prefill(self) -> bool:
        """CanPrefill of scheduling.md."""
        ...

    def next_exits(self) -> int:
        """Rows of Q_R that are known to exit at their next loop (known depths and loop limits)."""
        ...


class Policy(Protocol):
    """One decision: the next move, or None when nothing can run."""

    full_depth: bool  # True: gates and recorded depths are not used, every token runs its max_loops

    def choose(self, view: QueueView) -> Move | None: ...


class NoRefill:
    """Algorithm 1: all permitted prefills, then one cohort through prelude, shrinking core steps and one coda."""

    full_depth = False

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


class Refill:
    """Algorithm 2 with its minimum coda batch K."""

    full_depth = False

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


def make_policy(name: str, min_coda_batch: int) -> Policy:
    """The policy of that name (common.config.POLICIES)."""
    match name:
        case "cb":
            return ContinuousBatching()
        case "no-refill":
            return NoRefill()
        case "refill":
            return Refill(min_coda_batch)
    raise ValueError(f"unknown policy {name}")
