"""The scheduler process: a loop of five verbs around the pure core. Knows sockets and the clock, decides nothing.

Blocks in poll, never spins. Tokens go to the frontend that submitted the request; a frontend that has gone takes its
requests with it; a worker that has gone leaves its requests waiting for the next one.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import numpy as np
import zmq

from depthbatch.common import fault_points
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import FAULT, USER_ERROR, ConfigError, DepthbatchError
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import (
    WIRE_VERSION,
    Abort,
    EngineReady,
    Fatal,
    FinishReason,
    FrontendMessage,
    GetStats,
    GrammarPrepared,
    Hello,
    Loading,
    Rejected,
    SchedulerHeartbeat,
    SchedulerStats,
    Shutdown,
    StageResult,
    Submit,
    SubmitAll,
    TokenEvent,
    WorkerHeartbeat,
    WorkerMessage,
    WorkerReady,
)
from depthbatch.common.os_process import tune_garbage_collection
from depthbatch.common.transport import SCHEDULER_ENDPOINT, WORKER_ENDPOINT, Received, Router, endpoint
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.kv_events import KvEventPublisher
from depthbatch.scheduler.peers import Frontends, WorkerPeer
from depthbatch.scheduler.stage_batch import ScheduledStage
from depthbatch.scheduler.stage_trace import StageTrace

HEARTBEAT_S = 0.5
FIRST_HELLO_S = 30.0  # a frontend may still be reading its modules
STAGES_REMEMBERED = 4096
VERBS = ("receive", "complete", "schedule", "dispatch", "publish")

log = get_logger("scheduler")


class Inbox(NamedTuple):
    """What one wait has brought, in order of arrival per link."""

    from_frontends: list[Received]
    from_workers: list[Received]


class Stopped(Exception):
    """Asked to stop; ``status`` is the exit code."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Held(NamedTuple):
    """A request whose grammar the worker prepares; the core knows nothing of it yet."""

    peer: bytes
    submit: Submit
    since_s: float


