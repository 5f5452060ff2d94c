"""Where the device's time goes, on the worker's clock: busy, waiting for the scheduler, or nothing to do.

The wait before a stage is booked when the stage arrives, by what its header says: after_no_work means that nothing
was runnable, anything else means that work existed and the device waited for it.
"""


class IdleClock:
    """Running totals in seconds."""

    def __init__(self) -> None:
        self.steps = 0
        self.busy_s = 0.0
        self.idle_scheduler_s = 0.0
        self.idle_no_work_s = 0.0
        self._last_end_s: float | None = None  # before the first stage nothing is waited for

    def book(self, start_s: float, end_s: float, after_no_work: bool) -> None:
        """Counts a finished stage and the gap between it and the stage before."""
        if self._last_end_s is not None:
            gap_s = max(0.0, start_s - self._last_end_s)
            if after_no_work:
                self.idle_no_work_s += gap_s
            else:
                self.idle_scheduler_s += gap_s
        self._last_end_s = end_s
        self.busy_s += end_s - start_s
        self.steps += 1
