"""The scheduler process over real ipc sockets: a scripted frontend on one side, a worker thread on the other."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import Stage
from depthbatch.common.gates import Gate
from depthbatch.common.messages import (
    Abort,
    EngineReady,
    Fatal,
    GetStats,
    Rejected,
    RequestParams,
    SchedulerHeartbeat,
    SchedulerStats,
    Shutdown,
    StageResult,
    Submit,
    WorkerCommand,
)
from depthbatch.common.transport import Dealer, endpoint
from depthbatch.scheduler.config import SchedulerConfig
from fakes.paged_model import plain_decode
from fakes.scheduler_process import OPTIONS, WAIT_S, Engine, FakeWorker, FrontendProbe, engine_info


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because a UNIX socket's path must fit into 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="dbs") as path:
        yield Path(path)


@pytest.fixture
def engine(run_dir: Path) -> Iterator[Engine]:
    engine = Engine(run_dir)
    yield engine
    engine.stop()


def submit(request_id: int, tokens: int = 12, **params: object) -> Submit:
    prompt = [(7 * request_id + i) % 40 for i in range(3 + request_id % 9)]
    fields = {"max_tokens": tokens, "gate": Gate.LOOKAHEAD, "exit_threshold": 0.5, "max_loops": 4, "seed": request_id}
    return Submit(request_id, np.asarray(prompt, np.int32).tobytes(), RequestParams(**fields | params))


def expected(request: Submit) -> list[int]:
    config = SchedulerConfig.resolve(OPTIONS, engine_info())
    return plain_decode(np.frombuffer(request.prompt, np.int32).tolist(), request.params, config).tokens


def test_requests_wait_for_their_grammars(engine: Engine) -> None:
    """A request whose grammar is being compiled has no stage; one that fails is refused by its field, one that is aborted
    is forgotten, and a new worker is asked again. The others do not wait for it.

    Bug: one that was aborted meanwhile was missing among the requests that have ended."""
    worker = FakeWorker(engine.run_dir)
    frontend = engine.frontend
    frontend.until(lambda: frontend.of(EngineReady))
    for request in (
        submit(1, grammar="regex:later"),
        submit(2, grammar="regex:later"),
        submit(3, grammar="regex:bad"),
        submit(4, grammar="regex:good"),
        submit(5),
    ):
        frontend.link.send(request)
    frontend.link.send(Abort(2))
    frontend.until(lambda: len(frontend.finished()) == 2 and frontend.of(Rejected))
    assert set(frontend.finished()) == {4, 5} and worker.asked == [1, 2, 3, 4]
    (refused,) = frontend.of(Rejected)
    assert (refused.request_id, refused.reason, refused.param) == (3, "regex: nothing matches it", "regex")
    seen = len(frontend.of(SchedulerHeartbeat))
    frontend.until(lambda: len(frontend.of(SchedulerHeartbeat)) > seen + 1)
    beat = frontend.of(SchedulerHeartbeat)[-1]
    assert beat.num_waiting == 1 and beat.oldest_work_age_s > 0
    worker.stop()
    other = FakeWorker(engine.run_dir, pid=2)
    frontend.until(lambda: other.asked == [1])
    frontend.link.send(Abort(1))
    frontend.link.send(submit(6))
    frontend.until(lambda: 6 in frontend.finished())
    assert frontend.tokens(6) == expected(submit(6)) and not frontend.events(1)
    frontend.link.send(GetStats())
    frontend.until(lambda: frontend.of(SchedulerStats))
    stats = frontend.of(SchedulerStats)[-1]
    assert stats.core is not None and stats.core.finished["abort"] == 2


def test_requests_are_served_and_figures_kept(engine: Engine) -> None:
    """Hello is answered once a worker is ready; 20 requests through two core steps in flight get the tokens of the
    plain loop; a request that can never fit is refused with its numbers; the counters of names.md are there."""
    worker = FakeWorker(engine.run_dir)
    frontend = engine.frontend
    frontend.until(lambda: frontend.of(EngineReady))
    requests = [submit(i) for i in range(20)]
    for request in requests:
        frontend.link.send(request)
    frontend.link.send(msgspec.structs.replace(submit(99), prompt=bytes(4 * 64)))
    frontend.until(lambda: len(frontend.finished()) == 20 and frontend.of(Rejected))
    for request in requests:
        assert frontend.tokens(request.request_id) == expected(request)
    assert frontend.of(Rejected)[0].param == "prompt"
    seen = len(frontend.of(SchedulerHeartbeat))  # the next heartbeat is the first that is surely later than the work
    frontend.until(lambda: len(frontend.of(SchedulerHeartbeat)) > seen + 1)
    beat = frontend.of(SchedulerHeartbeat)[-1]
    assert beat.worker_steps == worker.stages
    assert (beat.worker_pid, beat.num_running, beat.num_waiting, beat.oldest_work_age_s) == (1, 0, 0, 0.0)
    frontend.link.send(GetStats())
    frontend.until(lambda: frontend.of(SchedulerStats))
    stats = frontend.of(SchedulerStats)[-1]
    core, told = stats.core, stats.worker
    assert core is not None and told is not None
    assert core.generation_tokens == 20 * 12
    assert core.finished["length"] == 20
    assert core.rejected["prompt"] == 1
    assert told.busy_s == 1.5 and told.idle_no_work_s == 0.5
    for verb in ("receive", "complete", "schedule", "dispatch", "publish"):
        assert stats.verb_seconds[verb] > 0
    for stage in Stage:
        assert core.stages[stage.label].steps > 0
        assert core.stages[stage.label].seconds > 0
    assert sum(stage.steps for stage in core.stages.values()) == worker.stages == beat.steps
    assert worker.error is None


def test_tokens_go_to_the_frontend_that_submitted(engine: Engine) -> None:
    """Two frontends share an engine: nobody hears of the other's requests, nor can abort them."""
    FakeWorker(engine.run_dir)
    first, second = engine.frontend, FrontendProbe(engine.context, engine.run_dir)
    for frontend in (first, second):
        frontend.until(lambda f=frontend: f.of(EngineReady))
    first.link.send(submit(1, tokens=40))
    second.link.send(Abort(1))
    second.link.send(submit(2, tokens=40))
    first.until(lambda: first.finished())
    second.until(lambda: second.finished())
    assert first.finished() == {1: "length"} and second.finished() == {2: "length"}
    second.link.close()


