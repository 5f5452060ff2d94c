"""What a policy may see of the scheduler: its queues as they are now. Changes nothing but the order of who waits."""

import numpy as np

from depthbatch.scheduler.admission import Admission
from depthbatch.scheduler.inflight import InFlight
from depthbatch.scheduler.policy.fixed import HeadPrompt
from depthbatch.scheduler.rows import DECODE, EXITED, READY, DecodingRows, ReadyRows


class LiveView:
    """The policies' QueueView over the live state."""

    def __init__(self, admission: Admission, in_flight: InFlight, r_max: int) -> None:
        self._admission = admission
        self._in_flight = in_flight
        self._rows = admission.rows
        self._r_max = r_max
        self.width = admission.slots.total
        self.now_s = 0.0

    @property
    def free_slots(self) -> int:
        return self._admission.slots.free

    @property
    def q_p(self) -> int:
        return len(self._admission.waiting)

    @property
    def q_d(self) -> int:
        return self._rows.count[DECODE]

    @property
    def q_r(self) -> int:
        return self._rows.count[READY]

    @property
    def q_c(self) -> int:
        return self._rows.count[EXITED]

    @property
    def informed(self) -> bool:
        return not (self._rows.active_with["gated"] and self._in_flight.cores)

    def can_prefill(self, min_free_slots: int | None = None) -> bool:
        return self._admission.can_prefill(min_free_slots)

    def ready_rows(self) -> ReadyRows:
        return self._rows.ready_rows()

    def decoding_rows(self) -> DecodingRows:
        return self._rows.decoding_rows(self._r_max)

    def head_prompt(self) -> HeadPrompt | None:
        admission = self._admission
        if admission.partial is not None:
            request, arrived_s = admission.partial, float(self._rows.arrived_s[admission.partial.slot])
            tokens, untouched = request.length - request.computed, False
        elif (head := admission.waiting.head()) is not None:
            request, arrived_s = head, np.nan if head.arrived_s is None else head.arrived_s
            tokens, untouched = head.length, not (head.output or head.preempted)
        else:
            return None
        waited_s = 0.0 if np.isnan(arrived_s) else max(0.0, self.now_s - arrived_s)
        return HeadPrompt(waited_s, tokens, untouched, request.overdue)

    def set_head_overdue(self) -> None:
        waiting = self._admission.waiting
        if (head := waiting.head()) is not None:
            waiting.set_overdue(head)

    def next_exits(self) -> int:
        return self._rows.next_exits()
