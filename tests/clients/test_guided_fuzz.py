"""Fuzzing that breeds inputs by what code they reach (atheris): few inputs here, as many as one likes by hand (tests/fuzz/guided.py)."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
GUIDED = ROOT / "tests" / "fuzz" / "guided.py"
HIDDEN = f"""
import sys, atheris
sys.path.insert(0, {str(GUIDED.parent)!r})
import guided
from fakes.fuzz_targets import damaged_bytes

@atheris.instrument_func
def look(data):
    if len(data) > 3 and data[0] == 108:
        if data[1] == 111:
            if data[2] == 111:
                if data[3] == 112:
                    raise ValueError("found")

class Hidden:
    def samples(self): return [b"aaaa"]
    def damaged(self, data, rng): return damaged_bytes(data, rng)
    def __call__(self, data): look(data)

guided.TARGETS["hidden"] = Hidden
guided.main(["guided.py", "hidden", "-runs=2000000"])
"""


def run(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([PYTHON, *arguments], cwd=directory, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("target", ["messages", "verbs", "configuration", "http"])
def test_no_input_does_what_a_target_does_not_expect(target: str, tmp_path: Path) -> None:
    """And inputs were kept for what they reached."""
    ended = run(tmp_path, str(GUIDED), target, "-runs=4000", "-seed=1")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Done 4000 runs" in ended.stderr and "NEW" in ended.stderr
    assert not list(tmp_path.iterdir()), "an input is kept where one failed"


def test_what_no_chance_would_find_is_found(tmp_path: Path) -> None:
    """A fault behind four bytes, one condition each: one input in four billion by chance."""
    ended = run(tmp_path, "-c", HIDDEN)
    assert ended.returncode and "ValueError: found" in ended.stdout + ended.stderr, ended.stderr[-3000:]


def test_an_unknown_target_is_named(tmp_path: Path) -> None:
    """And what there is."""
    ended = run(tmp_path, str(GUIDED), "nope")
    assert ended.returncode and "usage: guided.py messages|verbs|configuration|http" in ended.stderr
