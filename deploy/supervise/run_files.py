"""The files by which supervised programs and their supervision speak to each other in the run directory."""

from pathlib import Path

from depthbatch.common.config import EngineConfig

RUN_DIR_VARIABLE = "DEPTHBATCH_RUN_DIR"
CONFIG_FILE = "engine.json"
HTTP_FILE = "http.json"
URL_FILE = "url"


def write_config(run_dir: Path, config: EngineConfig) -> None:
    """Puts the engine's configuration where its programs look for it."""
    write_file(run_dir / CONFIG_FILE, config.to_json())


def read_config(run_dir: Path) -> EngineConfig:
    """The inverse. Raises ConfigError or OSError."""
    return EngineConfig.from_json((run_dir / CONFIG_FILE).read_text())


def read_starts(run_dir: Path, name: str) -> int:
    """How many times a program has been started in this run directory."""
    try:
        return int((run_dir / f"{name}.starts").read_text())
    except (OSError, ValueError):
        return 0


def write_file(path: Path, text: str) -> None:
    """A reader never sees half of it; only this user sees any of it."""
    temporary = path.with_name(f".{path.name}")
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(path)
