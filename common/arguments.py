"""Types of command-line arguments that options of the engine are not (those are in options.py), for argparse."""

import argparse
import math
import os
from pathlib import Path

from depthbatch.common.config import FIELDS
from depthbatch.common.frames import MAX_DEPTH

MOST = 2**31 - 1  # of any count


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def width(text: str) -> int:
    """W, as the engine takes it. Raises ConfigError."""
    return int(FIELDS["max_num_seqs"].parse(text, "W"))


def loops(text: str) -> int:
    """A number of loops."""
    return _whole(text, 1, MAX_DEPTH)


def seed(text: str) -> int:
    """What ``EngineConfig.seed`` takes: 0 to 2**63 - 1."""
    return _whole(text, 0, 2**63 - 1)


def seconds(text: str) -> float:
    """A finite time of at least 0."""
    return _number(text)


def threshold(text: str) -> float:
    """Of an exit gate: a finite number of at least 0."""
    return _number(text)


def output_file(text: str) -> str:
    """The path of a file that can be written, so that no run is lost for want of a directory."""
    path = Path(text)
    try:
        written = path if path.exists() else path.parent
        refused = path.is_dir() or not path.parent.is_dir() or not os.access(written, os.W_OK)
    except OSError:  # a name that no file can have
        refused = True
    if refused:
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return text


def output_directory(text: str) -> Path:
    """The path of a directory that can be written, or made with all above it."""
    path = Path(text)
    try:
        existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        refused = not existing.is_dir() or not os.access(existing, os.W_OK)
    except OSError:
        refused = True
    if refused:
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


def _whole(text: str, least: int, most: int = MOST) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{value} is more than {most}")
    return value
