"""``depthbatch serve`` as a whole: supervisord, three processes, kills, drains. One server for most tests, on the
simulated device, whose tokens are a function of (seed, position): what a stream must continue with is known."""

import asyncio
import configparser
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from depthbatch.deploy.supervise import supervision
from depthbatch.deploy.supervise.run_files import read_faults
from depthbatch.deploy.supervise.supervisord_client import EXPECTED_CODES, SupervisordClient
from depthbatch.frontend.client import Client
from fakes.many_streams import many
from fakes.serve_process import DEVICE, ServeProcess, is_alive, token_ids, wait_until
from fakes.soak import soak

TOKENS = 60
ATTACKS: dict[str, tuple[dict[str, Any], Callable[[], Any] | None, dict[str, str]]] = {  # fields, whole body, headers
    "huge n": ({"n": 10**9}, None, {}),
    "1 MiB header": ({}, None, {"x": "a" * (1 << 20)}),
    "1 GiB body": ({}, lambda: iter([b" " * (1 << 20)] * 1024), {"content-type": "application/json"}),
    "prompt_embeds": ({"prompt_embeds": "A" * (8 << 20)}, None, {}),
    "client template": ({"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, None, {}),
    "guided regex bomb": ({"guided_regex": "(a+)+$" * 1000}, None, {}),
    "regex bomb": ({"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}}, None, {}),
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "run"


@pytest.fixture(scope="module")
def server(run_dir: Path) -> Iterator[ServeProcess]:
    with ServeProcess("--device", DEVICE, "--stall-s", "4", run_dir=run_dir) as server:
        yield server
    assert not [path for path in run_dir.iterdir() if path.name != ".lock"]


@pytest.fixture(scope="module")
def expected(server: ServeProcess) -> list[int]:
    """The tokens of an undisturbed stream."""
    with server.stream(max_tokens=TOKENS) as events:
        tokens = token_ids(list(events))
    assert len(tokens) == TOKENS
    return tokens


def test_a_run_dir_fixes_the_native_address(server: ServeProcess, run_dir: Path) -> None:
    """Bug: a native client had to read the address from the server's output, a new one with every start."""
    client = Client(f"ipc://{run_dir}/api")
    assert client.ask("health")["status"] == "ok"
    client.close()


def test_three_processes_are_told_apart(server: ServeProcess) -> None:
    """/health names three living processes, children of one supervisord. Row "pickle over ZMQ, type names from the
    wire, 0.0.0.0 binds": of all their sockets one listens on TCP, on the loopback address."""
    pids = server.pids()
    assert list(pids) == ["frontend", "scheduler", "worker"] and len(set(pids.values())) == 3
    assert set(pids.values()) <= set(server.all_pids()) and all(map(is_alive, pids.values()))
    assert _tcp_listeners(server.all_pids()) == [f"0100007F:{server.port:04X}"]


@pytest.mark.parametrize("name", ["worker", "scheduler"])
def test_kill_9_in_mid_stream_loses_nothing(server: ServeProcess, expected: list[int], name: str) -> None:
    """Rows "scheduler or worker dead, server still says healthy" and "start, stop, restart, kill -9": supervisord
    starts the process again, the stream goes on without a token lost or sent twice, and the restart is counted."""
    before = server.pids()
    restarts = server.health()["processes"][name]["restarts"]
    with server.stream(max_tokens=TOKENS) as events:
        seen = [next(events) for _ in range(5)]
        os.kill(before[name], signal.SIGKILL)
        wait_until(lambda: server.health().get("status") != "ok", "health tells of the death", 2.0)
        seen += events
    assert token_ids(seen) == expected
    assert seen[-1]["choices"][0]["finish_reason"] == "length"
    server.wait_ready()
    after = server.pids()
    assert after[name] != before[name] and after["frontend"] == before["frontend"]
    assert server.health()["processes"][name]["restarts"] == restarts + 1


@pytest.mark.parametrize("name", ["worker", "scheduler"])
def test_a_hang_is_told(server: ServeProcess, expected: list[int], name: str) -> None:
    """Row "scheduler or worker dead, server still says healthy; or healthy by a static page for 85 minutes": a process
    that hangs (stopped by a signal, so that it is alive for every other purpose) is "stalled" once work has waited for
    --stall-s, or nothing was heard of it; woken, all goes on. The step counter says what it has done since."""
    pid, steps = server.pids()[name], server.health()["processes"][name]["steps"]
    with server.stream(max_tokens=TOKENS) as events:
        seen = [next(events)]
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: server.health()["status"] == "stalled", "the hang is told", 15.0)
            assert httpx.get(server.url + "/health").status_code == 503
            assert server.health()["processes"][name]["state"] == "stalled"
        finally:
            os.kill(pid, signal.SIGCONT)
        seen += events
    assert token_ids(seen) == expected
    server.wait_ready()
    wait_until(lambda: server.health()["processes"][name]["steps"] >= steps + TOKENS, "the steps are counted", 5.0)


def test_a_crash_loop_is_waited_out(server: ServeProcess, expected: list[int]) -> None:
    """Row "a crash loop ends the server for good, or starts processes as fast as it can". Bug: after the sixth restart within a minute the server ended. Here a worker is killed as soon as it is there, until
    one is told to wait: /ready and /health are 503 meanwhile, no program has ended, and the stream then goes on."""
    path = Path(server.supervisor_socket().removeprefix("unix://")).with_name("worker.pid")
    before = server.pids()
    with server.stream(max_tokens=TOKENS) as events:
        seen = [next(events)]
        while not (recent := path.with_name("worker.recent")).exists() or not json.loads(recent.read_text())["wait_s"]:
            pid = int(path.read_text())
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: int(path.read_text()) != pid, "supervisord starts another")
        answers = [httpx.get(server.url + route) for route in ("/ready", "/health")]
        assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(503, "starting")] * 2
        seen += events
    assert token_ids(seen) == expected and "worker: dies again and again: waits 1 s before it starts" in server.log
    server.wait_ready()
    assert {name: pid for name, pid in server.pids().items() if name != "worker"} == {
        name: pid for name, pid in before.items() if name != "worker"
    }


def test_kill_9_of_the_frontend(server: ServeProcess, expected: list[int]) -> None:
    """A new frontend on the same port, over the scheduler and worker that went on running; requests of the old one
    are ended, not mixed up with new ones."""
    before = server.pids()
    with pytest.raises(httpx.HTTPError), server.stream(max_tokens=1000) as events:
        next(events)
        os.kill(before["frontend"], signal.SIGKILL)
        list(events)
    server.wait_ready()
    after = server.pids()
    assert after["frontend"] != before["frontend"]
    assert server.health()["processes"]["frontend"]["restarts"] == 1
    assert {after[name] == before[name] for name in ("scheduler", "worker")} == {True}
    with server.stream(max_tokens=TOKENS) as events:
        assert token_ids(list(events)) == expected
    wait_until(lambda: _running(server) == 0, "the old frontend's sequences are ended")


@pytest.mark.parametrize("other", ["worker", "scheduler"])
def test_kill_9_of_the_frontend_and_another(server: ServeProcess, expected: list[int], other: str) -> None:
    """Bug: a frontend that was starting again gave up, and the server with it, when a process that had served before
    died at that moment; and took the worker that it had ended itself, as a former scheduler's, for such a death."""
    pids = server.pids()
    os.kill(pids["frontend"], signal.SIGKILL)
    path = Path(server.supervisor_socket().removeprefix("unix://")).with_name("frontend.pid")
    wait_until(lambda: int(path.read_text()) != pids["frontend"], "supervisord starts another")
    os.kill(pids[other], signal.SIGKILL)
    server.wait_ready()
    after = server.pids()
    assert after["frontend"] != pids["frontend"] and after[other] != pids[other]
    with server.stream(max_tokens=TOKENS) as events:
        assert token_ids(list(events)) == expected


@pytest.mark.parametrize("name", ["worker", "scheduler"])
@pytest.mark.parametrize("way", ["supervisorctl", "SIGTERM"])
def test_a_program_is_restarted_by_hand(server: ServeProcess, expected: list[int], name: str, way: str) -> None:
    """The shipped configuration answers supervisorctl; a restart by hand is as harmless as a fault. Bug: a program that
    had got SIGTERM, and the worker of a scheduler that had, counted as done and was not started again, which ended the
    server."""
    before = server.pids()
    command = [sys.executable, "-m", "supervisor.supervisorctl", "-s", server.supervisor_socket(), "restart", name]
    with server.stream(max_tokens=TOKENS) as events:
        seen = [next(events)]
        if way == "SIGTERM":
            os.kill(before[name], signal.SIGTERM)
        else:
            subprocess.run(command, check=True, capture_output=True, timeout=30)
        seen += events
    assert token_ids(seen) == expected
    server.wait_ready()
    after = server.pids()
    assert after[name] != before[name] and after["frontend"] == before["frontend"]
    run_dir = Path(server.supervisor_socket().removeprefix("unix://")).parent
    assert read_faults(run_dir, name) < server.health()["processes"][name]["restarts"]


def test_no_prompt_is_logged(server: ServeProcess) -> None:
    """Whatever becomes of a request: answered, streamed, refused by the edge or by the engine, cut off, aborted. The test
    of the log itself is that it is there; the rest of this file has made it long."""
    secret = "quagga and okapi"
    url, body = server.url + "/v1/completions", {"prompt": secret, "max_tokens": 3}
    ends = [{}, {"stop": secret}, {"temperature": secret}, {"prompt": secret * 5000}, {"timeout_s": 0.001}]
    ends += [{"structured_outputs": {"regex": f"({secret}"}}, {"logit_bias": {secret: 1}}]
    for changes in ends:
        httpx.post(url, json=body | changes, timeout=30)
    httpx.post(url, content=secret, headers={"content-type": "application/json"})
    httpx.post(server.url + f"/{secret}".replace(" ", "-"), json=body)
    httpx.post(
        server.url + "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": secret}], "max_tokens": 3},
        timeout=30,
    )
    with server.stream(prompt=secret, max_tokens=500) as events:
        next(events)
    assert server.log.count("worker: ready") >= 1 and "quagga" not in server.log and "okapi" not in server.log


