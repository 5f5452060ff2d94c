"""One server for all foreign clients: the demo model in real processes, on whatever port is free."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.serve_process import ServeProcess

ROOT = Path(__file__).resolve().parents[2]


DEMO = ROOT / "training" / "demo" / "demo"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    options = ["--max-num-seqs", "16", "--kv-blocks", "512"]
    options += ["--stage-trace", str(tmp_path_factory.mktemp("server") / "stages.jsonl")]
    if not list(DEMO.glob("*.safetensors")):
        options += ["--load-format", "dummy"]
    with ServeProcess(*options) as server:
        yield server
