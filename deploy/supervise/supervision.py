"""Runs the three programs under supervisord and stays in the foreground. Knows supervisord; nothing of requests."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import FAULT, USER_ERROR, EngineDeadError
from depthbatch.common.os_process import end_with_parent
from depthbatch.common.run_dir import open_run_dir
from depthbatch.common.transport import API_ENDPOINT, endpoint
from depthbatch.deploy.supervise.run_files import (
    HTTP_FILE,
    PROGRAMS_DIR,
    RUN_DIR_VARIABLE,
    frontend_names,
    read_faults,
    url_file,
    write_config,
    write_file,
)
from depthbatch.deploy.supervise.supervisord_client import SupervisordClient
from depthbatch.frontend.http.settings import HttpConfig
from depthbatch.frontend.restarts import MAX_RESTARTS, RESTART_WINDOW_S, RestartBudget

CONFIG = Path(__file__).resolve().parent.parent / "supervisord.conf"
STOP_MARGIN_S = 15  # from the drain deadline to SIGKILL
POLL_S = 0.2


class Stopping(NamedTuple):
    """What a first signal has begun."""

    frontend_pids: tuple[int, ...]  # of the frontends that drain
    until_s: float  # monotonic; then they are killed


def _exists(pid: int) -> bool:
    """Whether there is such a process, be it one whose exit code nobody has taken yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Supervision:
    """One supervisord with its run directory, as long as the ``with`` block."""

    def __init__(self, engine: EngineConfig, http: HttpConfig) -> None:
        self._run_dir = open_run_dir(engine.run_dir)
        self.path = self._run_dir.path
        write_config(self.path, engine)
        write_file(self.path / HTTP_FILE, json.dumps(msgspec.structs.asdict(http)))
        self._frontends = frontend_names(http.frontends)
        self._write_programs()
        self._stop_wait_s = int(http.drain_s) + STOP_MARGIN_S
        self._stopping: Stopping | None = None
        self._faults = 0  # of the frontends, which themselves count those of the others
        self._budget = RestartBudget()
        self._process = self._start()
        # a pipe, since what supervisord writes to is opened by name: a file would be overwritten, a socket refused
        self._copier = threading.Thread(target=self._copy_output, name="log", daemon=True)
        self._copier.start()
        self._client = SupervisordClient(self.path)

    def _write_programs(self) -> None:
        """Frontends beyond the first one have its section, each under its own name."""
        section = CONFIG.read_text().split("[program:frontend]\n")[1].split("\n[")[0]
        directory = self.path / PROGRAMS_DIR
        directory.mkdir(exist_ok=True)
        for name in self._frontends[1:]:
            text = section.replace("supervise.program frontend\n", f"supervise.program {name}\n")
            write_file(directory / f"{name}.conf", f"[program:{name}]\n{text}")

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            RUN_DIR_VARIABLE: str(self.path),
            "DEPTHBATCH_PYTHON": sys.executable,
            "DEPTHBATCH_STOP_WAIT_S": str(self._stop_wait_s),
        }
        command = [sys.executable, "-P", "-m", "supervisor.supervisord", "-c", str(CONFIG)]
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C reaches this process only, which passes it on
            preexec_fn=end_with_parent,
        )

    def _copy_output(self) -> None:
        """The output of all programs, as it comes, on our stderr. Read even when that is closed: a full pipe would stop
        supervisord, and then them."""
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 1 << 16):
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), data)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Each goes to the frontends themselves: the first makes them drain, the second abort. supervisord hears of nothing
        until they have ended: told to stop, it would start no program again, and a fault in a drain would cut the streams."""
        pids = []
        for name in self._frontends:
            with contextlib.suppress(OSError, ValueError):
                pid = int((self.path / f"{name}.pid").read_text())
                os.kill(pid, signal.SIGTERM)
                pids.append(pid)
        until_s = time.monotonic() + self._stop_wait_s if self._stopping is None else self._stopping.until_s
        former = () if self._stopping is None else self._stopping.frontend_pids
        self._stopping = Stopping(tuple(pids) or former, until_s)

    def run(self) -> int:
        """Until the frontends have drained (0) or one has given up (USER_ERROR or FAULT). Raises EngineDeadError."""
        announced = False
        while self._process.poll() is None:
            announced = announced or self._announce()
            stopping = self._stopping  # asked first: supervisord knows the exit code of what is gone
            gone = stopping is not None and not any(map(_exists, stopping.frontend_pids))
            codes = [self._client.exit_code(name) for name in self._frontends]
            for code in codes:  # it gives up when the others cannot be helped
                if code:
                    return USER_ERROR if code == USER_ERROR else FAULT
            if all(code == 0 for code in codes):
                return 0
            if stopping is not None and gone:
                return FAULT if stopping.frontend_pids else 0
            if stopping is not None and time.monotonic() > stopping.until_s:
                for pid in stopping.frontend_pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise EngineDeadError(f"the frontend did not end within {self._stop_wait_s} s of SIGTERM")
            if stopping is None and self._faults_too_often():
                raise EngineDeadError(f"the frontend died {MAX_RESTARTS + 1} times within {RESTART_WINDOW_S:g} s")
            if not self._copier.is_alive() and self._process.poll() is None:
                raise EngineDeadError("the copier of the programs' output has failed")
            time.sleep(POLL_S)
        if self._stopping is not None and self._process.returncode == 0:  # somebody told it, too
            return 0
        raise EngineDeadError(f"supervisord died (exit code {self._process.returncode})")

    def _announce(self) -> bool:
        """Says once where the server is, when every frontend is."""
        with contextlib.suppress(OSError):
            url, *_ = [(self.path / url_file(number)).read_text() for number in range(len(self._frontends))]
            native = endpoint(self.path, API_ENDPOINT)
            print(f"depthbatch: ready at {url} (native API at {native})", file=sys.stderr, flush=True)
            return True
        return False

    def _faults_too_often(self) -> bool:
        faults = sum(read_faults(self.path, name) for name in self._frontends)
        spent = [self._budget.spend() for _ in range(faults - self._faults)]
        self._faults = faults
        return not all(spent)

    def close(self) -> None:
        """Nothing is left running and the run directory is gone."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(self._stop_wait_s + STOP_MARGIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._copier.join()
        self._run_dir.remove()
