"""The files by which supervised programs and their supervision speak to each other in the run directory."""

import os
from pathlib import Path

from depthbatch.common.config import EngineConfig
from depthbatch.common.run_dir import read_end, write_whole

RUN_DIR_VARIABLE = "DEPTHBATCH_RUN_DIR"
CONFIG_FILE = "engine.json"
HTTP_FILE = "http.json"
URL_FILE = "url"
PROGRAMS_DIR = "programs"  # sections of supervisord beyond those of its file
FRONTEND = "frontend"  # program; further ones are frontend-1, frontend-2, ...
SERVED_FILE = "served"  # there once the engine has been ready
GAVE_UP = 3  # exit code of a frontend that no restart of its own would help, while one of the whole engine may


def frontend_names(count: int) -> list[str]:
    """The programs of so many frontends."""
    return [FRONTEND, *(f"{FRONTEND}-{number}" for number in range(1, count))]


def frontend_number(name: str) -> int | None:
    """Which frontend a program is; None where it is none."""
    kind, _, number = name.partition("-")
    return None if kind != FRONTEND else int(number or 0)


def url_file(frontend: int) -> str:
    """Where a frontend says that it is ready, and at which address."""
    return URL_FILE if not frontend else f"{URL_FILE}-{frontend}"


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
    """A reader never sees half of it."""
    write_whole(path, text.encode())
