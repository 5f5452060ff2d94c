"""The worker process: connects to the scheduler, says what it is, then runs stages until told to stop.

The loop blocks in the kernel, never spins (but for the last 100 us before a simulated stage ends). Heartbeats go out
between stages, at most every half second: while one stage runs there is nothing new to say, and health is judged by
progress. Knows nothing of what stages mean.
"""

import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import zmq

from depthbatch.common import fault_points
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import FAULT, USER_ERROR, DecodeError, DepthbatchError
from depthbatch.common.frames import Int32Array
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import (
    WIRE_VERSION,
    EngineInfo,
    Fatal,
    Loading,
    PrepareGrammar,
    Shutdown,
    StageBatch,
    WorkerCommand,
    WorkerHeartbeat,
    WorkerReady,
)
from depthbatch.common.transport import WORKER_ENDPOINT, Dealer, Received, endpoint
from depthbatch.worker.runner.stage_input import StageError
from depthbatch.worker.runner.stage_io import LaunchedStage, StageRunner

HEARTBEAT_S = 0.5
LAST_WORDS_MS = 8_000
LOADING_S = 0.2
SPIN_S = 100e-6  # the kernel may wake us this late; the rest of a wait is spun
log = get_logger("worker")


class WorkerLink(Dealer):
    """The socket to the scheduler. Bytes that are no command are the scheduler's bug, and end the worker."""

    def on_decode_error(self, peer: bytes, error: DecodeError) -> None:
        raise error

    def wait(self, until_s: float, completions: int | None, others: Sequence[int] = ()) -> bool:
        """Blocks until a command is there (True), or the clock says ``until_s``, a stage has finished or one of ``others``
        is readable (False)."""
        descriptors: list[Any] = [self.socket, *others] if completions is None else [self.socket, completions, *others]
        while True:
            # The descriptor only signals changes, so the state is asked for before every sleep.
            if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return True
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            if left_s > SPIN_S:
                readable, _, _ = select.select(descriptors, [], [], left_s - SPIN_S)
                if completions is not None and completions in readable:
                    os.eventfd_read(completions)
                    return False
                if others and not set(others).isdisjoint(readable):
                    return False


class IdleClock:
    """Where the device's time goes, in seconds on the worker's clock: busy, waiting for the scheduler, nothing to do.

    The wait before a stage is booked when the stage arrives, by what its header says: after_no_work means that nothing
    was runnable, anything else that work existed and the device waited for it.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.busy_s = 0.0
        self.idle_scheduler_s = 0.0
        self.idle_no_work_s = 0.0
        self._last_end_s: float | None = None  # before the first stage nothing is waited for

    def book(self, start_s: float, end_s: float, after_no_work: bool) -> None:
        """Counts a finished stage and the gap between it and the stage before."""
        if self._last_end_s is not None:
            gap_s = max(0.0, start_s - self._last_end_s)
            if after_no_work:
                self.idle_no_work_s += gap_s
            else:
                self.idle_scheduler_s += gap_s
        self._last_end_s = end_s
        self.busy_s += end_s - start_s
        self.steps += 1


class WorkerLoop:
    """Receive, launch, read, send. Stages run in the order they arrive, results leave in that order."""

    def __init__(self, link: WorkerLink, runner: StageRunner) -> None:
        self._link = link
        self._runner = runner
        self._in_flight: deque[LaunchedStage] = deque()
        self._clock = IdleClock()
        self._next_heartbeat_s = 0.0

    def run(self) -> None:
        """Until a Shutdown arrives; what is in flight then is still answered."""
        while True:
            self._send_finished()
            self._heartbeat()
            if not self._link.wait(self._wake_s(), self._runner.completions, self._send_prepared()):
                continue
            received = self._link.receive()
            if received is None:
                continue
            if isinstance(received.message, Shutdown):
                break
            if isinstance(received.message, PrepareGrammar):
                self._prepare(received.message)
            else:
                self._launch(received)
        while self._in_flight:
            self._send_oldest()

    def _wake_s(self) -> float:
        """When there is something to do even if nothing arrives."""
        if self._in_flight:
            return min(self._in_flight[0].ready_s, self._next_heartbeat_s)
        return self._next_heartbeat_s

    def _launch(self, received: Received) -> None:
        header = received.message
        assert isinstance(header, StageBatch)
        frame, slot_params = _frames(header, received.frames)
        fault_points.reach("worker.stage", (header, frame))
        self._in_flight.append(self._runner.launch(header, frame, slot_params))

    def _prepare(self, command: PrepareGrammar) -> None:
        grammars = self._runner.grammars
        if grammars is None:
            raise StageError(f"request {command.request_id}: this worker has no grammars")
        grammars.prepare(command.request_id, command.grammar)

    def _send_prepared(self) -> list[int]:
        """Says which grammars are ready; what gets readable when others are."""
        grammars = self._runner.grammars
        if grammars is None:
            return []
        for prepared in grammars.take_prepared():
            self._link.send(prepared)
        return grammars.descriptors()

    def _send_finished(self) -> None:
        while self._in_flight and self._runner.finished(self._in_flight[0]):
            self._send_oldest()

    def _send_oldest(self) -> None:
        launched = self._in_flight.popleft()
        result = self._runner.read(launched)
        fault_points.reach("worker.result", result)
        self._link.send(result)
        self._clock.book(result.start_s, result.end_s, launched.header.after_no_work)

    def _heartbeat(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = now_s + HEARTBEAT_S
        clock = self._clock
        self._link.send(
            WorkerHeartbeat(clock.steps, clock.busy_s, clock.idle_scheduler_s, clock.idle_no_work_s),
        )


def _frames(header: StageBatch, frames: list[bytes]) -> tuple[Int32Array, Int32Array | None]:
    """The stage's frame and its slot parameters, as views of the received bytes."""
    expected = 2 if header.n_slot_params else 1
    if len(frames) != expected or any(len(frame) % 4 for frame in frames):
        sizes = [len(frame) for frame in frames]
        raise StageError(f"stage {header.step_id}: {expected} int32 frames expected, got frames of {sizes} bytes")
    arrays = [np.frombuffer(frame, np.int32) for frame in frames]
    return arrays[0], arrays[1] if header.n_slot_params else None