class SchedulerProcess:
    """Owns both sockets and the core. Run directory and options are given; the core exists once a worker is ready."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: str, options: EngineConfig) -> None:
        self._context, self._options = context, options
        self.frontends = Frontends(Router(context, endpoint(run_dir, SCHEDULER_ENDPOINT), FrontendMessage))
        self.worker = WorkerPeer(Router(context, endpoint(run_dir, WORKER_ENDPOINT), WorkerMessage))
        self.core: Scheduler | None = None
        self._trace: StageTrace | None = None
        self._kv_events: KvEventPublisher | None = None
        self._poller = zmq.Poller()
        self._poller.register(self.frontends.link.socket, zmq.POLLIN)
        self._poller.register(self.worker.link.socket, zmq.POLLIN)
        self._verb_seconds = dict.fromkeys(VERBS, 0.0)
        self._stage_us: deque[float] = deque(maxlen=STAGES_REMEMBERED)  # complete, schedule and dispatch, by stage
        self._spent_s = 0.0  # in those verbs, up to the last stage
        self._next_heartbeat_s = 0.0
        self._last_progress_s = time.monotonic()
        self._draining = False
        self._held: dict[int, Held] = {}  # by request id

    # --- the loop

    def run(self) -> int:
        """Until asked to stop; returns the exit status. Raises ConfigError where trace or events cannot be written."""
        try:
            self._open()
            while True:
                inbox = self.receive()
                events = self.complete(inbox)
                for stage in self.schedule():
                    self.dispatch(stage)
                self.publish(events)
        except Stopped as stop:
            return stop.status

    def _open(self) -> None:
        """What the user has named, once there are sockets over which a frontend hears if it cannot be had."""
        options = self._options
        if options.stage_trace is not None:
            self._trace = StageTrace(options.stage_trace)
        if options.kv_events is not None:
            self._kv_events = KvEventPublisher(self._context, options.kv_events)
            if self._kv_events.replays is not None:
                self._poller.register(self._kv_events.replays, zmq.POLLIN)

    def receive(self) -> Inbox:
        """Blocks until a message or the next heartbeat is due; then takes all there is."""
        wait_s = self._next_heartbeat_s - time.monotonic()
        self._poller.poll(max(0, int(1000 * wait_s) + 1))
        with self._timed("receive"):
            return Inbox(_take_all(self.frontends.link), _take_all(self.worker.link))

    def complete(self, inbox: Inbox) -> list[TokenEvent]:
        """Results first: they are what the worker waits for."""
        with self._timed("complete"):
            events: list[TokenEvent] = []
            for received in inbox.from_workers:
                events += self._from_worker(received)
            for received in inbox.from_frontends:
                self._from_frontend(received)
            return events

    def schedule(self) -> Iterator[ScheduledStage]:
        """Stages as far ahead as the core allows; each is sent before the next is assembled."""
        while self.core is not None and self.worker.present:
            exited = self.core.view.q_c
            with self._timed("schedule"):
                stage = self.core.next_stage(time.monotonic())
            if stage is None:
                return
            if self._trace is not None:
                self._trace.dispatched(stage, self.core, exited)
            yield stage

    def dispatch(self, stage: ScheduledStage) -> None:
        """Hands a stage to the worker. If that has gone, its successor's WorkerReady brings the work back."""
        with self._timed("dispatch"):
            fault_points.reach("scheduler.dispatch", stage)
            self.worker.send(stage)
        spent_s = sum(self._verb_seconds[verb] for verb in ("complete", "schedule", "dispatch"))
        self._stage_us.append(1e6 * (spent_s - self._spent_s))
        self._spent_s = spent_s

    def publish(self, events: list[TokenEvent]) -> None:
        """Tokens to their frontends, and a heartbeat when one is due."""
        with self._timed("publish"):
            if self.core is not None:
                events += self.core.drain_events()
                if events:
                    fault_points.reach("scheduler.publish", events)
                for request_id in self.frontends.publish(events):
                    self.core.abort(request_id)
                if self._kv_events is not None:
                    self._kv_events.publish(self.core.drain_kv_events())
            if self._kv_events is not None:
                self._kv_events.answer_replays()
            now = time.monotonic()
            if now >= self._next_heartbeat_s:
                self._next_heartbeat_s = now + HEARTBEAT_S
                self.frontends.broadcast(self._heartbeat(now))
        if self._draining and not self._held and (self.core is None or not self.core.num_unfinished):
            raise Stopped(0)

    def close(self) -> None:
        """Tells the worker to stop and closes sockets and trace."""
        if self._trace is not None:
            self._trace.close()
        if self._kv_events is not None:
            self._kv_events.close()
        self.worker.send_shutdown()
        self.worker.link.close()
        self.frontends.link.close()

    def fail(self, message: str, exit_code: int) -> int:
        """Tells every frontend why the engine cannot go on; returns the exit status. A user's mistake is for a frontend to
        tell: where there is none yet, the first one is waited for."""
        if exit_code != USER_ERROR or not self._met_a_frontend():
            log.error("%s", message)
        self.frontends.broadcast(Fatal("scheduler", message, user_error=exit_code == USER_ERROR))
        return exit_code

    def _met_a_frontend(self) -> bool:
        """Waits for the first hello, for FIRST_HELLO_S at most."""
        link, until_s = self.frontends.link, time.monotonic() + FIRST_HELLO_S
        while not self.frontends.present and (wait_s := until_s - time.monotonic()) > 0:
            link.socket.poll(int(1000 * wait_s) + 1)
            for received in _take_all(link):
                self._from_frontend(received)
        return self.frontends.present

    # --- messages

    def _from_worker(self, received: Received) -> list[TokenEvent]:
        match received.message:
            case StageResult() as result if received.peer == self.worker.peer and self.core is not None:
                self._last_progress_s = time.monotonic()
                if self._trace is not None:
                    self._trace.finished(result)
                return self.core.complete(result, self._last_progress_s)
            case StageResult():
                self.worker.stale_results += 1
            case GrammarPrepared(request_id, failure) if received.peer == self.worker.peer:
                self._grammar_prepared(request_id, failure)
            case WorkerHeartbeat() as heartbeat:
                self.worker.take_heartbeat(received.peer, heartbeat)
            case WorkerReady() as ready:
                self._take_worker(received.peer, ready)
            case Loading() as loading:
                self.frontends.broadcast(loading)
            case Fatal() as fatal:
                if not fatal.user_error:  # the frontend tells those
                    log.error("worker: %s", fatal.message)
                self.worker.lose()
                self.frontends.worker_failure = fatal
                self.frontends.broadcast(fatal)
        return []

    def _take_worker(self, peer: bytes, ready: WorkerReady) -> None:
        """A first worker makes the core; a later one gets all unfinished requests again, prompt and tokens. Raises
        DepthbatchError when it cannot be this engine's."""
        if ready.wire_version != WIRE_VERSION:
            raise DepthbatchError("scheduler and worker are of different versions; both have to be started again")
        config = SchedulerConfig.resolve(self._options, ready.info)
        self.worker.take(peer, ready.pid)
        self._last_progress_s = time.monotonic()
        if self.core is None:
            try:
                self.core = Scheduler(config)
            except MemoryError:
                tables = f"{config.usable_blocks} KV blocks and max_num_seqs {self._options.max_num_seqs}"
                raise ConfigError(f"the scheduler has no memory for its tables of {tables}") from None
            tune_garbage_collection()
        elif config != self.core.config:
            raise DepthbatchError("the restarted worker is not the same engine (KV blocks or buckets differ)")
        else:
            self.core.recover()
        for held in self._held.values():
            self.worker.prepare(held.submit)
        log.info("worker %d is ready: %d KV blocks", ready.pid, config.usable_blocks)
        self.frontends.worker_failure = None
        self.frontends.ready = EngineReady(ready.info)
        self.frontends.broadcast(self.frontends.ready)

    def _from_frontend(self, received: Received) -> None:
        match received.message:
            case Submit() as submit:
                self._submit(received.peer, submit)
            case SubmitAll(requests):
                for submit in requests:
                    self._submit(received.peer, submit)
            case Abort(request_id):
                if request_id in self._held and self._held[request_id].peer == received.peer:
                    del self._held[request_id]
                    if self.core is not None:
                        self.core.counters.finished(FinishReason.ABORT)
                if self.core is not None and self.frontends.owns(received.peer, request_id):
                    self.core.abort(request_id)
            case Hello(wire_version):
                if wire_version == WIRE_VERSION:
                    self.frontends.join(received.peer)
                else:
                    message = "scheduler and frontend are of different versions; the frontend has to be started again"
                    self.frontends.send(received.peer, Fatal("scheduler", message, other_version=True))
            case GetStats():
                self.frontends.send(received.peer, self.stats())
            case Shutdown(drain):
                if not drain:
                    raise Stopped(0)
                self._draining = True

    def _submit(self, peer: bytes, submit: Submit) -> None:
        if self.core is None or self._draining:
            reason = "the engine is stopping" if self._draining else "no worker is ready"
            self.frontends.send(peer, Rejected(submit.request_id, reason))
        elif submit.request_id in self._held:
            self.frontends.send(
                peer, Rejected(submit.request_id, f"request id {submit.request_id} is in use", "request_id")
            )
        elif submit.params.grammar:
            self._held[submit.request_id] = Held(peer, submit, time.monotonic())
            self.worker.prepare(submit)
        else:
            self._admit(self.core, peer, submit)

    def _admit(self, core: Scheduler, peer: bytes, submit: Submit) -> None:
        if not core.num_in_flight and not core.num_unfinished:
            self._last_progress_s = time.monotonic()
        refusal = core.submit(submit, time.monotonic())
        if refusal is None:
            self.frontends.assign(peer, submit.request_id)
        else:
            self.frontends.send(peer, refusal)

    def _grammar_prepared(self, request_id: int, failure: str) -> None:
        """The request is admitted, or refused; one that was aborted meanwhile is neither."""
        held = self._held.pop(request_id, None)
        if held is None or self.core is None:
            return
        if failure:
            kind = held.submit.params.grammar.partition(":")[0]
            self.frontends.send(held.peer, Rejected(request_id, f"{kind}: {failure}", kind))
        else:
            self._admit(self.core, held.peer, held.submit)

    # --- figures

    def stats(self) -> SchedulerStats:
        """Of the core, this process and the worker."""
        quantiles = (50, 99) if self._stage_us else ()
        return SchedulerStats(
            core=None if self.core is None else self.core.stats(),
            worker=self.worker.stats(),
            verb_seconds=dict(self._verb_seconds),
            us_per_stage={f"0.{q}": float(np.percentile(self._stage_us, q)) for q in quantiles},
            stale_worker_results=self.worker.stale_results,
            decode_errors=self.frontends.link.decode_errors + self.worker.link.decode_errors,
        )

    def _heartbeat(self, now: float) -> SchedulerHeartbeat:
        steps = running = waiting = 0
        if self.core is not None:
            steps, running, waiting = (
                self.core.counters.steps,
                self.core.num_running,
                self.core.num_waiting + len(self._held),
            )
        age_s, worker = self._oldest_work_age_s(now), self.worker
        return SchedulerHeartbeat(steps, age_s, worker.pid, worker.steps, running, waiting)

    def _oldest_work_age_s(self, now: float) -> float:
        if self.core is None or not self.core.num_unfinished:
            return now - min((held.since_s for held in self._held.values()), default=now)
        dispatched_s = self.core.oldest_dispatch_s()
        return now - (self._last_progress_s if dispatched_s is None else max(dispatched_s, self._last_progress_s))

    @contextmanager
    def _timed(self, verb: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._verb_seconds[verb] += time.perf_counter() - start_s


def _take_all(link: Router) -> list[Received]:
    out: list[Received] = []
    while (received := link.receive()) is not None:
        out.append(received)
    return out


def run_scheduler(run_dir: str, config_json: str) -> int:
    """Binds, runs, stops; the exit status: 0 stopped, 1 a bug, 2 the user's mistake."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    process: SchedulerProcess | None = None
    try:
        process = SchedulerProcess(context, run_dir, EngineConfig.from_json(config_json))
        log.info("scheduler %d waits for a worker", os.getpid())
        return _run(process)
    except Stopped as stop:
        return stop.status
    except DepthbatchError as error:  # no socket to tell it over
        log.error("%s", error)
        return error.exit_code
    except Exception:
        log.exception("scheduler failed")
        return FAULT
    finally:
        if process is not None:
            process.close()
        context.term()


def _run(process: SchedulerProcess) -> int:
    """Whatever ends it, the frontends must hear of it."""
    try:
        return process.run()
    except DepthbatchError as error:
        return process.fail(str(error), error.exit_code)
    except Exception as error:
        log.exception("scheduler failed")
        return process.fail(f"{type(error).__name__}: {error}", FAULT)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped(0)
