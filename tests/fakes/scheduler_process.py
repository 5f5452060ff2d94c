"""The scheduler process over real ipc sockets: a scripted frontend on one side, a worker thread on the other."""

import threading
import time
from pathlib import Path

import numpy as np
import zmq

from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import Stage
from depthbatch.common.gates import Gate
from depthbatch.common.messages import (
    WIRE_VERSION,
    EngineInfo,
    GrammarPrepared,
    Hello,
    PrepareGrammar,
    SchedulerMessage,
    Shutdown,
    StageBatch,
    Tokens,
    WorkerCommand,
    WorkerHeartbeat,
    WorkerReady,
)
from depthbatch.common.transport import Dealer, endpoint
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.process import SchedulerProcess
from depthbatch.scheduler.stage_batch import ScheduledStage
from fakes.paged_worker import PagedWorker

OPTIONS = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, async_scheduling="lookahead")
WAIT_S = 20.0


def engine_info(**changes: object) -> EngineInfo:
    fields = {
        "model": "fake",
        "architecture": "fake",
        "vocab_size": 40,
        "r_max": 4,
        "r_min": 1,
        "default_gate": Gate.NONE,
        "gates": tuple(Gate),
        "default_threshold": 0.5,
        "kv_layout": "single",
        "block_size": 4,
        "num_blocks": 60,
        "kv_bytes_per_token": 1,
        "max_model_len": 64,
        "boundary_layers": 0,
        "buckets": (1, 2, 4),
        "device": "fake",
        "dtype": "int",
    }
    return EngineInfo(**fields | changes)  # type: ignore[arg-type]


class FakeWorker:
    """A PagedWorker behind a DEALER, in a thread. ``die_after``: vanishes after that many stages, last one unanswered."""

    def __init__(
        self,
        run_dir: Path,
        pid: int = 1,
        die_after: int | None = None,
        info: EngineInfo | None = None,
        wire_version: str = WIRE_VERSION,
    ) -> None:
        self.info = info or engine_info()
        self.wire_version = wire_version
        self.config = SchedulerConfig.resolve(OPTIONS, self.info)
        self.worker = PagedWorker(self.config)
        self.stages = 0
        self.asked: list[int] = []  # requests whose grammars were to be prepared
        self.error: BaseException | None = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._guard, args=(run_dir, pid, die_after), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """For a worker whose scheduler is not there to tell it."""
        self.stopping.set()
        self.thread.join(WAIT_S)

    def _guard(self, run_dir: Path, pid: int, die_after: int | None) -> None:
        context = zmq.Context()
        link = Dealer(context, endpoint(run_dir, "worker"), WorkerCommand)
        try:
            self._run(link, pid, die_after)
        except BaseException as error:  # shown by the test that joins
            self.error = error
        finally:  # a context left to the garbage collector would wait for its sockets for ever
            link.close()
            context.term()

    def _run(self, link: Dealer, pid: int, die_after: int | None) -> None:
        link.send(WorkerReady(pid, self.info, self.wire_version))
        while not self.stopping.is_set():
            link.socket.poll(50)
            received = link.receive()
            if received is None:
                continue
            if isinstance(received.message, Shutdown):
                break
            header = received.message
            if isinstance(header, PrepareGrammar):
                self.asked.append(header.request_id)
                if header.grammar != "regex:later":
                    failure = "nothing matches it" if header.grammar == "regex:bad" else ""
                    link.send(GrammarPrepared(header.request_id, failure))
                continue
            assert isinstance(header, StageBatch)
            frames = [np.frombuffer(frame, np.int32) for frame in received.frames]
            if header.stage != Stage.PREFILL:
                frames[0] = frames[0].reshape(4, header.bucket)
            params = frames[1].reshape(header.n_slot_params, -1) if header.n_slot_params else None
            if self.stages == 0:  # step ids go on after a restart, so that old answers are told from new ones
                self.worker.last_step_id = header.step_id - 1
            result = self.worker.execute(ScheduledStage(header, frames[0], params))
            self.stages += 1
            if die_after is not None and self.stages >= die_after:
                break
            link.send(result)
            link.send(WorkerHeartbeat(self.stages, 1.5, 0.25, 0.5))


class FrontendProbe:
    """A frontend that keeps all it hears."""

    def __init__(self, context: zmq.Context, run_dir: Path, wire_version: str = WIRE_VERSION) -> None:
        self.link = Dealer(context, endpoint(run_dir, "scheduler"), SchedulerMessage)
        self.heard: list[object] = []
        self.link.send(Hello(wire_version))

    def until(self, done) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < deadline, f"heard only {self.heard[-3:]}"
            if self.link.socket.poll(100):
                while (received := self.link.receive()) is not None:
                    self.heard.append(received.message)

    def of(self, kind: type) -> list:
        return [message for message in self.heard if isinstance(message, kind)]

    def tokens(self, request_id: int) -> list[int]:
        return [t for event in self.events(request_id) for t in event.token_ids]

    def events(self, request_id: int) -> list:
        return [event for tokens in self.of(Tokens) for event in tokens.events if event.request_id == request_id]

    def finished(self) -> dict[int, str]:
        return {e.request_id: e.finish_reason for t in self.of(Tokens) for e in t.events if e.finish_reason}


class Engine:
    """A SchedulerProcess in a thread, its run directory and one frontend."""

    def __init__(self, run_dir: Path, options: EngineConfig = OPTIONS) -> None:
        self.run_dir = run_dir
        self.context = zmq.Context()
        self.process = SchedulerProcess(self.context, str(run_dir), options)
        self.status: list[int] = []
        self.thread = threading.Thread(target=lambda: self.status.append(self.process.run()), daemon=True)
        self.thread.start()
        self.frontend = FrontendProbe(self.context, run_dir)

    def stop(self) -> None:
        self.frontend.link.send(Shutdown())
        self.thread.join(WAIT_S)
        self.process.close()
        self.frontend.link.close()
        self.context.destroy(0)
        assert self.status == [0]
