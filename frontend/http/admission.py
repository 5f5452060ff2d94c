"""How much is in flight, and whether more may come. Counts sequences; knows nothing of HTTP bodies or tokens."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from depthbatch.frontend.http.errors import bad_value, overloaded
from depthbatch.frontend.metrics import FrontendMetrics


class Admission:
    """The bounded queue at the edge. After ``drain`` nothing is admitted; ``idle`` is set when nothing is left."""

    def __init__(self, limit: int, metrics: FrontendMetrics) -> None:
        self.limit = limit
        self.in_flight = 0
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._metrics = metrics

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Holds ``sequences`` places while the body runs; raises ApiError (503, or 400 if they could never fit)."""
        if sequences > self.limit:
            self._metrics.rejected("too_large")
            raise bad_value("n", f"{sequences} sequences in one request; this server takes {self.limit}")
        if self.draining:
            self._metrics.rejected("draining")
            raise overloaded("the server is shutting down", retry_after_s=5)
        if self.in_flight + sequences > self.limit:
            self._metrics.rejected("queue_full")
            raise overloaded(f"the queue is full: {self.in_flight} of {self.limit} places taken")
        self.in_flight += sequences
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= sequences
            if self.in_flight == 0:
                self.idle.set()

    def drain(self) -> None:
        self.draining = True
