"""The page that newcomers follow: its Python blocks and its request, run as they stand (but for the port)."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.serve_process import ServeProcess

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "getting-started.md").read_text()


def blocks() -> list[str]:
    """Indented code blocks."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE, re.M)
    return [re.sub(r"^    ", "", block, flags=re.M).strip() for block in found]


def here(block: str, server: ServeProcess) -> str:
    return block.replace("http://127.0.0.1:8000", server.url)


PYTHON = [block for block in blocks() if block.startswith("from ")]


@pytest.mark.parametrize("block", PYTHON, ids=["openai", "offline"])
def test_python_blocks_run(server: ServeProcess, block: str) -> None:
    """They print something and end well."""
    run = subprocess.run(
        [sys.executable, "-c", here(block, server)], capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0 and run.stdout.strip(), run.stderr


def test_curl_commands_run(server: ServeProcess) -> None:
    """The first request is answered with depths; the metrics are there."""
    commands = [block for block in blocks() if block.startswith("curl ")]
    assert len(commands) == 2
    outputs = []
    for command in commands:
        words = shlex.split(here(command, server))
        outputs.append(subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert '"exit_depths":[' in outputs[0] and "depthbatch:generation_tokens_total" in outputs[1]
