"""Logging of every process: one line an event on stderr, with the process's name. Knows nothing of files or rotation."""

import logging
import os
import sys

ROOT = "depthbatch"


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
    root.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")
    root.propagate = False
