"""A crash loop under supervision is waited out, with longer and longer pauses, and is not the end of the server."""

from pathlib import Path

from depthbatch.common.config import EngineConfig
from depthbatch.deploy.supervise import back_off
from depthbatch.deploy.supervise.attached import AttachedProcesses
from depthbatch.deploy.supervise.back_off import Faults, book_fault
from depthbatch.frontend.restarts import MAX_RESTARTS, RESTART_WINDOW_S


def test_pauses_grow_and_end() -> None:
    """Five faults a minute cost nothing; then 1, 2, 4 .. 60 s; a run of more than a minute begins anew."""
    faults, now_s, waits = Faults(), 1000.0, []
    for _ in range(MAX_RESTARTS + 9):
        faults = faults.with_one(now_s)
        waits.append(faults.wait_s)
        now_s += faults.wait_s + 0.5
    assert waits == [0.0] * MAX_RESTARTS + [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert len(faults.times_s) < MAX_RESTARTS + 3, "what is old is forgotten"
    assert faults.with_one(now_s + RESTART_WINDOW_S).wait_s == 0.0
    now_s, faults = 0.0, Faults()
    for _ in range(30):  # one every 15 s is within the budget
        faults = faults.with_one(now_s)
        now_s += 15.0
        assert faults.wait_s == 0.0


def test_faults_are_kept_between_processes(tmp_path: Path, monkeypatch) -> None:
    """Each start is a process of its own; a file that cannot be read is as good as none."""
    monkeypatch.setattr(back_off.time, "monotonic", lambda: 5.0)
    assert [book_fault(tmp_path, "worker") for _ in range(MAX_RESTARTS + 2)] == [0.0] * MAX_RESTARTS + [1.0, 2.0]
    assert book_fault(tmp_path, "scheduler") == 0.0
    (tmp_path / "worker.recent").write_text("{")
    assert book_fault(tmp_path, "worker") == 0.0


class Supervisor:
    """Gives up what ends with 2."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def exit_code(self, name: str) -> int | None:
        return None if self.started else 2

    def start(self, name: str) -> None:
        self.started.append(name)


def test_a_worker_that_gives_up_after_it_has_served_is_started_again(tmp_path: Path) -> None:
    """Bug: a restarted worker for which its predecessor's memory was not free yet called that the user's mistake (exit
    code 2), which supervisord answers with no restart: the server was lost."""
    supervisor = Supervisor()
    processes = AttachedProcesses(tmp_path, EngineConfig(), supervisor)
    assert not processes.served
    processes.pin_kv_blocks(7)
    assert processes.served and AttachedProcesses(tmp_path, EngineConfig(), supervisor).served
    processes.start("worker")
    assert not processes.children["worker"].alive and "exit code 2" in processes.children["worker"].epitaph()
    processes.start("worker")
    assert supervisor.started == ["worker"] and processes.children["worker"].alive
    processes.stop()
