"""Who owns the scheduler and worker processes, as a Protocol; and the owner that starts, watches and ends its own children.

Knows nothing of requests or messages. A child is in its own process group (a terminal's Ctrl-C does not reach it), reads the death pipe as its stdin, and
writes its log into the run directory. A process file descriptor becomes readable the moment it dies, so nobody polls.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from depthbatch.common.config import EngineConfig
from depthbatch.common.run_dir import open_run_dir

MAX_FRONTENDS = 64  # of one scheduler
STOP_GRACE_S = 5.0  # from SIGTERM to SIGKILL
_TAIL_BYTES = 8192
_CHATTER = re.compile(r"^\d{4}-\S+ \S+ (DEBUG|INFO) ")
_LOG_PREFIX = re.compile(r"^\d{4}-\S+ \S+ [A-Z]+ \w+: ")  # of common.logging


class Process(Protocol):
    """One process of the engine."""

    name: str
    pid: int  # 0 while it is expected
    fd: int  # readable once the process is dead; its number stays

    @property
    def alive(self) -> bool:
        """True also while the process is expected."""
        ...

    @property
    def death_noticed(self) -> bool:
        """True once ``alive`` has been False: its descriptor has nothing more to tell."""
        ...

    @property
    def dead_for_s(self) -> float:
        """Seconds since the death was noticed, 0 while alive."""
        ...

    @property
    def exit_code(self) -> int | None: ...

    def epitaph(self) -> str:
        """How it died, on one line."""
        ...

    def last_line(self) -> str:
        """The last thing it said; "" where that is not to be had."""
        ...

    def will_return(self) -> bool:
        """Whether its owner starts it again by itself, so that a death at the start is no end."""
        ...


class Processes(Protocol):
    """Who owns the scheduler and worker of one engine. Failures of a start show as deaths."""

    outlive_frontend: bool  # True: a scheduler may hold requests of a former frontend, and of others
    frontend: int  # which of MAX_FRONTENDS that share them this one is
    backs_off: bool  # True: a process that dies again and again is started later and later; it need not end the engine

    @property
    def served(self) -> bool:
        """The engine has been ready under a former frontend."""
        ...

    @property
    def run_dir(self) -> Path:
        """Where their sockets are."""
        ...

    @property
    def children(self) -> Mapping[str, Process]:
        """By name."""
        ...

    def pin_kv_blocks(self, kv_blocks: int) -> None:
        """A worker that is started from now on must have the KV memory that the scheduler counts with."""
        ...

    def start(self, name: str) -> None:
        """Starts (or starts again, or expects) "scheduler" or "worker"; a former one must be dead."""
        ...

    def restarts(self, name: str) -> int: ...

    def kill(self, name: str) -> None:
        """Ends one at once and waits until it is gone."""
        ...

    def stop(self) -> None:
        """The frontend has no more use for them. Doing it twice is fine."""
        ...


class Child:
    """A process that we started."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.log_path = log_path
        self.fd = os.pidfd_open(process.pid)  # readable once the process is dead
        self._process = process
        self._died_s: float | None = None

    @property
    def alive(self) -> bool:
        if self._process.poll() is None:
            return True
        if self._died_s is None:
            self._died_s = time.monotonic()
        return False

    @property
    def death_noticed(self) -> bool:
        return self._died_s is not None

    @property
    def dead_for_s(self) -> float:
        return 0.0 if self.alive or self._died_s is None else time.monotonic() - self._died_s

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def epitaph(self) -> str:
        """How it died and the last thing it said, on one line."""
        code = self._process.returncode
        if code is None:
            return f"{self.name} is alive"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = self.last_line()
        return f"{self.name} died ({how})" + (f": {said}" if said else "")

    def last_line(self) -> str:
        """The last line of its log that is more than chatter, without the log's prefix."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        complaints = (line.strip() for line in reversed(lines) if line.strip() and not _CHATTER.match(line))
        return _LOG_PREFIX.sub("", next(complaints, ""))

    def will_return(self) -> bool:
        return False

    def signal(self, number: int) -> None:
        """Sends a signal to the whole group; a dead one is left in peace."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def reap(self, timeout_s: float) -> bool:
        """Waits for its end; False when it still lives."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def release(self) -> None:
        """Closes the descriptors of a dead child."""
        os.close(self.fd)
        if self._process.stdin is not None:
            self._process.stdin.close()


class Launcher:
    """The processes of one engine as children of this one, in a run directory of its own."""

    outlive_frontend = False
    frontend = 0
    backs_off = False
    served = False

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError when there is no place for the run directory."""
        self.children: dict[str, Child] = {}
        self._config = config
        self._run_dir = open_run_dir(config.run_dir)
        self._starts: dict[str, int] = {}
        # The kernel's parent-death signal fires when the *thread* that forked ends, so one lasting thread forks all.
        self._forker = ThreadPoolExecutor(1, thread_name_prefix="forker")

    @property
    def run_dir(self) -> Path:
        return self._run_dir.path

    def pin_kv_blocks(self, kv_blocks: int) -> None:
        self._config = msgspec.structs.replace(self._config, kv_blocks=kv_blocks)

    def start(self, name: str) -> None:
        """Runs ``depthbatch.NAME``."""
        former = self.children.pop(name, None)
        if former is not None:
            former.release()
        self.children[name] = self._forker.submit(self._spawn, name).result()
        self._starts[name] = self._starts.get(name, 0) + 1

    @staticmethod
    def program(name: str) -> list[str]:
        """What runs as the process ``name``, without its arguments."""
        return [sys.executable, "-P", "-m", f"depthbatch.{name}"]

    def _spawn(self, name: str) -> Child:
        log_path = self.run_dir / f"{name}.log"
        command = self.program(name)
        command += [
            "--run-dir",
            str(self.run_dir),
            "--config",
            self._config.to_json(),
            "--parent-pid",
            str(os.getpid()),
        ]
        with log_path.open("ab") as log_file:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log_file, stderr=log_file, process_group=0
            )
        return Child(name, process, log_path)

    def restarts(self, name: str) -> int:
        return max(0, self._starts.get(name, 0) - 1)

    def kill(self, name: str) -> None:
        child = self.children[name]
        child.signal(signal.SIGKILL)
        child.reap(STOP_GRACE_S)

    def stop(self) -> None:
        """SIGTERM to all, then SIGKILL after the grace; removes the run directory."""
        for child in self.children.values():
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        for child in self.children.values():
            if not child.reap(max(0.0, deadline - time.monotonic())):
                child.signal(signal.SIGKILL)
                child.reap(STOP_GRACE_S)
            child.release()
        self.children.clear()
        self._forker.shutdown()
        self._run_dir.remove()
