"""``depthbatch serve`` as a user starts it, on the simulated device: real processes, real supervisord, no weights."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

DEVICE = "simulated:h100-ouro-1.4b"  # about 22 ms a token at full depth
LIMIT_S = 60.0


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Polls; only a failure reaches the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """True while the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class ServeProcess:
    """``with ServeProcess() as server``: ready to answer; whatever it started is gone afterwards."""

    def __init__(
        self, *options: str, model: str = "demo", port: int = 0, wait: bool = True, run_dir: Path | None = None
    ) -> None:
        self._run_dir = run_dir
        options = (*options, *(() if run_dir is None else ("--run-dir", str(run_dir))))
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._wait = wait
        self._log = tempfile.NamedTemporaryFile(mode="rb")  # noqa: SIM115 - closed in __exit__
        command = [sys.executable, "-m", "depthbatch", "serve", model, "--port", str(self.port), *options]
        self._writer = open(self._log.name, "ab")  # noqa: SIM115
        self.process = subprocess.Popen(command, stderr=self._writer, stdout=self._writer, env=os.environ)

    def __enter__(self) -> "ServeProcess":
        try:
            if self._wait:
                self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        pids = self.all_pids()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._writer.close()
        self._log.close()

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def health(self) -> dict[str, Any]:
        """The answer of /health, or {} while nobody listens."""
        try:
            answer: dict[str, Any] = httpx.get(self.url + "/health", timeout=5).json()
        except httpx.HTTPError:
            return {}
        return answer

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return self.health().get("status") == "ok"

        try:
            wait_until(ready, "the server is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def pids(self) -> dict[str, int]:
        return {name: process["pid"] for name, process in self.health()["processes"].items()}

    def all_pids(self) -> list[int]:
        """The command and all of its descendants."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                found += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return found

    def supervisor_socket(self) -> str:
        run_dirs = Path(tempfile.gettempdir()).glob(f"depthbatch-*/{self.process.pid}-0")
        return f"unix://{self._run_dir or next(run_dirs)}/supervisor.sock"

    @contextlib.contextmanager
    def stream(self, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed completion of token ids."""
        request = {"prompt": [5, 6, 7], "ignore_eos": True, "seed": 1, "return_token_ids": True, **body}
        with httpx.stream("POST", self.url + "/v1/completions", json={**request, "stream": True}, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            lines = (line for line in answer.iter_lines() if line)
            yield (json.loads(line[6:]) for line in lines if line != "data: [DONE]")


def token_ids(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


class ResumingClient:
    """A client that takes its stream up again by ``Last-Event-ID`` until it has ended, however often it breaks."""

    def __init__(self, server: ServeProcess, name: str, **body: Any) -> None:
        self._url = server.url + "/v1/completions"
        self._name = name
        self._body = {"ignore_eos": True, "return_token_ids": True, "return_exit_depths": True, "stream": True, **body}
        self.last_id: str | None = None
        self.events: list[dict[str, Any]] = []
        self.breaks = 0
        self.done = False

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until the stream is complete, or ``until`` holds behind an event."""
        while not self.done:
            try:
                if self._read(until):
                    return
            except httpx.HTTPError:
                self.breaks += 1
                time.sleep(0.05)

    def _read(self, until: Callable[[], bool]) -> bool:
        headers = {"X-Request-Id": self._name, **({} if self.last_id is None else {"Last-Event-ID": self.last_id})}
        with httpx.stream("POST", self._url, json=self._body, headers=headers, timeout=30) as answer:
            if answer.status_code == 503:  # it starts
                time.sleep(0.1)
                return False
            assert answer.status_code == 200, answer.read()
            assert answer.headers["x-request-id"] == self._name
            event_id = None
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    self.events.append(event)
                    self.last_id = event_id or self.last_id
                    event_id = None
                    if until():
                        return True
        return False

    def joined(self) -> tuple[dict[int, dict[str, Any]], Any]:
        """Tokens, depths, text and end of each choice, and the usage."""
        choices: dict[int, dict[str, Any]] = {}
        usage = None
        for event in self.events:
            usage = event.get("usage", usage)
            for part in event["choices"]:
                whole = choices.setdefault(part["index"], {"token_ids": [], "exit_depths": [], "text": "", "ends": []})
                for name in ("token_ids", "exit_depths", "text"):
                    whole[name] += part[name]
                whole["ends"] += [part["finish_reason"]] * (part["finish_reason"] is not None)
        return choices, usage