def test_abort_ends_with_one_terminal_event(engine: Engine) -> None:
    """Abort in mid-stream, twice and for an unknown id: one terminal event, and the engine serves on."""
    FakeWorker(engine.run_dir)
    frontend = engine.frontend
    frontend.until(lambda: frontend.of(EngineReady))
    for message in (submit(1, tokens=50), Abort(1), Abort(1), Abort(77), submit(2)):
        frontend.link.send(message)
    frontend.until(lambda: set(frontend.finished()) == {1, 2})
    assert frontend.finished() == {1: "abort", 2: "length"}
    assert [event.finish_reason for event in frontend.events(1)].count("abort") == 1


@pytest.mark.parametrize("die_after", [1, 2, 17, 40])
def test_a_dead_worker_loses_no_token_and_repeats_none(engine: Engine, die_after: int) -> None:
    """The worker vanishes with stages in flight; a fresh one, which knows nothing, takes its place. Every request
    ends with exactly the tokens of the plain loop: a lost one would leave a gap, a repeated one would shift all
    later ones. The fresh worker checks that each sequence is prefilled again before it decodes."""
    first = FakeWorker(engine.run_dir, pid=1, die_after=die_after)
    frontend = engine.frontend
    frontend.until(lambda: frontend.of(EngineReady))
    requests = [submit(i, tokens=20) for i in range(8)]
    for request in requests:
        frontend.link.send(request)
    first.thread.join(WAIT_S)
    assert first.stages == die_after and first.error is None
    second = FakeWorker(engine.run_dir, pid=2)
    frontend.until(lambda: len(frontend.finished()) == 8)
    assert second.error is None and second.stages > 0
    for request in requests:
        assert frontend.tokens(request.request_id) == expected(request)
    assert len(frontend.of(EngineReady)) == 2


