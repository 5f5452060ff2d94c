"""An accelerator that is as asynchronous as the rules allow: lanes advance in random turns, and only when they must.

Work runs late (when the host waits, or at random), so a host buffer reused too early, a result downloaded too soon or a
missing wait between lanes gives wrong numbers instead of luck.
"""

import random
from collections import deque
from threading import RLock

import torch
from torch import Tensor

from depthbatch.worker.runner.accelerator import Lane, Mark, Work


class Point:
    """A mark; also what a lane waits for."""

    def __init__(self) -> None:
        self.passed_s: float | None = None


class AdverseAccelerator:
    """Accelerator on the CPU with deferred lanes."""

    device = torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lanes: list[deque[tuple[str, object]]] = [deque() for _ in Lane]
        self._now_s = 0.0
        self._lock = RLock()  # the watching thread advances lanes too

    def host_buffer(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def submit(self, lane: Lane, work: Work) -> None:
        with self._lock:
            self._lanes[lane].append(("work", work))
            for _ in range(self._random.choice((0, 0, 0, 1, 4))):
                self._advance()

    def mark(self, lane: Lane) -> Mark:
        point = Point()
        self._lanes[lane].append(("mark", point))
        return point

    def wait_on_lane(self, lane: Lane, mark: Mark) -> None:
        self._lanes[lane].append(("wait", mark))

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, Point)
        while True:
            with self._lock:
                if mark.passed_s is not None:
                    return
                assert self._advance(), "the host waits for something that no lane will ever do"

    def passed_s(self, mark: Mark) -> float:
        assert isinstance(mark, Point) and mark.passed_s is not None, "asked for the time of a mark that has not passed"
        return mark.passed_s

    def capture(self, work: Work) -> Work:
        work()
        return work

    def _advance(self) -> bool:
        """One step of a random lane that can move; False when none can."""
        ready = [lane for lane in self._lanes if lane and not self._blocked(lane[0])]
        if not ready:
            return False
        kind, item = self._random.choice(ready).popleft()
        self._now_s += 1.0
        if kind == "work":
            assert callable(item)
            item()
        elif kind == "mark":
            assert isinstance(item, Point)
            item.passed_s = self._now_s
        return True

    @staticmethod
    def _blocked(step: tuple[str, object]) -> bool:
        kind, item = step
        return kind == "wait" and isinstance(item, Point) and item.passed_s is None
