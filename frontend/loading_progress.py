"""How far the weights are loaded, on stderr: a bar on a terminal, else a line now and then."""

import sys
import time
from typing import TextIO

from tqdm import tqdm

LINE_S = 2.0  # between two lines; what loads faster gets none


def share_of(done: int, total: int) -> str:
    """Of bytes, for people."""
    size = f"{total / (1 << 30):.1f} GiB" if total >> 30 else f"{total / (1 << 20):.1f} MiB"
    return f"{done / max(total, 1):.0%} of {size}"


class LoadingProgress:
    """Called with the bytes that are read and how many there are; ``close`` leaves the terminal as it was."""

    def __init__(self, model: str, stream: TextIO | None = None) -> None:
        self._model = model
        self._stream = sys.stderr if stream is None else stream
        self._bar: tqdm[None] | None = None
        self._next_s: float | None = None  # from the first byte on: starting the processes is no loading

    def __call__(self, done: int, total: int) -> None:
        if self._stream.isatty():
            if self._bar is None:
                self._bar = tqdm(
                    total=total,
                    desc=f"loading {self._model}",
                    unit="B",
                    unit_scale=True,
                    leave=False,
                    file=self._stream,
                )
            self._bar.update(done - self._bar.n)
        elif self._next_s is None:
            self._next_s = time.monotonic() + LINE_S
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LINE_S
            print(f"depthbatch: loading {self._model}: {share_of(done, total)}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