def test_closed_socket_frees_the_slot(server: ServeProcess) -> None:
    """Row "client gone, sequence decodes to max_tokens", through all three processes."""
    with server.stream(max_tokens=5000) as events:
        next(events)
        wait_until(lambda: _running(server) == 1, "the sequence is counted")
    wait_until(lambda: _running(server) == 0, "the slot is free", 10.0)


def test_a_thousand_streams(server: ServeProcess) -> None:
    """Rows "dies near 1,000 connections; messages dropped at ZMQ's high-water mark" and "busy server judged dead,
    restarted 8 times a day": every stream gets all of its own tokens, descriptors are one a connection and come back,
    /health is 200 throughout (16 times more streams than slots). How long it takes is measured elsewhere."""
    descriptors = Path(f"/proc/{server.pids()['frontend']}/fd")
    before = len(list(descriptors.iterdir()))
    bodies = [{"prompt": [1 + i % 50], "seed": i % 50, "max_tokens": 8, "ignore_eos": True} for i in range(1000)]
    results, health = asyncio.run(many(server.port, bodies))
    assert all(result.done and result.finish_reason == "length" for result in results)
    assert all(len(result.token_ids) == 8 for result in results)
    by_seed = [{tuple(result.token_ids) for result in results[seed::50]} for seed in range(50)]
    assert all(len(outputs) == 1 for outputs in by_seed) and len(set().union(*by_seed)) == 50
    assert health and {status for status, _ in health} == {200}
    assert _metric(server, "request_queue_time_seconds_count") >= 1000
    assert _metric(server, "request_queue_time_seconds_sum") > 1  # 64 of them at a time
    wait_until(lambda: len(list(descriptors.iterdir())) <= before + 2, "descriptors come back")


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused_at_the_edge(server: ServeProcess, attack: str) -> None:
    """Row "huge `n`, 1 MiB header, 1 GiB body, prompt_embeds, client templates, regex bombs": each is a 4xx, and the
    frontend's memory grows by less than what it was sent, let alone what it was told to make of it."""
    pids = server.pids()
    before = _resident_bytes(pids["frontend"])
    body, content, headers = ATTACKS[attack]
    if content is None:
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": [1], **body}, headers=headers)
    else:
        answer = httpx.post(server.url + "/v1/completions", content=content(), headers=headers, timeout=60)
    assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"]
    assert _resident_bytes(pids["frontend"]) - before < 48 << 20
    assert server.pids() == pids and server.health()["status"] == "ok"


