"""Starts the scheduler and worker processes, watches them and ends them. Knows nothing of requests or messages.

A child is in its own process group (a terminal's Ctrl-C does not reach it), reads the death pipe as its stdin, and
writes its log into the run directory. A process file descriptor becomes readable the moment it dies, so nobody polls.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from depthbatch.common.config import EngineConfig

STOP_GRACE_S = 5.0  # from SIGTERM to SIGKILL
_TAIL_BYTES = 8192
_CHATTER = re.compile(r"^\d{4}-\S+ \S+ (DEBUG|INFO) ")
_LOG_PREFIX = re.compile(r"^\d{4}-\S+ \S+ [A-Z]+ \w+: ")  # of common.logging


class Child:
    """One process of the engine."""

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
        """True once ``alive`` has been False: its descriptor has nothing more to tell."""
        return self._died_s is not None

    @property
    def dead_for_s(self) -> float:
        """Seconds since the death was noticed, 0 while alive."""
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
    """The children of one engine, by name."""

    def __init__(self, config: EngineConfig, run_dir: Path) -> None:
        self.config = config  # may be narrowed for later starts
        self._run_dir = run_dir
        self.children: dict[str, Child] = {}
        self.starts: dict[str, int] = {}
        # The kernel's parent-death signal fires when the *thread* that forked ends, so one lasting thread forks all.
        self._forker = ThreadPoolExecutor(1, thread_name_prefix="forker")

    def start(self, name: str) -> Child:
        """Starts (or starts again) ``depthbatch.NAME``; a former child of that name must be dead."""
        former = self.children.pop(name, None)
        if former is not None:
            former.release()
        child = self._forker.submit(self._spawn, name).result()
        self.children[name] = child
        self.starts[name] = self.starts.get(name, 0) + 1
        return child

    @staticmethod
    def program(name: str) -> list[str]:
        """What runs as the process ``name``, without its arguments."""
        return [sys.executable, "-P", "-m", f"depthbatch.{name}"]

    def _spawn(self, name: str) -> Child:
        log_path = self._run_dir / f"{name}.log"
        command = self.program(name)
        command += [
            "--run-dir",
            str(self._run_dir),
            "--config",
            self.config.to_json(),
            "--parent-pid",
            str(os.getpid()),
        ]
        with log_path.open("ab") as log_file:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log_file, stderr=log_file, process_group=0
            )
        return Child(name, process, log_path)

    def restarts(self, name: str) -> int:
        return max(0, self.starts.get(name, 0) - 1)

    def kill(self, name: str) -> None:
        """Ends one child at once and waits until it is gone."""
        child = self.children[name]
        child.signal(signal.SIGKILL)
        child.reap(STOP_GRACE_S)

    def stop(self) -> None:
        """Ends all children: SIGTERM, then SIGKILL after the grace. Doing it twice is fine."""
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
