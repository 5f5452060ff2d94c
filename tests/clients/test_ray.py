"""Two engines on Ray Serve, the real one: kill -9 of a replica, a worker and a scheduler in the middle of 64 streams, then more
engines and fewer under load. One Ray for all of it: it takes ten seconds to start."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.serve_process import free_port

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [PYTHON, Path(__file__).with_name("ray_streams.py"), str(free_port())]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return {**told, "log": run.stdout + run.stderr}


def test_the_undisturbed_streams_are_whole(report: dict[str, Any]) -> None:
    """What the others are compared with: every stream has all of its tokens, at more than one depth."""
    for stream in report["whole"]:
        assert len(stream["token_ids"]) == len(stream["exit_depths"]) == 96 and stream["ends"] == ["length"]
    assert len({depth for stream in report["whole"] for depth in stream["exit_depths"]}) > 1


@pytest.mark.parametrize("victim", ["replica", "worker", "scheduler"])
def test_kill_9_in_mid_stream(report: dict[str, Any], victim: str) -> None:
    """Every stream goes on, at another replica or at the same one's next worker, with the tokens, depths and text that it
    would have had."""
    assert report[f"{victim}_engines"] == 2
    assert report[victim] == report["whole"]
    said = {
        "replica": "a replica is lost",
        "worker": "worker died (killed by SIGKILL)",
        "scheduler": "scheduler died (killed",
    }
    assert said[victim] in report["log"]


def test_scaling_loses_nothing(report: dict[str, Any]) -> None:
    """64 streams are too many for one engine, so that a second comes; four are too few for two, so that one goes: no stream
    notices."""
    scaling, whole = report["scaling"], report["whole"]
    assert scaling["replicas"] == [1, 2, 1]
    assert scaling["up"] == whole
    assert scaling["down"] == whole[:4] * (len(scaling["down"]) // 4) and scaling["down"]


def test_an_engine_tells_ray_how_it_is() -> None:
    """Its counters as metrics of Ray's, its queued loops to the router, and a failure of its health once it is lost."""
    script = Path(__file__).with_name("ray_engine.py")
    run = subprocess.run([PYTHON, script], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert {
        "depthbatch_num_requests_waiting",
        "depthbatch_kv_cache_usage_perc",
        "depthbatch_generation_tokens_total",
    } <= set(told["gauges"])
    assert not any("{" in name for name in told["gauges"])
    assert told["idle"] == {"queued_loops": 0} and told["failed"] == "frontend: a task failed; its log has the details"


def test_serve_run_is_one_command() -> None:
    """As the page has it: the API answers under Ray's own address, and Ctrl-C ends all of it."""
    if listens(8000):
        pytest.skip("port 8000, which is serve's, is taken")
    command = [PYTHON.with_name("serve"), "run", "depthbatch.deploy.ray_app:app", "model=demo", "threads=1"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_MEMORY_MONITOR": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            answer = first_answer(run, {"model": "demo", "prompt": "12+13=", "max_tokens": 8})
            assert answer["choices"][0]["text"] and answer["usage"]["completion_tokens"] > 0
        finally:
            run.send_signal(signal.SIGINT)
            with killed_when_late(run):
                told, _ = run.communicate(timeout=60)
    assert "Running import path: 'depthbatch.deploy.ray_app:app'" in told and not listens(8000)


@contextlib.contextmanager
def killed_when_late(run: "subprocess.Popen[str]") -> Iterator[None]:
    """A process that does not end in time fails the test, and does not hang it."""
    try:
        yield
    except subprocess.TimeoutExpired:
        run.kill()
        raise


def listens(port: int) -> bool:
    with socket.socket() as end:
        return end.connect_ex(("127.0.0.1", port)) == 0


def first_answer(run: "subprocess.Popen[str]", body: dict[str, Any]) -> dict[str, Any]:
    """Of a server that is starting."""
    deadline_s = time.monotonic() + 180
    while time.monotonic() < deadline_s and run.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.post("http://127.0.0.1:8000/v1/completions", json=body, timeout=60)
            if answer.status_code == 200:
                found: dict[str, Any] = answer.json()
                return found
        time.sleep(0.5)
    raise AssertionError("no answer")


def test_bad_options_are_told() -> None:
    """Before anything is deployed, in one line that names the option."""
    expected = {
        "port": ("1", "port: not an option on Ray Serve"),
        "zmq_bind": ("tcp://127.0.0.1:1", "zmq_bind: not an option on Ray Serve"),
        "min_replicas": ("0", "min_replicas must be at least 1, not 0"),
        "max_num_seq": ("8", "max_num_seq: no option"),
        "policy": ("none", "policy must be one of auto, refill, no-refill, cb, not 'none'"),
    }
    code = "import sys; from depthbatch.deploy.ray_app import ConfigError, configs\n"
    code += "for given in sys.argv[1:]:\n try: configs(dict([given.split('=')]))\n except ConfigError as error: print(error)"
    arguments = [f"{name}={value}" for name, (value, _) in expected.items()]
    run = subprocess.run([PYTHON, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.splitlines() == [message for _, message in expected.values()], run.stderr[-500:]


def test_the_shipped_configuration_is_one() -> None:
    """deploy/ray-serve.yaml is what Ray takes, and its options are ours."""
    code = "import sys, yaml; from ray.serve.schema import ServeDeploySchema; from depthbatch.deploy.ray_app import configs; "
    code += "found = ServeDeploySchema.model_validate(yaml.safe_load(open(sys.argv[1]))); configs(found.applications[0].args)"
    path = ROOT / "deploy" / "ray-serve.yaml"
    run = subprocess.run([PYTHON, "-c", code, path], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-500:]
