"""Row "an exception in a background task is swallowed, engine hangs": each task and callback of the frontend is made to
fail in turn, below the real HTTP server and ZMQ API. A pass is not luck: two streams are open, whose last message is
another when they end well or not at all, and the log must name what failed."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from depthbatch.common.errors import EngineDeadError
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.background import TaskFailedError, background
from depthbatch.frontend.client import Client
from depthbatch.frontend.engine_client import EngineClient
from depthbatch.frontend.http import server
from depthbatch.frontend.output import OutputAssembler
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.tokenizer import Tokenizer
from depthbatch.frontend.zmq_api import ApiRouter, ZmqApi
from fakes.install import use_fake_engine
from fakes.running import LIMIT_S, RunningFrontend

LONG = {"prompt": [5, 6], "max_tokens": 500, "ignore_eos": True, "stream": True}


class Broken(RuntimeError):
    """What the fault raises."""


def raising(*_: Any, **__: Any) -> Any:
    raise Broken("on purpose")


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningFrontend]:
    with RunningFrontend(monkeypatch) as running:
        yield running


def _drain(frontend: RunningFrontend) -> None:
    assert frontend.server is not None
    frontend.call(frontend.server.on_signal)


def _drain_and_abort(frontend: RunningFrontend) -> None:
    _drain(frontend)
    _drain(frontend)


def _ask_stats(frontend: RunningFrontend) -> None:
    frontend.asker = Client(f"ipc://{frontend.engine.run_dir}/api")
    frontend.asker.send(verb="stats")


def _callback(frontend: RunningFrontend) -> None:
    frontend.call(raising)


def _nothing(frontend: RunningFrontend) -> None:
    pass


FAULTS: dict[str, tuple[Any, str, Callable[[RunningFrontend], None]]] = {
    "engine pump": (EngineClient, "poll", _nothing),
    "engine ticker": (AsyncEngine, "_pump", _nothing),
    "ZMQ API receiver": (ApiRouter, "receive", _nothing),
    "ZMQ API ticker": (ZmqApi, "_receive", _nothing),
    "ZMQ API stats": (AsyncEngine, "stats", _ask_stats),
    "drain": (AsyncEngine, "abort_all", _drain),
    "abort": (AsyncEngine, "abort_all", _drain_and_abort),
    "Exception in callback": (object, "", _callback),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_task_ends_the_process(
    frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Row "an exception in a background task is swallowed, engine hangs": the open stream of either API gets its
    terminal message, the program ends with the error that is exit status 1, one line names the task."""
    native = Client(f"ipc://{frontend.engine.run_dir}/api", LIMIT_S)
    messages = native.generate([7, 8], max_tokens=500, ignore_eos=True)
    assert next(messages)["type"] == "tokens"
    with httpx.stream("POST", frontend.url + "/v1/completions", json=LONG, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        owner, attribute, trigger = FAULTS[name]
        if attribute:
            monkeypatch.setattr(owner, attribute, raising)
        trigger(frontend)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == "engine_dead" and "on purpose" not in str(events[-1])
    with pytest.raises(RuntimeError, match="failed"):
        list(messages)
    assert isinstance(frontend.end(), TaskFailedError)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]
    assert told and told[0].startswith(name) and "Broken: on purpose" in told[0]
    native.close()


