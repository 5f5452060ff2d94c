"""Logging of every process: one line an event on stderr, with the process's name. Knows nothing of files or rotation."""

import logging
import os
import sys
import time

ROOT = "depthbatch"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def get_logger(name: str) -> logging.Logger:
    """The logger ``depthbatch.NAME``; silent below WARNING until setup_logging is called."""
    return logging.getLogger(f"{ROOT}.{name}")


def setup_logging(process: str) -> None:
    """Sends this process's log to stderr. $DEPTHBATCH_LOG_LEVEL (default INFO) sets the level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s"))
    root = logging.getLogger(ROOT)
    root.handlers[:] = [handler]
    level = os.environ.get("DEPTHBATCH_LOG_LEVEL", "INFO").upper()
    root.setLevel(level if level in LOG_LEVELS else "INFO")
    root.propagate = False


class SparseLog:
    """Warnings that somebody else may cause by the million: one is a line at once, further ones within ``every_s`` are
    counted, and the next line tells how many there were."""

    def __init__(self, logger: logging.Logger, every_s: float = 60.0) -> None:
        self._logger = logger
        self._every_s = every_s
        self._next_s = 0.0  # monotonic
        self._left_out = 0

    def warning(self, text: str, *values: object) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._left_out += 1
            return
        more = f" (and {self._left_out} more before)" if self._left_out else ""
        self._logger.warning(text + "%s", *values, more)
        self._next_s, self._left_out = now_s + self._every_s, 0
