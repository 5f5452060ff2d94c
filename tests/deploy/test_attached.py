"""A frontend over processes that somebody else runs: which deaths end it, which it waits out. The processes are sleeps."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.deploy.supervise.attached import AttachedProcesses
from depthbatch.deploy.supervise.supervisord_client import SupervisordClient
from depthbatch.frontend import restarts
from depthbatch.frontend.engine_client import EngineClient
from depthbatch.frontend.restarts import FATAL_GRACE_S


class FakeSupervisor:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.questions = 0

    def exit_code(self, name: str) -> int | None:
        self.questions += 1
        return self.codes.get(name)

    def start(self, name: str) -> None:
        raise AssertionError("nothing has served yet")


class Sleeps:
    """Processes with pid files, as supervised programs write them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, age_s: float = 0.0) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(["sleep", "600"])
        self.running.append(process)
        path = self.run_dir / f"{name}.pid"
        path.write_text(str(process.pid))
        os.utime(path, (time.time() - age_s,) * 2)
        return process

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


@pytest.fixture
def sleeps(tmp_path: Path) -> Iterator[Sleeps]:
    sleeps = Sleeps(tmp_path)
    yield sleeps
    sleeps.end()


def attached(run_dir: Path, supervisor: FakeSupervisor) -> EngineClient:
    config = EngineConfig()
    client = EngineClient(config, processes=AttachedProcesses(run_dir, config, supervisor))
    client.launch()
    client.poll()
    return client


def poll_until(client: EngineClient, condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        client.wait(0.02)
        client.poll()


def test_a_death_that_is_made_good_is_waited_out(sleeps: Sleeps, tmp_path: Path) -> None:
    """Bug: a frontend that was itself starting again gave up, and the server with it, when the worker died then."""
    sleeps.start("scheduler")
    worker = sleeps.start("worker")
    client = attached(tmp_path, FakeSupervisor())
    worker.kill()
    worker.wait()
    poll_until(client, lambda: client._processes.children["worker"].pid == 0)
    assert client.failure is None
    successor = sleeps.start("worker")
    poll_until(client, lambda: client._processes.children["worker"].pid == successor.pid)
    assert client.failure is None
    client.close()


def test_a_death_that_is_final_ends_the_start(sleeps: Sleeps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same death, but the supervisor says that there will be no other."""
    monkeypatch.setattr(restarts, "LAST_WORDS_S", 2 * FATAL_GRACE_S)
    sleeps.start("scheduler")
    worker = sleeps.start("worker")
    supervisor = FakeSupervisor()
    client = attached(tmp_path, supervisor)
    supervisor.codes["worker"] = 2
    worker.kill()
    worker.wait()
    poll_until(client, lambda: client.failure is not None)
    client.close()


def test_a_worker_of_a_former_scheduler_is_replaced(sleeps: Sleeps, tmp_path: Path) -> None:
    """It is ended here. Bug: its pid file, which still stands, was then read, and its end taken for a fault."""
    old = sleeps.start("worker", age_s=10)
    sleeps.start("scheduler")
    client = attached(tmp_path, FakeSupervisor())
    assert old.wait(10) == -9
    end_s = time.monotonic() + 2 * FATAL_GRACE_S
    poll_until(client, lambda: time.monotonic() > end_s)
    assert client.failure is None and client._processes.children["worker"].pid == 0
    assert not client._restarts._budget.spent, "its end is no fault"
    successor = sleeps.start("worker")
    poll_until(client, lambda: client._processes.children["worker"].pid == successor.pid)
    client.close()


def test_the_supervisor_is_not_asked_at_every_look(sleeps: Sleeps, tmp_path: Path) -> None:
    """Requests and probes wait while it answers. 50 looks at a missing worker take far less than a second."""
    sleeps.start("scheduler")
    supervisor = FakeSupervisor()
    client = attached(tmp_path, supervisor)
    for _ in range(50):
        client.poll()
        client.health()
    assert 1 <= supervisor.questions < 10
    client.close()


def test_a_supervisor_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    """Bug: the question had no time limit, so that /health hung for as long as supervisord did. Nobody reads this
    socket: without the limit the test would never end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "supervisor.sock"))
        listener.listen()
        assert SupervisordClient(tmp_path).info("worker") is None
        assert SupervisordClient(tmp_path).exit_code("worker") is None
    assert SupervisordClient(tmp_path / "nowhere").info("worker") is None