def test_a_failing_start_names_itself(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The same row for the task that everything else hangs on: it fails after the engine is up, in what is not
    foreseen, while probes are answered."""
    monkeypatch.setattr(server, "create_app", raising)
    with RunningFrontend(monkeypatch, wait=False) as frontend:
        assert isinstance(frontend.end(), TaskFailedError)
    assert "frontend failed: Broken: on purpose" in caplog.text


def test_an_embedded_engine_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """AsyncEngine in somebody else's program, whose process is not ours to end: the request raises with the cause,
    ``failed`` returns, the next one is refused. Being cancelled is no failure."""
    use_fake_engine(monkeypatch)

    async def main() -> None:
        told: list[str] = []
        task = background(asyncio.sleep(60), "sleeper", lambda name, error: told.append(name))
        task.cancel()
        async with AsyncEngine(quiet=True) as engine:
            stream = engine.generate([5], SamplingParams(max_tokens=500, ignore_eos=True))
            await anext(stream)
            monkeypatch.setattr(EngineClient, "poll", raising)
            with pytest.raises(EngineDeadError) as caught:
                async for _ in stream:
                    pass
            assert isinstance(caught.value.__cause__, Broken)
            assert await asyncio.wait_for(engine.failed(), LIMIT_S) is caught.value
            with pytest.raises(EngineDeadError):
                await anext(engine.generate([5]))
        assert told == []

    asyncio.run(main())


LOOP = """
import sys
from depthbatch.common.config import EngineConfig
from depthbatch.common.logging import setup_logging
from depthbatch.{package} import process
setup_logging("{package}")
def broken(*_):
    raise RuntimeError("on purpose")
process.{owner} = broken
config = EngineConfig(device="simulated:h100-ouro-1.4b").to_json()
sys.exit(process.run_{package}(sys.argv[1], config))
"""


@pytest.mark.parametrize(
    ("package", "owner"),
    [
        ("scheduler", "SchedulerProcess.publish"),
        ("scheduler", "SchedulerProcess.complete"),
        ("worker", "WorkerLoop._heartbeat"),
    ],
)
def test_a_failing_loop_ends_its_process(tmp_path: Path, package: str, owner: str) -> None:
    """Row "an exception in a background task is swallowed, engine hangs", for the one loop of scheduler and worker:
    status 1, which asks for a restart, and the failure in the log."""
    code = LOOP.format(package=package, owner=owner)
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1, ended.stderr
    assert f"ERROR {package}: {package} failed" in ended.stderr and "RuntimeError: on purpose" in ended.stderr


THREAD = """
import sys, threading
from depthbatch.common.os_process import die_with_threads
from depthbatch.common.logging import setup_logging
setup_logging("worker")
{hook}
threading.Thread(target=lambda: 1 / 0, name="completions", daemon=True).start()
threading.Event().wait(float(sys.argv[1]))
print("still here")
"""


def test_a_failing_thread_ends_its_process() -> None:
    """The same row for threads, in every program (each calls this hook first): status 1 and the thread's name. The
    control shows that without the hook the process goes on, so the status is the hook's doing."""
    ended = subprocess.run(
        [sys.executable, "-c", THREAD.format(hook="die_with_threads()"), "60"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ended.returncode == 1 and "still here" not in ended.stdout
    assert "CRITICAL worker: thread completions failed: ZeroDivisionError" in ended.stderr
    control = subprocess.run([sys.executable, "-c", THREAD.format(hook=""), "0.5"], capture_output=True, text=True)
    assert control.returncode == 0 and "still here" in control.stdout
    root = Path(server.__file__).parents[2]
    for program in ("common/os_process.py", "deploy/supervise/program.py"):
        assert "    die_with_threads()\n" in (root / program).read_text(), program
    for program in ("scheduler/__main__.py", "worker/__main__.py"):
        assert "run_child(" in (root / program).read_text(), program


class Panic(BaseException):
    """What native libraries raise: no Exception."""


@pytest.mark.parametrize("where", [(OutputAssembler, "push"), (Tokenizer, "encode"), (EngineClient, "check")])
@pytest.mark.parametrize(
    "body",
    [{"n": 1}, {"n": 3}, {"n": 1, "stream": True}, {"n": 2, "stream": True}, {"prompt": ["a", "b"]}, None],
)
def test_a_panic_is_one_requests_trouble(
    frontend: RunningFrontend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: tuple[type, str],
    body: dict[str, Any] | None,
) -> None:
    """Bug: a BaseException that is no Exception left a request with n >= 2 without an answer for ever, and ended the
    frontend when it came by ZMQ (``body`` None). Wherever it is raised its request gets an error, the log has its name,
    and the next request is served."""

    def panicking(*_: Any, **__: Any) -> Any:
        raise Panic("on purpose")

    with monkeypatch.context() as broken:
        broken.setattr(*where, panicking)
        if body is None:
            native = Client(f"ipc://{frontend.engine.run_dir}/api", LIMIT_S)
            with pytest.raises(RuntimeError, match="Panic"):
                list(native.generate("ab", max_tokens=3))
            native.close()
        else:
            answer = httpx.post(
                frontend.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 3} | body, timeout=LIMIT_S
            )
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
            assert "on purpose" not in answer.text
    assert any("Panic: on purpose" in record.getMessage() for record in caplog.records)
    good = httpx.post(frontend.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 3, "n": 2}, timeout=LIMIT_S)
    assert good.status_code == 200 and len(good.json()["choices"]) == 2
    assert httpx.get(frontend.url + "/health", timeout=LIMIT_S).status_code == 200


@pytest.mark.parametrize("where", [(EngineClient, "poll"), (ApiRouter, "receive")])
def test_a_panic_of_the_engines_own_work_ends_the_process(
    frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    """Where no request is to blame a panic is a failure like any other: nothing goes on without pump or receiver."""

    def panicking(*_: Any, **__: Any) -> Any:
        raise Panic("on purpose")

    monkeypatch.setattr(*where, panicking)
    assert isinstance(frontend.end(), TaskFailedError)
