"""``record-exits``: depths that a gate chose, on the real CPU device, come back in the file and can be replayed."""

import json
from pathlib import Path

import pytest

from depthbatch.benchmarks.record_exits import add_record_exits_arguments, run_record_exits
from depthbatch.benchmarks.workload import Workload
from depthbatch.common.errors import ConfigError
from depthbatch.deploy.cli.main import OneLineParser

MODEL = str(Path(__file__).resolve().parent.parent / "data" / "fidelity" / "ouro-tiny")
REQUESTS = [{"prompt_tokens": [5, 6, 7, 8], "output_tokens": 6}, {"prompt_tokens": 9, "output_tokens": 1}]


def record(tmp_path: Path, *options: str) -> Workload:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"requests": REQUESTS}))
    parser = OneLineParser()
    add_record_exits_arguments(parser)
    common = ["--dtype", "float32", "--threads", "1", "--kv-blocks", "32", "--max-num-seqs", "4"]
    assert run_record_exits(parser.parse_args([MODEL, str(path), *common, *options])) == 0
    return Workload.read(path)


def test_depths_are_those_the_gate_chose(tmp_path: Path) -> None:
    """One depth a decode token. A threshold of 0 lets every token go as soon as the delayed gate can, at loop 2 of 4: a
    recorder that wrote full depth, or counted the first token, would fail."""
    early = record(tmp_path, "--gate", "delayed", "--exit-threshold", "0")
    assert [r.exit_depths for r in early.requests] == [(2,) * 5, ()]
    assert early.requests[0].prompt_ids == (5, 6, 7, 8)


def test_engines_without_exits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gate none"):
        record(tmp_path, "--gate", "none")
    with pytest.raises(ConfigError, match="policy cb"):
        record(tmp_path, "--policy", "cb")