def test_frontend_killed_again_and_again() -> None:
    """kill -9 of the frontend, in start-up as well as in service, while /health is asked on connections of their own:
    each probe is answered, refused or reset. One that hangs would mean a socket that the kernel accepts for and nobody
    reads. Every restart is one line of the log and one of the counter. (20 kills: tests/fakes/soak.py by hand.)"""
    with ServeProcess("--device", DEVICE) as server:
        probes = soak(server, kills=3, limit_s=10.0)
        ends = {probe.end for probe in probes}
        assert ends <= {"200", "503", "refused", "reset"} and {"200", "refused"} <= ends
        assert server.log.count("frontend: started again (restart") == 3
        assert server.health()["processes"]["frontend"]["restarts"] == 3
        assert 'process_restarts_total{process="frontend"} 3.0' in httpx.get(server.url + "/metrics").text


def test_busy_port_is_told_at_once(server: ServeProcess) -> None:
    """Row "port taken: found after minutes of loading": one line, exit code 2, before any process is started."""
    with ServeProcess("--device", DEVICE, port=server.port, wait=False) as second:
        assert second.process.wait(10) == 2
        assert f"cannot listen on 127.0.0.1:{server.port}: Address already in use" in second.log
        assert len(second.log.splitlines()) == 1


def test_sigterm_drains(expected: list[int]) -> None:
    """Rows "SIGTERM cuts streams" and "supervisor stop leaves grandchildren, or the worker dies before the drain ends":
    the stream finishes, /ready and new work get 503 at once, exit code 0, nothing is left. The server is its own: one that
    has lost many processes waits longer for the next than a drain may take.

    Bugs: "at once" was supervisord's next turn, up to a second later (so it is held until the 503 is there); and a worker
    or a scheduler that was killed during a drain stayed dead, since a supervisord that stops starts nothing again."""
    with ServeProcess("--device", DEVICE) as server:
        pids = server.all_pids()
        pid_file = Path(server.supervisor_socket().removeprefix("unix://")).with_name("supervisord.pid")
        supervisord = int(pid_file.read_text())
        with server.stream(max_tokens=4 * TOKENS) as events:
            seen = [next(events)]
            os.kill(supervisord, signal.SIGSTOP)
            try:
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: httpx.get(server.url + "/ready").status_code == 503, "not ready any more", 5.0)
                refused = httpx.post(server.url + "/v1/completions", json={"prompt": [1]})
            finally:
                os.kill(supervisord, signal.SIGCONT)
            assert refused.status_code == 503 and "retry-after" in refused.headers
            for victim in ("worker", "scheduler"):
                os.kill(server.pids()[victim], signal.SIGKILL)
                for _ in range(5):
                    event = next(events, None)
                    assert event is not None, (victim, server.log[-2000:])
                    seen.append(event)
                pids = sorted({*pids, *server.all_pids()})
            seen += events
        tokens = token_ids(seen)
        assert tokens[:TOKENS] == expected and len(tokens) == 4 * TOKENS
        assert server.process.wait(20) == 0, server.log
        assert not any(map(is_alive, pids))


