"""What the commands of measurement and training are told at their edge: one line, exit code 2, before anything runs."""

import argparse
from pathlib import Path

import pytest

from depthbatch.benchmarks import scheduler_cost
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
    "bench cpu drafts demo --streams 0": "W must be between 1 and 65535, not 0",
    "bench perplexity demo --text x --loops 0": "0 is not at least 1",
    "bench cpu drafts demo --seconds nan": "nan is not at least 0",
    "bench cpu engine --w -1": "W must be between 1 and 65535, not -1",
    "bench cpu engine --layouts flat": "invalid choice: 'flat'",
    "bench cpu engine --threads 0": "0 is not at least 1",
    "bench cpu policies --requests-per-slot 0": "0 is not at least 1",
    "bench cpu policies --seconds -1": "-1 is not at least 0",
    "bench cpu policies --async-scheduling never": "invalid choice: 'never'",
    "bench cpu step --batches 0": "0 is not at least 1",
    "bench cpu step --contexts -5": "-5 is not at least 1",
    "bench cpu step --seconds inf": "inf is not at least 0",
    "bench cpu all-reduce --ranks 0": "0 is not at least 1",
    "bench cpu all-reduce --hidden 99999999999": "99999999999 is more than 2147483647",
    "bench scheduler --core-steps 0": "0 is not at least 1",
    "bench device-clock h100-ouro-1.4b --rows 65536": "W must be between 1 and 65535, not 65536",
    "bench device-clock h100-ouro-1.4b --stages 1": "stages must be at least 2, not 1",
    "bench service --rounds 0": "0 is not at least 1",
    "bench service --overload-s nan": "nan is not at least 0",
    "bench service demo --serve-option=--nope": "the server did not start: unrecognized arguments: --nope",
    "bench latency --loops 256": "256 is more than 255",
    "bench latency --context 0": "0 is not at least 1",
    "bench latency --rounds 0": "0 is not at least 1",
    "bench latency --batch 0": "W must be between 1 and 65535, not 0",
    "bench simulate --profile h100-ouro-1.4b --seed -1": "-1 is not at least 0",
    "bench simulate --profile h100-ouro-1.4b --w x": "W must be a whole number, not 'x'",
    "bench simulate --profile h100-ouro-1.4b --policy cb --k 4": "--k needs --policy refill",
    "bench simulate --profile h100-ouro-1.4b --policy fast": "policy 'fast' is not one of",
    "bench throughput --policy cb --k 4": "--k needs --policy refill",
    "bench throughput --requests 99999999999": "99999999999 is more than 2147483647",
    "bench trace x --r-max 256": "256 is more than 255",
    "bench trace x --r-max 0": "0 is not at least 1",
    "bench trace x --steps 99999999999999999999": "99999999999999999999 is more than 2147483647",
    "bench trace x --steps 0": "0 is not at least 1",
    "bench trace x --last 0": "0 is not at least 1",
    "bench trace x --s 0": "0 is not at least 1",
    "bench trace x --chrome /no/x": "cannot write /no/x",
    "bench trace x --html /": "cannot write /",
    "bench trace x --profile h100-ouro-1.4b": "--profile and --async-scheduling need --live",
    "bench accuracy demo --examples 0": "0 is not at least 1",
    "bench accuracy demo --task-seed -1": "-1 is not at least 0",
    "bench accuracy demo --figures /dev/null/x": "cannot write /dev/null/x",
    "bench sweep x.toml --output-dir /dev/null": "cannot write /dev/null",
    "bench sweep x.toml --requests 0": "0 is not at least 1",
    "bench eval http://x --num-loops 0": "0 is not at least 1",
    "bench eval http://x --exit-threshold nan": "nan is not at least 0",
    "bench eval http://x --num-fewshot -1": "-1 is not at least 0",
    "bench eval http://x --figure /nope/x.png": "cannot write /nope/x.png",
    "bench eval http://x --figure scores.foo": "scores.foo: a picture's name ends with .pdf, .png, .svg",
    "bench eval http://x:port --reasoning-gym x": "http://x:port is no address: Invalid port",
    "bench eval http://x --reasoning-gym y --num-fewshot 1": "--num-fewshot and --include-path need --lm-eval",
    "bench eval http://x --lm-eval y --include-path /nope": "--include-path /nope is not a directory",
    "bench eval http://x --lm-eval y --instruction z": "--instruction and --seed need --reasoning-gym",
    "bench accuracy demo --questions x --task-seed 1": "--task-seed is of the demo task",
    "bench serve --url http://x --exits full": "--exits needs the native API",
    "bench serve --url ipc:///nope --api-key x": "need an http or https --url",
    "bench serve --url nope": "url 'nope': not http or https, nor an address of zmq",
    "bench serve --url http://127.0.0.1:99999": "Port out of range 0-65535",
    "bench serve --url http://x --percentiles 101": "101 is not between 0 and 100",
    "bench serve --url http://x --extra-body []": "'[]' is not a JSON map",
    "bench serve --url http://x --goodput ttft:nan": "goodput 'ttft:nan'",
    "bench serve --url http://x --r-max 0": "0 is not at least 1",
    f"bench simulate --profile {'a' * 300}": "is neither a file nor shipped",
    f"bench simulate --profile h100-ouro-1.4b --workload {'a' * 300}": "is not one of sharegpt",
    f"bench throughput {'a' * 300}": "does not exist",
    f"bench throughput --output {'a' * 300}": "cannot write aaa",
    "bench fleet --output /nope/x": "cannot write /nope/x",
    "bench kv-memory copies --output /": "cannot write /",
    "bench throughput --output /nope/x": "cannot write /nope/x",
    "bench accuracy demo --output /nope/x.json": "cannot write /nope/x.json",
    "bench eval http://x --output /nope/x.json": "cannot write /nope/x.json",
    "bench paper --only nope": "--only nope: in the name of no sweep",
    "bench paper --jobs 0": "0 is not at least 1",
    "bench paper --output-dir /dev/null": "cannot write /dev/null",
    "bench soak --minute-s 0": "--minute-s and --share must be above 0",
    "bench soak --minutes 0": "0 is not at least 1",
    "bench soak --workload nope": "invalid choice: 'nope'",
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


def test_what_no_memory_can_hold_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a traceback of numpy, as of ``bench kv-memory misses --requests 2147483647``."""

    def run(_: argparse.Namespace) -> int:
        raise MemoryError("Unable to allocate 6.25 TiB")

    monkeypatch.setattr(scheduler_cost, "run_scheduler_cost", run)
    assert _status(["bench", "scheduler"]) == 1
    assert capsys.readouterr().err == "depthbatch: error: out of memory: Unable to allocate 6.25 TiB\n"


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