def test_noise_on_both_sockets_is_counted_and_dropped(engine: Engine) -> None:
    """Random bytes, empty messages and results of a stranger change nothing."""
    FakeWorker(engine.run_dir)
    frontend = engine.frontend
    frontend.until(lambda: frontend.of(EngineReady))
    rng = np.random.default_rng(0)
    for name in ("scheduler", "worker"):
        noise = engine.context.socket(zmq.DEALER)
        noise.connect(endpoint(engine.run_dir, name))
        for size in range(40):
            noise.send_multipart([rng.bytes(size)])
        if name == "worker":
            stranger = Dealer(engine.context, endpoint(engine.run_dir, name), WorkerCommand)
            stranger.send(StageResult(1, 0.0, 1.0, b"\0\0\0\0"))
        noise.close(1000)
    frontend.link.send(submit(3))
    frontend.until(lambda: frontend.finished())
    assert frontend.tokens(3) == expected(submit(3))

    def counted() -> bool:
        frontend.link.send(GetStats())
        stats = frontend.of(SchedulerStats)
        return bool(stats) and stats[-1].decode_errors == 80 and stats[-1].stale_worker_results == 1

    frontend.until(counted)
    stranger.close()


def test_drain_finishes_what_runs_and_refuses_what_comes(run_dir: Path) -> None:
    """Shutdown(drain): accepted requests end with all tokens, later ones are refused, then the process ends with 0."""
    engine = Engine(run_dir)
    FakeWorker(run_dir)
    frontend = engine.frontend
    frontend.until(lambda: frontend.of(EngineReady))
    for message in (submit(1, tokens=30), Shutdown(drain=True), submit(2)):
        frontend.link.send(message)
    frontend.until(lambda: frontend.finished() and frontend.of(Rejected))
    assert frontend.tokens(1) == expected(submit(1, tokens=30)) and frontend.of(Rejected)[0].request_id == 2
    engine.stop()


def start_process(run_dir: Path, options: EngineConfig) -> subprocess.Popen:
    command = [sys.executable, "-m", "depthbatch.scheduler", "--run-dir", str(run_dir), "--config", options.to_json()]
    return subprocess.Popen([*command, "--parent-pid", str(os.getpid())], stderr=subprocess.PIPE, text=True)


def test_process_stops_on_sigterm_and_tells_the_worker(run_dir: Path) -> None:
    """The real command line: ready, serves, SIGTERM ends it with 0 and the worker hears of it."""
    process = start_process(run_dir, OPTIONS)
    context = zmq.Context()
    worker, frontend = FakeWorker(run_dir), FrontendProbe(context, run_dir)
    frontend.until(lambda: frontend.of(EngineReady))
    frontend.link.send(submit(1))
    frontend.until(lambda: frontend.finished())
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    worker.thread.join(WAIT_S)
    assert not worker.thread.is_alive() and worker.error is None
    context.destroy(0)


def test_bad_configuration_is_fatal_with_exit_code_2(run_dir: Path) -> None:
    """Options that only contradict each other once the worker is known: the frontend gets one line, user_error set."""
    process = start_process(run_dir, EngineConfig(max_num_seqs=64))
    context = zmq.Context()
    frontend = FrontendProbe(context, run_dir)
    frontend.until(lambda: frontend.of(SchedulerHeartbeat))
    worker = FakeWorker(run_dir)  # its largest bucket is 4
    frontend.until(lambda: frontend.of(Fatal))
    fatal = frontend.of(Fatal)[0]
    assert fatal.user_error and "max-num-seqs 64" in fatal.message
    assert process.wait(WAIT_S) == 2
    worker.stop()
    context.destroy(0)


@pytest.fixture
def taken() -> Iterator[str]:
    """An endpoint at which somebody else listens."""
    with socket.create_server(("", 0)) as listener:
        yield f"tcp://*:{listener.getsockname()[1]}"


def telling_routers_at(endpoint: str, run_dir: Path) -> EngineConfig:
    """Options with cache events, which are repeated at the endpoint."""
    config = {"enable_kv_cache_events": True, "endpoint": f"ipc://{run_dir}/kv", "replay_endpoint": endpoint}
    return msgspec.structs.replace(OPTIONS, prefix_caching="on", kv_events_config=json.dumps(config))


def test_an_endpoint_that_is_taken_is_told_to_the_first_frontend(run_dir: Path, taken: str) -> None:
    """Bug: what failed before any frontend was there was told to none, so that all a user of a supervised engine saw, ten
    seconds later, was that the scheduler had died. It waits for a hello, and the one line names option and endpoint."""
    process = start_process(run_dir, telling_routers_at(taken, run_dir))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    context = zmq.Context()
    frontend = FrontendProbe(context, run_dir)
    frontend.until(lambda: frontend.of(Fatal))
    [fatal] = frontend.of(Fatal)
    assert fatal.user_error and f"kv_events_config: cannot bind {taken}: " in fatal.message
    assert process.wait(WAIT_S) == 2 and "ERROR" not in process.stderr.read()
    context.destroy(0)


