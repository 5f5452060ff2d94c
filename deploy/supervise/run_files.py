"""The files by which supervised programs and their supervision speak to each other in the run directory."""

import os
from pathlib import Path

from depthbatch.common.config import EngineConfig
from depthbatch.common.run_dir import read_end

RUN_DIR_VARIABLE = "DEPTHBATCH_RUN_DIR"
CONFIG_FILE = "engine.json"
HTTP_FILE = "http.json"
URL_FILE = "url"
SERVED_FILE = "served"  # there once the engine has been ready
GAVE_UP = 3  # exit code of a frontend that no restart of its own would help, while one of the whole engine may


def write_config(run_dir: Path, config: EngineConfig) -> None:
    """Puts the engine's configuration where its programs look for it."""
    write_file(run_dir / CONFIG_FILE, config.to_json())


def read_config(run_dir: Path) -> EngineConfig:
    """The inverse. Raises ConfigError or OSError."""
    return EngineConfig.from_json((run_dir / CONFIG_FILE).read_text())


def follows_fault(run_dir: Path, name: str) -> bool:
    """Before ``note_start``: whether the program's last life ended without having been asked to."""
    ended = read_end(run_dir, name) == _read_number(run_dir / f"{name}.pid")
    return read_starts(run_dir, name) > 0 and not ended


def note_start(run_dir: Path, name: str) -> int:
    """Called by a program before anything else. Returns how often it was started before."""
    starts = read_starts(run_dir, name)
    if follows_fault(run_dir, name):
        write_file(run_dir / f"{name}.faults", str(read_faults(run_dir, name) + 1))
    write_file(run_dir / f"{name}.starts", str(starts + 1))
    write_file(run_dir / f"{name}.pid", str(os.getpid()))
    return starts


def read_starts(run_dir: Path, name: str) -> int:
    """How many times a program has been started in this run directory."""
    return _read_number(run_dir / f"{name}.starts")


def read_faults(run_dir: Path, name: str) -> int:
    """How many of those starts followed an end that nobody had asked for."""
    return _read_number(run_dir / f"{name}.faults")


def _read_number(path: Path) -> int:
    """0 where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def write_file(path: Path, text: str) -> None:
    """A reader never sees half of it; only this user sees any of it."""
    temporary = path.with_name(f".{path.name}")
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(path)
