"""What a policy sees and what it answers. A policy reads the queues as they are now and changes nothing; the core applies
its decision."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Stage
from depthbatch.scheduler.admission import Admission
from depthbatch.scheduler.config import DraftLimit
from depthbatch.scheduler.inflight import InFlight
from depthbatch.scheduler.requests import HeadPrompt, PrefillLimit
from depthbatch.scheduler.rows import DECODE, EXITED, READY, DecodingRows, Owners, ReadyRows, SlotArray


class Decision(NamedTuple):
    """What comes next: a stage, or a request that is set back, after which the policy is asked again."""

    stage: Stage | None
    prefill_limit: PrefillLimit | None = None  # of a prefill; None = M tokens and all free slots
    set_back: int | None = None  # without a stage: id of the waiting request that goes behind all that are not overdue
    drafts: DraftLimit | None = None  # of a coda: which rows it also reads for a draft


class RetiredStage(NamedTuple):
    """A stage whose result has come, as a policy observes it. Times in seconds on the worker's clock."""

    stage: Stage
    rows: int
    slots: SlotArray  # of the rows; of a coda's, those that are read for good
    depths: tuple[int, ...]  # exit depth of each token it sampled for good
    tokens: int  # prompt tokens of a prefill, context tokens of a core step
    first_tokens: tuple[tuple[int, int], ...]  # (slot, order) of each row that has its first token from it and runs on
    after_no_work: bool  # the worker stood still before it because nothing was runnable
    start_s: float
    end_s: float
    awaited: bool = False  # a coda whose result had to come before the next choice
    verdict_s: float | None = None  # lost with a coda that says which guesses are right, by waiting or by going on
    moved_s: float = 0.0  # that copies of preempted K/V took right before it


class QueueView:
    """The queues, read only. The same in every async mode, so that overlap never changes a decision: ``q_c`` already
    counts the rows that exit with the core step in flight."""

    def __init__(self, admission: Admission, in_flight: InFlight, r_max: int) -> None:
        self._admission = admission
        self._in_flight = in_flight
        self._rows = admission.rows
        self._r_max = r_max

    @property
    def free_slots(self) -> int:
        return self._admission.slots.free

    @property
    def q_p(self) -> int:
        """Requests waiting for prefill; a partly prefilled one is not counted."""
        return len(self._admission.waiting)

    @property
    def q_d(self) -> int:
        """Decode tokens waiting for prelude."""
        return self._rows.count[DECODE]

    @property
    def q_r(self) -> int:
        """Rows ready for their next loop."""
        return self._rows.count[READY]

    @property
    def q_c(self) -> int:
        """Exited rows waiting for coda."""
        return self._rows.count[EXITED]

    @property
    def informed(self) -> bool:
        """False when a core step is in flight whose flags will say more of the next exits."""
        return not (self._rows.active_with["gated"] and self._in_flight.cores)

    def can_prefill(self, min_free_slots: int | None = None) -> bool:
        """CanPrefill of scheduling.md; with another S than the configured one, if given."""
        return self._admission.can_prefill(min_free_slots)

    @property
    def stalled(self) -> int:
        """Rows that wait for a coda to fill the planes of the one ahead."""
        chains = self._admission.chains
        return 0 if chains is None else chains.stalled()

    @property
    def active(self) -> int:
        """Sequences that have a slot."""
        return self._rows.sequences

    def draft_outcomes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Drafts that were right and that were wrong so far, each [r_max + 1] by draft depth. Raises without speculation."""
        chains = self._admission.chains
        if chains is None:
            raise ValueError("no drafts without speculation")
        return chains.right, chains.wrong

    def urgent_exits(self, lanes: int) -> int:
        """Rows of Q_C whose input is certain, or that are the last of a chain of fewer than so many draft lanes."""
        chains = self._admission.chains
        return self.q_c if chains is None or not self.q_c else chains.urgent_exits(lanes)

    def drafts(self, limit: DraftLimit) -> int:
        """Rows that a coda would read for a draft under this limit."""
        return int(self._admission.tails(limit).size)

    def asks_for_coda(self, limit: DraftLimit) -> int:
        """Rows that a coda would read for a draft under this limit, and rows that wait for one to fill planes."""
        return self.drafts(limit) + self.stalled

    def ready_rows(self) -> ReadyRows:
        """Loops of the rows of Q_R, and which of them certainly exit at their next one."""
        return self._rows.ready_rows()

    def ready_owners(self) -> Owners:
        """Of the rows of ``ready_rows``, in the same order."""
        return self._rows.owners(READY)

    def exited_owners(self) -> Owners:
        """Of the rows of Q_C."""
        return self._rows.owners(EXITED)

    def decoding_rows(self) -> DecodingRows:
        """Every row that carries a token."""
        return self._rows.decoding_rows(self._r_max)

    def head_prompt(self, now: float) -> HeadPrompt | None:
        """The partly prefilled prompt, else the waiting one that is next, if any. ``now``: seconds."""
        admission = self._admission
        if admission.partial is not None:
            request, arrived_s = admission.partial, float(self._rows.arrived_s[admission.partial.slot])
            tokens, untouched = request.length - request.computed, False
        elif (head := admission.next_prompt()) is not None:
            request, arrived_s = head, np.nan if head.arrived_s is None else head.arrived_s
            tokens, untouched = head.length, not (head.output or head.preempted)
        else:
            return None
        waited_s = 0.0 if np.isnan(arrived_s) else max(0.0, now - arrived_s)
        return HeadPrompt(request.request_id, waited_s, tokens, untouched, request.overdue)


class Policy(Protocol):
    """One decision at a time."""

    full_depth: bool  # True: gates and recorded depths are not used, every token runs its max_loops
    learns: bool  # True: wants to observe retired stages, context tokens included

    def choose(self, view: QueueView, now: float) -> Decision | None:
        """The next decision, None when nothing can run. ``now``: seconds, on the clock of arrivals."""
        ...

    def observe(self, retired: RetiredStage) -> None:
        """A stage has retired; stages come in order."""
        ...