def build(config: EngineConfig, progress: Callable[[int, int], None]) -> tuple[StageRunner, EngineInfo]:
    """The device the configuration asks for; ``progress`` is told of bytes of weights. torch is imported only where it is needed."""
    from depthbatch.worker import simulated

    fault_points.reach("worker.load")
    if config.device.startswith(simulated.PREFIX):
        profile = simulated.find_profile(config.device.removeprefix(simulated.PREFIX))
        info = simulated.simulated_info(config, profile)
        simulated.sharpen_timers()
        runner = simulated.SimulatedRunner(profile, info, config.max_num_seqs, config.draft_acceptance)
        return runner, info
    processes = None
    if config.tensor_parallel_size > 1:  # before torch is imported here, so that all ranks import it at the same time
        from depthbatch.worker.rank_processes import RankProcesses

        processes = RankProcesses(config)
    from depthbatch.worker.build import build_runner

    return build_runner(config, progress, processes)


class LoadingTeller:
    """Tells the scheduler how far loading is: at its end, and before at most every LOADING_S."""

    def __init__(self, link: Dealer) -> None:
        self._link = link
        self._next_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or done == total:
            self._next_s = now_s + LOADING_S
            self._link.send(Loading(done, total))


def run_worker(run_dir: str, config_json: str) -> int:
    """Builds, connects, runs; the exit status: 0 stopped, 1 a bug or a broken machine, 2 the user's mistake."""
    stop_on_signals()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = WorkerLink(context, endpoint(run_dir, WORKER_ENDPOINT), WorkerCommand)
    try:
        runner, info = build(EngineConfig.from_json(config_json), LoadingTeller(link))
        link.send(WorkerReady(os.getpid(), info, WIRE_VERSION))
        log.info("ready: %s on %s", info.model, info.device)
        WorkerLoop(link, runner).run()
        return 0
    except DepthbatchError as error:
        return _fail(link, str(error), error.exit_code)
    except Exception as error:  # whatever it is, the scheduler must hear of it
        log.exception("worker failed")
        return _fail(link, f"{type(error).__name__}: {error}", FAULT)
    finally:
        link.close()
        context.term()


def _fail(link: WorkerLink, message: str, exit_code: int) -> int:
    link.send(Fatal("worker", message, user_error=exit_code == USER_ERROR))
    if exit_code != USER_ERROR:
        log.error("%s", message)
    else:  # the frontend tells it, once; nobody starts another: the scheduler, which may not run yet, has to hear of this one
        link.close(LAST_WORDS_MS)
    return exit_code


def stop_on_signals() -> None:
    """SIGTERM and SIGINT end the process cleanly, wherever it is."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
