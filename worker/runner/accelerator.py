"""An accelerator as four ordered lanes of work and marks between them, and a watch over marks; the CUDA one.

``upload`` moves inputs, ``compute`` runs stages, ``download`` moves results, ``swap`` moves the K/V of preempted sequences.
Work on one lane runs in order; lanes run
at the same time unless one is told to wait for a mark of another. The interface is this small so that a test can stand
in an accelerator that interleaves lanes as adversely as the rules allow.
"""

import os
import time
from collections.abc import Callable
from enum import IntEnum
from queue import SimpleQueue
from threading import Condition, Thread
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Work = Callable[[], object]


class Lane(IntEnum):
    """The streams."""

    UPLOAD = 0
    COMPUTE = 1
    DOWNLOAD = 2
    SWAP = 3


class Mark(Protocol):
    """A point on a lane. Opaque to everyone but its accelerator."""


class Accelerator(Protocol):
    """What the overlapped runner needs of a device."""

    device: torch.device

    def host_buffer(self, words: int) -> Tensor:
        """int32 [words] on the host, fit for asynchronous copies."""
        ...

    def submit(self, lane: Lane, work: Work) -> None:
        """Runs ``work`` on ``lane`` after all that the lane holds; returns at once."""
        ...

    def mark(self, lane: Lane) -> Mark:
        """The point behind all that ``lane`` holds now."""
        ...

    def wait_on_lane(self, lane: Lane, mark: Mark) -> None:
        """Later work of ``lane`` runs after ``mark`` has passed."""
        ...

    def wait(self, mark: Mark) -> None:
        """Blocks the host until ``mark`` has passed, without spinning."""
        ...

    def passed_s(self, mark: Mark) -> float:
        """When a passed mark passed, in seconds on the worker's clock (time.monotonic)."""
        ...

    def capture(self, work: Work) -> Work:
        """A replay of ``work`` over the same addresses; ``work`` may hold no synchronisation."""
        ...


class Watched(NamedTuple):
    """A stage whose end is waited for."""

    step_id: int
    mark: Mark


class CompletionWatch:
    """Tells when launched stages have finished, so that the worker's loop can sleep on its socket and the device at once.

    A device has no descriptor to sleep on: one thread waits for the stages' last marks in order (the wait releases the
    interpreter) and makes an event descriptor readable after each. Step ids ascend.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._accelerator = accelerator
        self._queue: SimpleQueue[Watched] = SimpleQueue()
        self._changed = Condition()
        self._last_passed = -1
        self._failure: BaseException | None = None
        Thread(target=self._watch, name="completions", daemon=True).start()

    def add(self, step_id: int, mark: Mark) -> None:
        self._queue.put(Watched(step_id, mark))

    def passed(self, step_id: int) -> bool:
        """Whether the stage has finished, results on the host included. Raises what the device raised."""
        if self._failure is not None:
            raise self._failure
        return self._last_passed >= step_id

    def wait(self, step_id: int) -> None:
        """Blocks until the stage has finished. Raises what the device raised."""
        with self._changed:
            self._changed.wait_for(lambda: self.passed(step_id))

    def _watch(self) -> None:
        while self._failure is None:
            watched = self._queue.get()
            try:
                self._accelerator.wait(watched.mark)
            except Exception as error:  # a device fault: whoever reads next raises it
                self._failure = error
            with self._changed:
                self._last_passed = watched.step_id
                self._changed.notify_all()
            os.eventfd_write(self.descriptor, 1)


class EventClock:
    """Seconds on the host's clock from milliseconds between events.

    CUDA tells them as a float32: after an hour from one origin its steps are 0.25 ms, so the origin moves along.
    """

    MAX_MS = 1000.0

    def __init__(self, origin_s: float) -> None:
        self.origin_s = origin_s

    def at(self, elapsed_ms: float) -> float:
        return self.origin_s + elapsed_ms / 1e3

    def goes_on_from(self, elapsed_ms: float) -> bool:
        """Whether the event ``elapsed_ms`` behind the origin is to be the new one; the clock then counts from it."""
        if elapsed_ms < self.MAX_MS:
            return False
        self.origin_s = self.at(elapsed_ms)
        return True


class CudaAccelerator:
    """Streams, events and graphs of one GPU. All graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = [torch.cuda.Stream(device) for _ in Lane]  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._origin.record(torch.cuda.current_stream(device))
        self._origin.synchronize()
        self._clock = EventClock(time.monotonic())

    def host_buffer(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def submit(self, lane: Lane, work: Work) -> None:
        with torch.cuda.stream(self._streams[lane]):
            work()

    def mark(self, lane: Lane) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._streams[lane])
        return event

    def wait_on_lane(self, lane: Lane, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._streams[lane].wait_event(mark)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        with torch.cuda.device(self.device):  # called by a thread of its own, whose device is the first
            mark.synchronize()

    def passed_s(self, mark: Mark) -> float:
        assert isinstance(mark, torch.cuda.Event)
        elapsed_ms = float(self._origin.elapsed_time(mark))
        if self._clock.goes_on_from(elapsed_ms):
            self._origin = mark
            return self._clock.origin_s
        return self._clock.at(elapsed_ms)

    def capture(self, work: Work) -> Work:
        stream = self._streams[Lane.COMPUTE]
        # Streams of ours do not wait for the default one, which may still be filling the buffers that ``work`` reads.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        # Outside the capture first: libraries take their workspaces, Triton compiles and NCCL connects, for these very
        # arguments.
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            work()
        return graph.replay