def test_kill_9_of_the_command_and_restart_at_once() -> None:
    """Rows "SIGKILL of the parent leaves processes holding the device" and "kill -9 and restart at once: new server
    healthy but silent": everything is gone within 5 s, and a server started at once on the same port answers all.
    That one is then stopped with two signals."""
    with ServeProcess("--device", DEVICE) as first:
        pids = first.all_pids()
        assert len(pids) == 5  # the command, supervisord and its three programs
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        with ServeProcess("--device", DEVICE, port=_wait_for_port(first, pids)) as second:
            body = {"prompt": [[i + 1] for i in range(100)], "max_tokens": 1, "n": 5}
            answer = httpx.post(second.url + "/v1/completions", json=body, timeout=60).json()
            assert len(answer["choices"]) == 500 and answer["usage"]["completion_tokens"] == 500
            _second_sigterm_aborts(second)


def _second_sigterm_aborts(server: ServeProcess) -> None:
    """The stream ends with reason abort, not after its 5000 tokens, and the exit is orderly."""
    with server.stream(max_tokens=5000) as events:
        next(events)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(server.url + "/ready").status_code == 503, "draining", 5.0)
        server.process.send_signal(signal.SIGTERM)
        assert list(events)[-1]["choices"][0]["finish_reason"] == "abort"
    assert server.process.wait(20) == 0


