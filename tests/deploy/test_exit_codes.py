"""Exit code 2 is for what another start cannot help, a wrong configuration; faults end with 1, and systemd starts again."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from depthbatch.common import os_process
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import (
    ConfigError,
    DepthbatchError,
    DownloadError,
    EngineDeadError,
    ModelError,
    RequestError,
)
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.deploy.cli import main as command_line
from depthbatch.deploy.supervise import program, run_files, supervision
from depthbatch.frontend.background import TaskFailedError
from depthbatch.frontend.http import server
from depthbatch.frontend.http.settings import HttpConfig

CODES = [  # an error, the exit code of a command that ends with it, and of the frontend under supervisord
    (ConfigError("x"), 2, 2),
    (ModelError("x"), 2, 2),
    (RequestError("x"), 2, 2),
    (DownloadError("x"), 1, 3),
    (EngineDeadError("restarting does not help: x"), 1, 3),
    (TaskFailedError("x"), 1, 1),  # the frontend alone is started again
    (DepthbatchError("scheduler and worker are of different versions"), 1, 3),
]


@pytest.mark.parametrize(("error", "code", "of_frontend"), CODES, ids=lambda value: type(value).__name__)
def test_of_errors(
    error: DepthbatchError,
    code: int,
    of_frontend: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bug: every error with a message ended with 2, so that an engine that had given up was not started again by systemd."""

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr("depthbatch.deploy.cli.info.run_info", fail)
    assert command_line.main(["info", "demo"]) == code and "depthbatch: error: " in capsys.readouterr().err

    run_files.write_config(tmp_path, EngineConfig())
    run_files.write_file(tmp_path / run_files.HTTP_FILE, "{}")
    monkeypatch.setattr(server, "bind", lambda http, shared: None)
    monkeypatch.setattr(server, "run_frontend", fail)
    assert program._run_frontend(tmp_path, 0) == of_frontend
    assert not (tmp_path / "frontend.ended").exists()


@pytest.mark.parametrize(("of_frontend", "code"), [(0, 0), (1, 1), (2, 2), (3, 1)])
def test_of_the_server(of_frontend: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What ``depthbatch serve`` makes of its frontend's."""
    watch = supervision.Supervision.__new__(supervision.Supervision)
    watch.path, watch._stopping, watch._frontends = tmp_path, None, ["frontend"]
    watch._process = SimpleNamespace(poll=lambda: None)
    watch._client = SimpleNamespace(exit_code=lambda name: of_frontend)
    assert watch.run() == code
    watch._frontends = ["frontend", "frontend-1"]
    codes = iter([None, 0, 0, of_frontend])  # one has drained before the other has ended
    watch._client = SimpleNamespace(exit_code=lambda name: next(codes))
    watch._faults_too_often = lambda: False
    watch._copier = SimpleNamespace(is_alive=lambda: True)
    assert watch.run() == code


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LocalEntryNotFoundError("no network"), DownloadError),
        (OSError(28, "No space left on device"), DownloadError),
        (
            RepositoryNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "http://x"))),
            ModelError,
        ),
    ],
)
def test_of_downloads(error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a machine whose network was not up yet ended with 2, and was not started again."""

    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(kind, match="model 'a/b'"):
        resolve_model_dir("a/b")


@pytest.mark.parametrize(("code", "noted"), [(0, True), (1, False), (2, False)])
def test_an_end_that_was_asked_for_is_noted(
    code: int, noted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that a restart by hand is no fault to whoever counts those."""
    monkeypatch.setattr("sys.argv", ["worker", "--run-dir", str(tmp_path), "--config", "{}"])
    for name in ("setup_logging", "die_with_threads"):
        monkeypatch.setattr(os_process, name, lambda *_: None)

    def stopped(run_dir: str, config: str) -> int:
        raise SystemExit(code)

    for run in (lambda run_dir, config: code, stopped):
        run_files.note_start(tmp_path, "worker")
        assert os_process.run_child("worker", run) == code
        assert run_files.read_end(tmp_path, "worker") == (os.getpid() if noted else 0)
    run_files.note_start(tmp_path, "worker")
    assert run_files.read_starts(tmp_path, "worker") == 3
    assert run_files.read_faults(tmp_path, "worker") == (0 if noted else 2)


def test_a_frontend_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its drain has a deadline of its own; if it misses that, the command does not wait for ever, and says so."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(supervision.os, "kill", lambda pid, number: killed.append((pid, number)))
    run_files.write_file(tmp_path / "frontend.pid", "77")
    watch = supervision.Supervision.__new__(supervision.Supervision)
    watch.path, watch._stopping, watch._frontends = tmp_path, None, ["frontend"]
    watch._stop_wait_s = int(HttpConfig().drain_s) + supervision.STOP_MARGIN_S
    watch._process = SimpleNamespace(poll=lambda: None)
    watch._client = SimpleNamespace(exit_code=lambda name: None)
    now_s = time.monotonic()
    watch.on_signal(15, None)
    monkeypatch.setattr(supervision.time, "monotonic", lambda: now_s + 3600)
    with pytest.raises(EngineDeadError, match="did not end within 45 s"):
        watch.run()
    assert killed == [(77, 15), (77, 0), (77, 9)]
