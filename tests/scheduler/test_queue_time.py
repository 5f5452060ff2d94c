"""request_queue_time_seconds: from arrival to the first prefill, once a request."""

from types import SimpleNamespace

import pytest

from depthbatch.scheduler.counters import Counters


def test_waits_are_booked_once() -> None:
    """A request that is prefilled in chunks, or again after preemption, counts with its first wait alone; one without
    an arrival time is not counted. Buckets are cumulative and hold their upper bound."""
    counters = Counters(width=4, r_max=4)
    early, late, unknown = (SimpleNamespace(arrived_s=arrived_s) for arrived_s in (9.9, 7.5, None))
    counters.waited([early, late, unknown], 10.0)
    counters.waited([early, late, unknown], 99.0)
    waits = counters.stats().queue_time_s
    assert waits.count == 2
    assert waits.sum == pytest.approx(2.6)
    buckets = dict(zip(waits.bounds, waits.cumulative, strict=True))
    assert [buckets[bound] for bound in (0.05, 0.3, 2.0, 2.5, 240.0)] == [0, 1, 1, 2, 2]
