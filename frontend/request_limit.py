"""How many sequences may be in flight, whichever API they came by, and the end of it: a server that drains takes none."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from depthbatch.common.errors import OverloadedError, RequestError
from depthbatch.frontend.metrics import FrontendMetrics

DRAINED_RETRY_S = 5  # a restart takes about that long


class RequestLimit:
    """Places of sequences: so many in all, of one client, and of one request. After ``drain`` none is let in; ``idle`` is
    set when none is left."""

    def __init__(self, metrics: FrontendMetrics, limit: int, per_client: int, per_request: int) -> None:
        self.limit = limit
        self.limit_per_client = per_client
        self.limit_per_request = min(per_request, per_client)
        self.in_flight = 0
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.metrics = metrics
        self._of_client: Counter[int] = Counter()

    @contextlib.contextmanager
    def places(self, sequences: int, client: int) -> Iterator[None]:
        """Holds ``sequences`` places while the body runs. ``client``: the number of an API key, 0 where there is none.

        Raises OverloadedError, or RequestError where they could never fit.
        """
        if sequences > self.limit_per_request:
            self.metrics.rejected("too_large")
            text = f"n: {sequences} sequences in one request; this server takes {self.limit_per_request}"
            raise RequestError(text, "n")
        if self.draining:
            self.metrics.rejected("draining")
            raise OverloadedError("the server is shutting down", DRAINED_RETRY_S)
        if self.in_flight + sequences > self.limit:
            self.metrics.rejected("queue_full")
            raise OverloadedError(f"the queue is full: {self.in_flight} of {self.limit} places taken")
        held = self._of_client[client]
        if held + sequences > self.limit_per_client:
            self.metrics.rejected("key_full")
            raise OverloadedError(f"this API key has {held} of the {self.limit_per_client} places that one may have")
        self.in_flight += sequences
        self._of_client[client] += sequences
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= sequences
            self._of_client[client] -= sequences
            if self.in_flight == 0:
                self.idle.set()

    def drain(self) -> None:
        self.draining = True
