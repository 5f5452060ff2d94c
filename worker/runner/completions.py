"""Tells the worker's loop when launched stages have finished, so that it can sleep on its socket and the device at once.

A device has no descriptor to sleep on: one thread waits for the stages' last marks in order (the wait releases the
interpreter) and makes an event descriptor readable after each.
"""

import os
from queue import SimpleQueue
from threading import Condition, Thread
from typing import NamedTuple

from depthbatch.worker.runner.accelerator import Accelerator, Mark


class Watched(NamedTuple):
    """A stage whose end is waited for."""

    step_id: int
    mark: Mark


class CompletionWatch:
    """Watches stages in the order they were added. Step ids ascend."""

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
