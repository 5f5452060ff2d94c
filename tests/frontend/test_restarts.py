"""What a death of a process means, decided over processes that exist in name alone."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from depthbatch.common.errors import ConfigError, EngineDeadError
from depthbatch.common.messages import Fatal, SchedulerHeartbeat
from depthbatch.frontend import restarts
from depthbatch.frontend.health import HealthMonitor
from depthbatch.frontend.restarts import (
    FATAL_GRACE_S,
    LAST_WORDS_S,
    MAX_RESTARTS,
    RESTART_WINDOW_S,
    RestartBudget,
    Restarts,
)


@dataclass
class Named:
    """A process that is what the test says."""

    name: str
    alive: bool = True
    dead_for_s: float = 0.0
    exit_code: int | None = None
    returns: bool = False
    pid: int = 1
    fd: int = 1

    @property
    def death_noticed(self) -> bool:
        return not self.alive

    def epitaph(self) -> str:
        return f"{self.name} died"

    def last_line(self) -> str:
        return ""

    def will_return(self) -> bool:
        return self.returns

    def die(self, dead_for_s: float = 2 * FATAL_GRACE_S) -> "Named":
        self.alive, self.dead_for_s = False, dead_for_s
        return self


@dataclass
class NamedProcesses:
    """Their owner, who notes what it is asked for."""

    outlive_frontend: bool = False
    frontend: int = 0
    backs_off: bool = False
    served: bool = False
    run_dir: Path = Path()
    children: dict[str, Named] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def pin_kv_blocks(self, kv_blocks: int) -> None:
        self.asked.append(f"pin {kv_blocks}")

    def start(self, name: str) -> None:
        self.asked.append(f"start {name}")
        self.children[name] = Named(name)

    def restarts(self, name: str) -> int:
        return 0

    def kill(self, name: str) -> None:
        self.asked.append(f"kill {name}")

    def stop(self) -> None: ...


def started() -> tuple[NamedProcesses, Restarts]:
    processes = NamedProcesses()
    watch = Restarts(processes)
    watch.start()
    processes.asked.clear()
    return processes, watch


def test_the_budget_comes_back_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies at every start must not be started for ever; one that dies now and then must be."""
    now_s = 100.0
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now_s)
    budget = RestartBudget()
    assert [budget.spend() for _ in range(MAX_RESTARTS + 1)] == [True] * MAX_RESTARTS + [False]
    now_s += RESTART_WINDOW_S + 1
    assert budget.spent == 0 and budget.spend()


def test_a_dead_scheduler_gets_a_fresh_worker() -> None:
    """The K/V of the old worker belongs to nobody the new scheduler knows; a worker alone is replaced alone."""
    processes, watch = started()
    watch._served = True
    processes.children["worker"].die()
    loss = watch.look()
    assert loss is not None and loss.failure is None and not loss.of_scheduler
    watch.replace(loss)
    assert processes.asked == ["start worker"] and watch.look() is None
    processes.asked.clear()
    processes.children["scheduler"].die()
    loss = watch.look()
    assert loss is not None and loss.of_scheduler
    watch.replace(loss)
    assert processes.asked == ["kill worker", "start scheduler", "start worker"]


def test_restarts_that_do_not_help_end_the_engine() -> None:
    """With the reason of the last death, not a loop of starts."""
    processes, watch = started()
    watch._served = True
    for _ in range(MAX_RESTARTS):
        processes.children["worker"].die()
        loss = watch.look()
        assert loss is not None and loss.failure is None
        watch.replace(loss)
    processes.children["worker"].die()
    watch.last_words = Fatal("worker", "out of memory")
    loss = watch.look()
    assert loss is not None and str(loss.failure) == "restarting does not help: out of memory"


@pytest.mark.parametrize("of_former_frontend", [False, True])
def test_restarts_that_come_later_and_later_end_nothing(of_former_frontend: bool) -> None:
    """Under supervision a crash loop is waited out once the engine has served, be it under a frontend before this one."""
    processes = NamedProcesses(backs_off=True, served=of_former_frontend)
    watch = Restarts(processes)
    watch.start()
    watch._served |= not of_former_frontend
    for _ in range(2 * MAX_RESTARTS):
        processes.children["worker"].die()
        loss = watch.look()
        assert loss is not None and loss.failure is None
        watch.replace(loss)


def test_what_was_asked_to_end_is_no_fault() -> None:
    """Bug: restarts by hand counted, and the sixth within a minute ended the engine."""
    processes, watch = started()
    watch._served = True
    for _ in range(2 * MAX_RESTARTS):
        processes.children["worker"].die().exit_code = 0
        loss = watch.look()
        assert loss is not None and loss.failure is None
        watch.replace(loss)
    assert watch._budget.spent == 0


def test_a_death_at_the_start_is_final_and_has_a_reason() -> None:
    """Last words may still come for a moment; then the exit code tells the user's mistake from a fault. A process that
    its owner will start again is waited for."""
    processes, watch = started()
    worker = processes.children["worker"].die(0.0)
    assert watch.look() is None
    worker.dead_for_s = 2 * FATAL_GRACE_S
    worker.exit_code = 2
    assert watch.look() is None, "bug: on a busy machine the words came after 'worker died (exit code 2)' was told"
    worker.dead_for_s = 2 * LAST_WORDS_S
    loss = watch.look()
    assert loss is not None and isinstance(loss.failure, ConfigError)
    worker.exit_code = 1
    loss = watch.look()
    assert loss is not None and isinstance(loss.failure, EngineDeadError) and str(loss.failure) == "worker died"
    worker.returns = True
    loss = watch.look()
    assert loss is not None and loss.failure is None
    watch.last_words = Fatal("worker", "no such model", user_error=True)
    loss = watch.look()
    assert loss is not None and isinstance(loss.failure, ConfigError) and str(loss.failure) == "no such model"


def test_work_that_waited_for_a_worker_to_load_is_not_its_hang() -> None:
    """The last heartbeat before the worker was ready tells of work that has waited all the while it loaded; judged by
    that, a worker that takes longer to load than the limit would be killed as soon as it is ready, again and again."""
    monitor = HealthMonitor(NamedProcesses())
    monitor.ready()
    monitor.worker_lost()
    monitor.heartbeat(SchedulerHeartbeat(3, 100.0, 1, 3, 1, 0))
    assert monitor.hung(True, 10.0) is None
    monitor.ready()
    assert monitor.hung(True, 10.0) is None
    monitor.heartbeat(SchedulerHeartbeat(3, 10.5, 1, 3, 1, 0))
    assert monitor.hung(True, 10.0) == "worker" and monitor.hung(False, 10.0) is None
