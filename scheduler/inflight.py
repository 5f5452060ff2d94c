"""Stages that are dispatched and not answered. The worker runs them in order, so this is a queue."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Int32Array, Stage
from depthbatch.common.messages import StageBatch, Variant
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.lanes import CodaRows
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.rows import SlotArray
from depthbatch.scheduler.stage_batch import PromptTargets


@dataclass(slots=True, eq=False)
class InFlightStep:
    """What is needed to make sense of a stage's result."""

    header: StageBatch
    stage: Stage
    slots: SlotArray  # [rows]
    dispatched_s: float
    lanes: SlotArray  # [rows]; slots, of a prefill
    orders: npt.NDArray[np.int64]  # [rows] of the requests that the rows were of
    blocks_next: bool = False  # nothing may be chosen before its result (own, preloop, and codas by verdicts.py)
    blocks_after_core: bool = False  # nor behind a core step after it, where one may be chosen before
    loops: Int32Array | None = None  # core with gates: loop of each row
    epochs: SlotArray | None = None  # with gates: epoch of each row
    moved_blocks: int = 0  # between KV and host memory, before it
    tokens: int = 0  # prompt tokens of a prefill; context tokens of a core step under a policy that learns
    requests: tuple[Request | None, ...] = ()  # one a sampled token; None: the token is known, this one is dropped
    depths: tuple[int, ...] = ()  # exit depth of each sampled token
    targets: PromptTargets | None = None  # prompt tokens whose logprobs it brings
    chained: CodaRows | None = None  # a coda's rows whose token or successor is not certain
    verdict_s: float | None = None  # a coda that says which guesses are right: seconds lost with it (verdicts.py)

    @property
    def step_id(self) -> int:
        return self.header.step_id

    @property
    def decides(self) -> bool:
        """What its gates say steers rows."""
        return self.epochs is not None

    @property
    def brings_logprobs(self) -> bool:
        """Its tokens come with logprobs."""
        return Variant.LOGPROBS in self.header.variant


class InFlight:
    """How far the scheduler may run ahead (architecture, section 3; paper 4.3).

    ``lookahead``: up to two core steps, everything in between rides along. The exits of a core step follow from the
    gates of the step before it, so they are known once that one is answered: with two core steps in flight nothing
    more is chosen. Those of a first loop follow from the prelude before it: with that and a core step behind it in flight
    nothing is chosen either, and the same goes for a coda whose result says which drafts are right. ``async``: nothing is
    chosen while a core step is in flight. ``off``: one stage at a time.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._steps: deque[InFlightStep] = deque()
        self._max_stages = config.max_stages_in_flight
        self._max_cores = config.max_cores_in_flight
        self._cores = 0
        self._blocking = 0
        self._deciding = 0  # steps whose result is due behind the next core step
        self._overdue = 0  # those of them with a core step behind

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def cores(self) -> int:
        """Core steps among them."""
        return self._cores

    def full(self) -> bool:
        """True when no stage may be chosen before the next result."""
        return (
            self._blocking > 0
            or self._overdue > 0
            or self._cores >= self._max_cores
            or len(self._steps) >= self._max_stages
        )

    def push(self, step: InFlightStep) -> None:
        self._steps.append(step)
        self._cores += step.stage is Stage.CORE
        self._blocking += step.blocks_next
        self._deciding += step.blocks_after_core
        if step.stage is Stage.CORE:
            self._overdue = self._deciding

    def pop(self, step_id: int) -> InFlightStep | None:
        """The oldest step if it has this id; None for an id that is not in flight (a worker that is gone).

        Raises ValueError when the worker skipped a step.
        """
        if not self._steps or step_id < self._steps[0].step_id:
            return None
        if step_id != self._steps[0].step_id:
            raise ValueError(f"result of step {step_id} came before that of step {self._steps[0].step_id}")
        step = self._steps.popleft()
        self._cores -= step.stage is Stage.CORE
        self._blocking -= step.blocks_next
        if step.blocks_after_core:
            self._deciding -= 1
            self._overdue = max(0, self._overdue - 1)
        return step

    def steps_with(self, slot: int) -> int:
        """Steps in flight that work on a slot."""
        return sum(1 for step in self._steps if (step.slots == slot).any())

    def orders(self) -> set[int]:
        """Of the requests, ended ones too, that some step in flight works on."""
        return {order for step in self._steps for order in step.orders.tolist()}

    def oldest_dispatch_s(self) -> float | None:
        return self._steps[0].dispatched_s if self._steps else None

    def clear(self) -> None:
        """Forgets everything: the worker that ran it is gone."""
        self._steps.clear()
        self._cores = self._blocking = self._deciding = self._overdue = 0
