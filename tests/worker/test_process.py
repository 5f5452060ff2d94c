"""The worker as a process: handshake, stages queued ahead, strictness, signals, and nothing left behind.

The test plays the scheduler on the other end of a real socket. Deadlines are generous; none of them measures speed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zmq

from depthbatch.common import transport
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import USER_ERROR
from depthbatch.common.frames import SLOT_PARAMS, Stage, slot_param_words
from depthbatch.common.messages import (
    Fatal,
    Loading,
    Shutdown,
    StageBatch,
    StageResult,
    WorkerCommand,
    WorkerHeartbeat,
    WorkerMessage,
    WorkerReady,
)
from depthbatch.common.run_dir import RunDir
from depthbatch.common.transport import WORKER_ENDPOINT, Router, endpoint
from depthbatch.worker import process
from fakes.worker import PROFILE
from reference.oracle import OURO

DEADLINE_S = 60


class Bench:
    """A bound ROUTER and the worker processes that were started on it."""

    def __init__(self, base: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.run_dir = RunDir(base)
        self.router = Router(self.context, self.run_dir.endpoint(WORKER_ENDPOINT), WorkerMessage)
        self.peer = b""
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self, config_json: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(command(self.run_dir.path, config_json), stdin=subprocess.DEVNULL)
        self.children.append(child)
        return child

    def receive(self, kind: type, skip: tuple[type, ...] = (WorkerHeartbeat, Loading)) -> object:
        """The next message but ``skip``; it must be of ``kind``."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if not self.router.socket.poll(200):
                continue
            received = self.router.receive()
            if received is None:
                continue
            self.peer = received.peer
            if not isinstance(received.message, skip):
                assert isinstance(received.message, kind), received.message
                return received.message
        raise AssertionError(f"no {kind.__name__} within {DEADLINE_S} s")

    def send(self, header: StageBatch, *frames: np.ndarray) -> None:
        assert self.router.send(self.peer, header, *(np.ascontiguousarray(frame, np.int32).data for frame in frames))

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait(DEADLINE_S)
        self.router.close(0)
        self.context.term()
        self.run_dir.remove()


def command(run_dir: Path, config_json: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "depthbatch.worker", "--run-dir", str(run_dir), "--config", config_json, *more]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def simulated(tmp_path: Path) -> str:
    """A configuration that starts in a moment: no torch, no model."""
    profile = tmp_path / "profile.json"
    profile.write_text(PROFILE)
    return EngineConfig(device=f"simulated:{profile}", max_num_seqs=4, max_model_len=64).to_json()