def test_a_scheduler_that_waits_to_tell_its_failure_can_be_stopped(run_dir: Path, taken: str) -> None:
    """SIGTERM ends it at once and is no failure of its own."""
    process = start_process(run_dir, telling_routers_at(taken, run_dir))
    assert "waits for a worker" in process.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0 and process.stderr.read() == ""


def test_garbage_config_is_exit_code_2(run_dir: Path) -> None:
    """What is not an EngineConfig ends at once, with one line that says so."""
    command = [sys.executable, "-m", "depthbatch.scheduler", "--run-dir", str(run_dir), "--config"]
    done = subprocess.run([*command, json.dumps({"nonsense": 1})], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2 and "nonsense" in done.stderr and "Traceback" not in done.stderr


def test_full_disk_ends_the_trace_only(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: a disk that fills up took the scheduler down with each stage it wrote. Every write to /dev/full fails as one
    to a full disk does; the tokens come all the same, and one warning names the file."""
    engine = Engine(run_dir, msgspec.structs.replace(OPTIONS, stage_trace="/dev/full"))
    worker = FakeWorker(run_dir)
    engine.frontend.until(lambda: engine.frontend.of(EngineReady))
    engine.frontend.link.send(submit(1))
    engine.frontend.until(engine.frontend.finished)
    assert engine.frontend.tokens(1) == expected(submit(1))
    engine.stop()
    worker.thread.join(WAIT_S)
    assert worker.stages > 1
    assert [record.getMessage() for record in caplog.records if "stage-trace" in record.getMessage()] == [
        "stage-trace /dev/full ends here: No space left on device"
    ]


def test_frontend_of_another_version_is_told_and_others_are_not(engine: Engine) -> None:
    """Bug: after an upgrade below a running engine, a submit that the new scheduler could not decode was dropped and its
    client waited for ever. The greeting tells; the frontend that fits is served on."""
    FakeWorker(engine.run_dir)
    engine.frontend.until(lambda: engine.frontend.of(EngineReady))
    other = FrontendProbe(engine.context, engine.run_dir, "another")
    other.until(lambda: other.of(Fatal))
    assert other.of(Fatal)[0].other_version and "different versions" in other.of(Fatal)[0].message
    assert not other.of(EngineReady)
    other.link.close()
    engine.frontend.link.send(submit(1))
    engine.frontend.until(lambda: engine.frontend.finished())
    assert not engine.frontend.of(Fatal)


def test_worker_of_another_version_ends_the_scheduler(run_dir: Path) -> None:
    """Likewise between scheduler and worker: every frontend hears why, then both are started again."""
    process = start_process(run_dir, OPTIONS)
    context = zmq.Context()
    frontend = FrontendProbe(context, run_dir)
    frontend.until(lambda: frontend.of(SchedulerHeartbeat))
    worker = FakeWorker(run_dir, wire_version="another")
    frontend.until(lambda: frontend.of(Fatal))
    assert "scheduler and worker are of different versions" in frontend.of(Fatal)[0].message
    assert process.wait(WAIT_S) == 1
    worker.stop()
    context.destroy(0)


def test_an_id_that_waits_for_its_grammar_is_taken(engine: Engine) -> None:
    """Bug: a request with the id of one whose grammar was being compiled took its place, and the first one's frontend, which may
    be another, waited for ever."""
    worker = FakeWorker(engine.run_dir)
    first, second = engine.frontend, FrontendProbe(engine.context, engine.run_dir)
    first.until(lambda: first.of(EngineReady))
    first.link.send(submit(1, grammar="regex:later"))
    first.until(lambda: worker.asked == [1])
    for grammar in ("", "regex:good"):
        second.link.send(submit(1, grammar=grammar))
    second.until(lambda: len(second.of(Rejected)) == 2)
    assert {(each.reason, each.param) for each in second.of(Rejected)} == {("request id 1 is in use", "request_id")}
    worker.stop()
    FakeWorker(engine.run_dir, pid=2)  # is asked for the first one's grammar, and never for another's
    first.link.send(Abort(1))
    second.link.send(submit(2))
    second.until(lambda: 2 in second.finished())
    assert worker.asked == [1] and not second.events(1)
    second.link.close()
