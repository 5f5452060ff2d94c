"""One server for all foreign clients: the demo model in real processes, on whatever port is free."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # helpers are shared with the other tests

from serving_fakes.process import ServeProcess  # noqa: E402

DEMO = ROOT / "worker" / "demo" / "demo"


@pytest.fixture(scope="session")
def server() -> Iterator[ServeProcess]:
    options = ["--max-num-seqs", "16", "--kv-blocks", "512"]
    if not list(DEMO.glob("*.safetensors")):
        options += ["--load-format", "dummy"]
    with ServeProcess(*options) as server:
        yield server
