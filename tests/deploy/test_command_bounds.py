"""What the commands of measurement and training are told at their edge: one line, exit code 2, before anything runs."""

from pathlib import Path

import pytest

from depthbatch.deploy.cli.main import main

BENCH = {  # words -> what the line says
    "bench kv-memory hits --requests 0": "0 is not at least 1",
    "bench kv-memory hits --prefix-tokens -5": "-5 is not at least 1",
    "bench kv-memory copies --rounds 0": "0 is not at least 1",
    "bench fleet --requests 0": "0 is not at least 1",
    "bench fleet --prefixes -1": "-1 is not at least 0",
    "bench fleet --detect-s nan": "nan is not at least 0",
    "bench fleet --restart-s inf": "inf is not at least 0",
    "bench frontends --burst 0": "0 is not at least 1",
    "bench frontends --rounds x": "'x' is not a whole number",
    "bench cpu drafts demo --streams 0": "0 is not at least 1",
    "bench perplexity demo --text x --loops 0": "0 is not at least 1",
    "bench fleet --output /nope/x": "cannot write /nope/x",
    "bench kv-memory copies --output /": "cannot write /",
    "bench throughput --output /nope/x": "cannot write /nope/x",
    "bench accuracy demo --output /nope/x.json": "cannot write /nope/x.json",
    "bench eval http://x --output /nope/x.json": "cannot write /nope/x.json",
    "bench fleet-sweep x --only nope": "invalid choice: 'nope'",
    "generate demo --preemption offload --swap-space inf": "must be between 0.001 and 1048576.0, not inf",
    "generate demo --preemption offload --swap-space 0": "must be between 0.001 and 1048576.0, not 0.0",
    "generate demo --preemption offload --swap-space nan": "must be between 0.001 and 1048576.0, not nan",
    "generate demo --preemption offload --swap-space 1e-12": "must be between 0.001 and 1048576.0, not 1e-12",
}


@pytest.mark.parametrize("words", BENCH)
def test_bounds_of_arguments(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bugs: zeros, negative numbers and nan ended in tracebacks or in figures of nothing; an output that could not be written was
    found out after the run; --swap-space below a byte turned offloading off, infinity ended the worker."""
    assert _status(words.split()) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and BENCH[words] in err, err


@pytest.mark.parametrize("model", ["demo", "demo-huginn"])
def test_a_gate_is_not_written_over_a_directory(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the gate was trained first, then a traceback, and a partial file lay beside the directory."""
    assert _status(["train-gate", model, "--output", str(tmp_path)]) == 2
    assert f"cannot write {tmp_path}" in capsys.readouterr().err


def test_a_sweep_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: FileExistsError."""
    (taken := tmp_path / "taken").write_text("")
    assert _status(["bench", "fleet-sweep", str(taken)]) == 2
    assert f"cannot write {taken}" in capsys.readouterr().err


def _status(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)