def test_stages_queued_ahead_give_the_published_tokens(bench: Bench) -> None:
    """Prefill and two whole decode tokens are sent before the first result is read: no stage needs another's result.

    The tokens are those of the published reference, so device-side token, state and block table were all right.
    """
    child = bench.start(EngineConfig(model=str(OURO), kv_layout="last_exited", kv_blocks=20, max_num_seqs=2).to_json())
    ready = bench.receive(WorkerReady)
    assert isinstance(ready, WorkerReady)
    assert ready.pid == child.pid and ready.info.num_blocks == 21 and ready.info.vocab_size == 300
    values = np.load(OURO / "expected.npz")
    prompt, wanted = values["prompt_1"], values["greedy_full_depth_1"].tolist()
    params = np.zeros(1, SLOT_PARAMS)
    params["slot"] = 2
    head = [2, 0, len(prompt), 1, *prompt, 2, 0, 5, 2, 1, 6]
    bench.send(
        StageBatch(1, Stage.PREFILL, 0, 1, len(prompt), 2, n_slot_params=1), np.array(head), slot_param_words(params)
    )
    step = 1
    for position in (len(prompt), len(prompt) + 1):
        for stage, aux in ((Stage.PRELUDE, 0), *((Stage.CORE, loop) for loop in (1, 2, 3, 4)), (Stage.CODA, 4)):
            step += 1
            bench.send(StageBatch(step, stage, 1, 1), np.array([2, position, aux, 2]))
    results = [bench.receive(StageResult) for _ in range(step)]
    assert all(isinstance(result, StageResult) for result in results)
    assert [result.step_id for result in results] == list(range(1, step + 1))
    assert all(result.start_s <= result.end_s for result in results)
    assert all(a.end_s <= b.start_s for a, b in pairwise(results))
    tokens = [np.frombuffer(result.token_ids, np.int32).tolist() for result in results if result.token_ids]
    assert tokens == [[token] for token in wanted[:3]]
    bench.router.send(bench.peer, Shutdown())
    assert child.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("config_json", "what"),
    [
        (EngineConfig(model="/nowhere/model").to_json(), "/nowhere/model"),
        (EngineConfig(model=str(OURO), kv_blocks=10**9).to_json(), "kv_blocks 1000000000"),
        ('{"modle": "x"}', "modle"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(bench: Bench, config_json: str, what: str) -> None:
    child = bench.start(config_json)
    fatal = bench.receive(Fatal)
    assert isinstance(fatal, Fatal)
    assert fatal.process == "worker" and fatal.user_error and what in fatal.message and "\n" not in fatal.message
    assert child.wait(DEADLINE_S) == 2


@pytest.mark.parametrize("parts", [[b"\xc1garbage"], [b""], None], ids=["garbage", "empty", "stage"])
def test_what_is_no_stage_ends_the_worker(bench: Bench, simulated: str, parts: list[bytes] | None) -> None:
    """Undecodable bytes and a stage whose frame does not fit are a scheduler's bug: Fatal, exit code 1, no guessing."""
    child = bench.start(simulated)
    bench.receive(WorkerReady)
    if parts is None:
        bench.send(StageBatch(3, Stage.CORE, 1, 1), np.array([9, 0, 1, 9]))
    else:
        bench.router.socket.send_multipart([bench.peer, *parts])
    fatal = bench.receive(Fatal)
    assert isinstance(fatal, Fatal) and not fatal.user_error
    assert child.wait(DEADLINE_S) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_worker_cleanly(bench: Bench, simulated: str, number: int) -> None:
    child = bench.start(simulated)
    bench.receive(WorkerReady)
    child.send_signal(number)
    assert child.wait(DEADLINE_S) == 0


def test_waits_are_reported_by_cause(bench: Bench, simulated: str) -> None:
    """Two stages queued, a pause that was nobody's fault, one stage: the pause is idle without work, not the scheduler's."""
    bench.start(simulated)
    bench.receive(WorkerReady)
    frame = np.array([1, 9, 1, 1])
    for step in (1, 2):
        bench.send(StageBatch(step, Stage.CORE, 1, 1), frame)
    first, second = bench.receive(StageResult), bench.receive(StageResult)
    assert isinstance(first, StageResult) and isinstance(second, StageResult)
    time.sleep(0.3)
    bench.send(StageBatch(3, Stage.CORE, 1, 1, after_no_work=True), frame)
    third = bench.receive(StageResult)
    assert isinstance(third, StageResult)
    while True:
        beat = bench.receive(WorkerHeartbeat, skip=())
        assert isinstance(beat, WorkerHeartbeat)
        if beat.steps == 3:
            break
    assert beat.busy_s == pytest.approx(sum(r.end_s - r.start_s for r in (first, second, third)))
    assert beat.idle_no_work_s == pytest.approx(third.start_s - second.end_s) and beat.idle_no_work_s > 0.29
    assert beat.idle_scheduler_s == pytest.approx(second.start_s - first.end_s)


def test_the_worker_dies_with_its_parent(bench: Bench, simulated: str) -> None:
    """SIGKILL leaves the parent no time to clean up; the pid must be gone all the same."""
    launcher = (
        "import os, subprocess, sys, time\n"
        "command = sys.argv[1:] + ['--parent-pid', str(os.getpid())]\n"
        "subprocess.Popen(command, stdin=subprocess.DEVNULL)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", launcher, *command(bench.run_dir.path, simulated)])
    bench.children.append(parent)
    ready = bench.receive(WorkerReady)
    assert isinstance(ready, WorkerReady)
    parent.kill()
    deadline = time.monotonic() + DEADLINE_S
    while _alive(ready.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_the_simulated_device_needs_no_torch() -> None:
    """It must start in a moment and leave the cores to the scheduler; importing torch alone takes seconds."""
    code = "import sys, depthbatch.worker.process, depthbatch.worker.simulated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_a_users_mistake_waits_for_a_slow_scheduler(tmp_path: Path) -> None:
    """Bug: the word of it was kept for half a second. On a busy machine the scheduler began to listen later, and all that
    was told was "worker died (exit code 2)"."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = process.WorkerLink(context, endpoint(tmp_path, WORKER_ENDPOINT), WorkerCommand)
    assert process._fail(link, "max_loops 9 is too many", USER_ERROR) == USER_ERROR
    link.close()
    time.sleep(2 * transport.LINGER_MS / 1000)
    router = transport.Router(context, endpoint(tmp_path, WORKER_ENDPOINT), WorkerMessage)
    assert router.socket.poll(5000)
    received = router.receive()
    assert received is not None and received.message == Fatal("worker", "max_loops 9 is too many", user_error=True)
    router.close()
    context.term()