@pytest.mark.parametrize(
    ("name", "state", "status", "ended"),
    [
        ("frontend", "EXITED", -1, None),
        ("frontend", "EXITED", 1, None),
        ("frontend", "EXITED", 0, 0),
        ("frontend", "EXITED", 2, 2),
        ("frontend", "EXITED", 3, 3),
        ("frontend", "FATAL", 0, 1),
        ("frontend", "RUNNING", 0, None),
        ("worker", "EXITED", 0, None),
        ("scheduler", "EXITED", 2, 2),
    ],
)
def test_a_fault_is_not_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, state: str, status: int, ended: int | None
) -> None:
    """supervisord shows a killed program as EXITED until it starts it again; only an expected code means that it will
    not. (Taken for the end, it made the command leave after some kills of the frontend.)"""
    client = SupervisordClient(tmp_path)
    monkeypatch.setattr(client, "info", lambda name: {"statename": state, "exitstatus": status})
    assert client.exit_code(name) == ended
    config = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    config.read(supervision.CONFIG)
    expected = {program: config[f"program:{program}"]["exitcodes"] for program in EXPECTED_CODES}
    assert expected == {program: ",".join(map(str, codes)) for program, codes in EXPECTED_CODES.items()}


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("/nonexistent/model", (), "/nonexistent/model"),
        ("demo", ("--device", DEVICE, "--max-loops", "9"), "max_loops"),
        ("demo", ("--device", DEVICE, "--drain-s", "soon"), "--drain-s"),
    ],
)
def test_start_that_fails_is_told(model: str, options: tuple[str, ...], says: str) -> None:
    """Row "a child dies during start, parent waits for ever": exit code 2, the reason on the last line, nothing left.

    And on that line alone: worker, scheduler and frontend logged it as well."""
    with ServeProcess(*options, model=model, wait=False) as server:
        assert server.process.wait(30) == 2, server.log
        assert says in server.log.splitlines()[-1] and "Traceback" not in server.log
        assert server.log.count(server.log.splitlines()[-1].removeprefix("depthbatch: error: ")) == 1


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _tcp_listeners(pids: list[int]) -> list[str]:
    """Local addresses, as /proc/net writes them, on which any of the processes listens."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(descriptor))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1])
    return found


def _running(server: ServeProcess) -> int:
    return int(_metric(server, "num_requests_running"))


def _metric(server: ServeProcess, name: str) -> float:
    """The one series of a name."""
    for line in httpx.get(server.url + "/metrics").text.splitlines():
        if line.startswith(f"depthbatch:{name}{{"):
            return float(line.rpartition(" ")[2])
    return -1.0


def _wait_for_port(server: ServeProcess, pids: list[int]) -> int:
    wait_until(lambda: not any(map(is_alive, pids)), "all processes are gone", 5.0)
    return server.port
