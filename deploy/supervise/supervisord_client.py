"""What supervisord says of a program, within a time limit: the frontend asks from its event loop."""

import contextlib
import socket
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError
from xmlrpc.client import Error, ServerProxy, Transport

from depthbatch.common.errors import FAULT, USER_ERROR
from depthbatch.deploy.supervise.run_files import FRONTEND, GAVE_UP, frontend_number

ASK_S = 0.2  # for every step of a question
# exitcodes of the configuration: no restart
EXPECTED_CODES = {"scheduler": (USER_ERROR,), "worker": (USER_ERROR,), "frontend": (0, USER_ERROR, GAVE_UP)}
_FAILURES = (OSError, HTTPException, Error, ExpatError)


class _UnixConnection(HTTPConnection):
    """HTTP on a UNIX socket. supervisor's own transport has no time limit."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ASK_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ASK_S)
        self.sock.connect(self._path)


class _UnixTransport(Transport):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: Any) -> HTTPConnection:
        return _UnixConnection(self._path)


class SupervisordClient:
    """supervisord's own interface, on the UNIX socket of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._path = str(run_dir / "supervisor.sock")

    def info(self, name: str) -> dict[str, Any] | None:
        """What supervisord knows of a program; None when it cannot be asked, or does not answer at once."""
        with ServerProxy("http://localhost/RPC2", _UnixTransport(self._path)) as server:
            try:
                answer = server.supervisor.getProcessInfo(name)
            except _FAILURES:
                return None
        return answer if isinstance(answer, dict) else None

    def start(self, name: str) -> None:
        """Has a program started that supervisord would not start again by itself; if it cannot, all stays as it is."""
        with (
            ServerProxy("http://localhost/RPC2", _UnixTransport(self._path)) as server,
            contextlib.suppress(*_FAILURES),
        ):
            server.supervisor.startProcess(name, False)

    def exit_code(self, name: str) -> int | None:
        """Exit code of a program that will not be started again, None otherwise.

        After a fault, too, it is EXITED for a moment, until supervisord comes round to starting it again.
        """
        info = self.info(name)
        if info is None or info["statename"] not in ("EXITED", "FATAL"):
            return None
        code = int(info["exitstatus"])
        if info["statename"] == "FATAL":  # supervisord could not start it
            return code or FAULT
        kind = FRONTEND if frontend_number(name) is not None else name
        return code if code in EXPECTED_CODES[kind] else None
