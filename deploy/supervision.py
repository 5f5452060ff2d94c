"""Runs the three programs under supervisord and stays in the foreground. Knows supervisord; nothing of requests."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import Any
from xmlrpc.client import Fault, ServerProxy

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import EngineDeadError
from depthbatch.common.transport import RunDir
from depthbatch.deploy.program import HTTP_FILE, RUN_DIR_VARIABLE, URL_FILE
from depthbatch.frontend.attach import write_config
from depthbatch.frontend.http.settings import HttpConfig

CONFIG = Path(__file__).with_name("supervisord.conf")
PROGRAMS = ("scheduler", "worker", "frontend")
STOP_MARGIN_S = 15  # from the drain deadline to SIGKILL
POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
_ENDED = ("EXITED", "FATAL")


class SupervisordClient:
    """supervisord's own interface, on the UNIX socket of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._address = f"unix://{run_dir}/supervisor.sock"

    def info(self, name: str) -> dict[str, Any] | None:
        """What supervisord knows of a program; None when it cannot be asked."""
        from supervisor.xmlrpc import SupervisorTransport

        transport = SupervisorTransport(None, None, self._address)  # a new one: after an error it is of no use
        try:
            answer = ServerProxy("http://127.0.0.1", transport=transport).supervisor.getProcessInfo(name)
        except (OSError, Fault, HTTPException):
            return None
        finally:
            transport.close()
        return answer if isinstance(answer, dict) else None

    def exit_code(self, name: str) -> int | None:
        """Exit code of a program that will not be started again, None otherwise."""
        info = self.info(name)
        return int(info["exitstatus"]) if info is not None and info["statename"] in _ENDED else None


class Supervision:
    """One supervisord with its run directory, as long as the ``with`` block."""

    def __init__(self, engine: EngineConfig, http: HttpConfig) -> None:
        self._run_dir = RunDir()
        self.path = self._run_dir.path
        write_config(self.path, engine)
        http_file = self.path / HTTP_FILE
        http_file.touch(mode=0o600)  # it may hold API keys
        http_file.write_text(json.dumps(asdict(http)))
        self._stop_wait_s = int(http.drain_s) + STOP_MARGIN_S
        self._signals = 0
        self._process = self._start()
        # a pipe, since what supervisord writes to is opened by name: a file would be overwritten, a socket refused
        self._copier = threading.Thread(target=self._copy_output, name="log", daemon=True)
        self._copier.start()
        self._client = SupervisordClient(self.path)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            RUN_DIR_VARIABLE: str(self.path),
            "DEPTHBATCH_PYTHON": sys.executable,
            "DEPTHBATCH_STOP_WAIT_S": str(self._stop_wait_s),
        }
        command = [sys.executable, "-P", "-m", "supervisor.supervisord", "-c", str(CONFIG)]
        libc = ctypes.CDLL(None)
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C reaches this process only, which passes it on
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )

    def _copy_output(self) -> None:
        """The output of all programs, as it comes, on our stderr."""
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 1 << 16):
            os.write(sys.stderr.fileno(), data)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first goes to supervisord, which stops the frontend (it drains) and then the others; supervisord does
        not pass on a second one, so that goes to the frontend itself."""
        self._signals += 1
        if self._signals == 1:
            self._process.send_signal(signal.SIGTERM)
        else:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.path / "frontend.pid").read_text()), signal.SIGTERM)

    def run(self) -> int:
        """Until stopped (0) or a program has ended for good (its exit code, at least 1)."""
        announced = False
        while self._process.poll() is None:
            announced = announced or self._announce()
            if self._signals == 0 and (name := self._ended_program()) is not None:
                code = self._client.exit_code(name) or 1
                self._process.send_signal(signal.SIGTERM)
                self._process.wait(self._stop_wait_s + STOP_MARGIN_S)
                return code
            time.sleep(POLL_S)
        if self._signals == 0:
            raise EngineDeadError(f"supervisord died (exit code {self._process.returncode})")
        return 0

    def _announce(self) -> bool:
        """Says once where the server is."""
        with contextlib.suppress(OSError):
            url = (self.path / URL_FILE).read_text()
            print(f"depthbatch: ready at {url}", file=sys.stderr, flush=True)
            return True
        return False

    def _ended_program(self) -> str | None:
        """The frontend, which knows about the others, before them."""
        for name in reversed(PROGRAMS):
            info = self._client.info(name)
            if info is None:
                return None
            if info["statename"] in _ENDED:
                return name if name == "frontend" else None
        return None

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
