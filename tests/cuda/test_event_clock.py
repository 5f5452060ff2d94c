"""Times of events, which CUDA tells as float32 milliseconds from another event."""

import numpy as np

from depthbatch.worker.runner.accelerator import EventClock


def test_a_day_of_events_keeps_microseconds() -> None:
    """A gap of 40 us is still told after a day. Not luck: from one origin float32 has steps of 8 ms there, which is
    checked too."""
    clock = EventClock(100.0)
    day_ms, step_ms = 86_400_000.0, 900.0
    assert float(np.float32(day_ms + 0.04)) == float(np.float32(day_ms))
    now_ms = origin_ms = 0.0
    while now_ms < day_ms:
        now_ms += step_ms
        if clock.goes_on_from(float(np.float32(now_ms - origin_ms))):
            origin_ms = now_ms
    first, second = (clock.at(float(np.float32(now_ms + gap - origin_ms))) for gap in (0.0, 0.04))
    assert abs(second - first - 40e-6) < 1e-6
    assert abs(first - (100.0 + now_ms / 1e3)) < 1e-3
