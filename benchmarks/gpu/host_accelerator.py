"""An accelerator that is the host: lanes run at once, captures are the work itself. For dry runs without a GPU."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.worker.runner.accelerator import Lane, Mark, Work


class Instant(NamedTuple):
    """A mark that has passed."""

    time_s: float


class HostAccelerator:
    """Accelerator over the CPU."""

    device = torch.device("cpu")

    def host_buffer(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def submit(self, lane: Lane, work: Work) -> None:
        work()

    def mark(self, lane: Lane) -> Mark:
        return Instant(time.monotonic())

    def wait_on_lane(self, lane: Lane, mark: Mark) -> None:
        pass

    def wait(self, mark: Mark) -> None:
        pass

    def passed_s(self, mark: Mark) -> float:
        assert isinstance(mark, Instant)
        return mark.time_s

    def capture(self, work: Work) -> Work:
        def replay() -> None:
            with torch.inference_mode():
                work()

        replay()
        return replay
