"""Scheduler and worker that somebody else runs (supervisord): seen through a run directory, never started from here.

Each program writes RUN/NAME.pid before it
does anything else; whoever supervises starts it again after a fault. A process that is gone is "pending" until its
successor has written its pid, or the supervisor says that there will be none.
"""

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Protocol

import msgspec

from depthbatch.common.config import EngineConfig
from depthbatch.common.run_dir import read_end
from depthbatch.deploy.supervise.run_files import FRONTEND, SERVED_FILE, frontend_names, read_starts, write_config
from depthbatch.frontend.processes import MAX_FRONTENDS

START_S = 30.0  # from the death of a process to its successor's pid
ASK_EVERY_S = 1.0  # the supervisor, about a process that is expected
KILL_S = 5.0
STALE_S = 2.0  # a worker that much older than its scheduler belongs to a former one


class Supervisor(Protocol):
    """Who runs the processes."""

    def exit_code(self, name: str) -> int | None:
        """Exit code of a process that will not be started again; None while it runs or will be."""
        ...

    def start(self, name: str) -> None:
        """Starts a process that would not be started again."""
        ...


class AttachedProcess:
    """One process, known by its pid file. ``former_pid``: the dead predecessor, whose file is not to be believed."""

    def __init__(self, name: str, run_dir: Path, supervisor: Supervisor, former_pid: int) -> None:
        self.name = name
        self.pid = 0
        self.exit_code: int | None = None
        self.fd = os.pidfd_open(os.getpid())  # never readable here: nothing to tell yet
        self._run_dir = run_dir
        self._supervisor = supervisor
        self._former_pid = former_pid
        self._deadline_s = time.monotonic() + START_S
        self._next_question_s = 0.0
        self._died_s: float | None = None

    @property
    def alive(self) -> bool:
        if self._died_s is not None:
            return False
        if self.pid == 0:
            self._look_for_pid()
        if self.pid:
            dead = bool(select.select([self.fd], [], [], 0)[0])
            if dead and read_end(self._run_dir, self.name) == self.pid:
                self.exit_code = 0
        else:
            self._ask_supervisor()
            dead = self.exit_code is not None or time.monotonic() > self._deadline_s
        if dead:
            self._died_s = time.monotonic()
        return not dead

    @property
    def death_noticed(self) -> bool:
        return self._died_s is not None

    @property
    def dead_for_s(self) -> float:
        return 0.0 if self.alive or self._died_s is None else time.monotonic() - self._died_s

    def epitaph(self) -> str:
        self._learn_exit_code()
        if self.pid == 0 and self.exit_code is None:
            return f"{self.name} was not started within {START_S:g} s"
        return f"{self.name} died" + ("" if self.exit_code is None else f" (exit code {self.exit_code})")

    def last_line(self) -> str:
        """Its log is the supervisor's."""
        return ""

    def will_return(self) -> bool:
        """Its supervisor has not given it up: this frontend, started again itself, met it at a bad moment."""
        self._learn_exit_code()
        return self.pid != 0 and not self.exit_code

    def kill(self) -> None:
        if self.alive and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            select.select([self.fd], [], [], KILL_S)

    def release(self) -> None:
        os.close(self.fd)

    def _learn_exit_code(self) -> None:
        if self.exit_code is None:
            self.exit_code = self._supervisor.exit_code(self.name)

    def _ask_supervisor(self) -> None:
        """Not at every look: the answer takes time, and requests and probes wait for it."""
        now_s = time.monotonic()
        if now_s >= self._next_question_s:
            self._next_question_s = now_s + ASK_EVERY_S
            self.exit_code = self._supervisor.exit_code(self.name)

    def _look_for_pid(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            pid = int((self._run_dir / f"{self.name}.pid").read_text())
            if pid != self._former_pid:
                descriptor = os.pidfd_open(pid)  # fails for one that is gone: then there will be another
                os.dup2(descriptor, self.fd)  # the number stays, since event loops may watch it
                os.close(descriptor)
                self.pid = pid


class AttachedProcesses:
    """The scheduler and worker of one run directory."""

    outlive_frontend = True
    backs_off = True

    def __init__(self, run_dir: Path, config: EngineConfig, supervisor: Supervisor, frontend: int = 0) -> None:
        """``frontend``: which one of those that see them so."""
        self.run_dir = run_dir
        self.frontend = frontend
        self.children: dict[str, AttachedProcess] = {}
        self._config = config
        self._supervisor = supervisor

    def pin_kv_blocks(self, kv_blocks: int) -> None:
        """The programs read their configuration from the run directory."""
        (self.run_dir / SERVED_FILE).touch()
        write_config(self.run_dir, msgspec.structs.replace(self._config, kv_blocks=kv_blocks))

    def start(self, name: str) -> None:
        """Expects a (new) process of that name."""
        former = self.children.pop(name, None)
        former_pid = 0
        if former is not None:
            former.release()
            former_pid = former.pid
            if former.exit_code:  # by its code it is not started again; but it has served before
                self._supervisor.start(name)
        elif name == "worker":
            former_pid = self._end_stale_worker()
        self.children[name] = AttachedProcess(name, self.run_dir, self._supervisor, former_pid)

    @property
    def served(self) -> bool:
        return (self.run_dir / SERVED_FILE).exists()

    def restarts(self, name: str) -> int:
        """Of all frontends together."""
        names = frontend_names(MAX_FRONTENDS) if name == FRONTEND else [name]
        return sum(max(0, read_starts(self.run_dir, each) - 1) for each in names)

    def kill(self, name: str) -> None:
        self.children[name].kill()

    def stop(self) -> None:
        """They outlive this frontend; whoever runs them ends them."""
        for child in self.children.values():
            child.release()
        self.children.clear()

    def _end_stale_worker(self) -> int:
        """A worker says that it is ready only once: one that did so to a scheduler before this one is of no use.

        Returns its pid, for which its successor must not be taken, or 0."""
        with contextlib.suppress(OSError, ValueError):
            path = self.run_dir / "worker.pid"
            if path.stat().st_mtime < (self.run_dir / "scheduler.pid").stat().st_mtime - STALE_S:
                pid = int(path.read_text())
                os.kill(pid, signal.SIGKILL)
                return pid
        return 0
