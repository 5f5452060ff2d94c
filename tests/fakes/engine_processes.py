"""A scheduler and a worker without tensors, as processes behind the real sockets, for tests of the frontend.

Token i of a request is ``next_token(prompt, i)``, a function of prompt and index alone, as greedy tokens are; so a
request that was submitted again after a crash must go on exactly where it stopped. One token every STEP_S.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import zmq

from depthbatch.common.config import EngineConfig
from depthbatch.common.gates import Gate
from depthbatch.common.messages import (
    WIRE_VERSION,
    Abort,
    EngineInfo,
    EngineReady,
    Fatal,
    FrontendMessage,
    GetStats,
    Hello,
    Rejected,
    SchedulerHeartbeat,
    SchedulerStats,
    Shutdown,
    Submit,
    SubmitAll,
    TokenEvent,
    Tokens,
    WorkerCommand,
    WorkerMessage,
    WorkerReady,
)
from depthbatch.common.os_process import die_with_parent
from depthbatch.common.stats import CoreStats
from depthbatch.common.transport import Dealer, Router, endpoint

STEP_S = 0.002
VOCAB = 264
R_MAX = 4
REJECTED_PROMPT = 100  # tokens


def next_token(prompt: list[int], index: int) -> int:
    """Never an end of sequence; printable in the demo tokenizer."""
    return 10 + (sum(prompt) * 31 + index * 7) % 80


def depth(index: int) -> int:
    return R_MAX if index == 0 else 2 + index % 3


def fake_info(config: EngineConfig) -> EngineInfo:
    return EngineInfo(
        model=config.model, architecture="fake", vocab_size=VOCAB, r_max=R_MAX, r_min=2, default_gate=Gate.DELAYED,
        gates=(Gate.NONE, Gate.FIXED, Gate.REPLAY, Gate.OWN, Gate.DELAYED), default_threshold=0.9,
        kv_layout=config.kv_layout or "last_exited", block_size=16, num_blocks=129, kv_bytes_per_token=24576,
        max_model_len=512, boundary_layers=0, buckets=(64,), device="cpu", dtype="float32", eos_token_ids=(0, 2),
    )  # fmt: skip


class FakeScheduler:
    """Answers submits with tokens; counts what it saw, so that tests can ask."""

    def __init__(self, run_dir: str) -> None:
        context = zmq.Context()
        self.router = Router(context, endpoint(run_dir, "scheduler"), FrontendMessage)
        self.worker = Router(context, endpoint(run_dir, "worker"), WorkerMessage)
        self.info: EngineInfo | None = None
        self.clients: set[bytes] = set()
        self.running: dict[int, tuple[bytes, Submit, list[int], int]] = {}
        self.prompt_tokens = 0
        self.steps = 0

    def run(self) -> None:
        next_beat = 0.0
        while True:
            self.router.socket.poll(2)
            while (received := self.worker.receive()) is not None:
                self.from_worker(received.message)
            while (received := self.router.receive()) is not None:
                self.from_frontend(received.peer, received.message)
            self.step()
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + 0.1
                self.broadcast(SchedulerHeartbeat(self.steps, 0.0, 0, self.steps, len(self.running), 0))

    def broadcast(self, message: object) -> None:
        for client in self.clients:
            self.router.send(client, message)

    def from_worker(self, message: object) -> None:
        if isinstance(message, WorkerReady):
            self.info = message.info
            self.broadcast(EngineReady(message.info))
        elif isinstance(message, Fatal):
            self.broadcast(message)

    def from_frontend(self, peer: bytes, message: object) -> None:
        match message:
            case Hello():
                self.clients.add(peer)
                if self.info is not None:
                    self.router.send(peer, EngineReady(self.info))
            case Submit():
                self.submit(peer, message)
            case SubmitAll(requests):
                for submit in requests:
                    self.submit(peer, submit)
            case Abort(request_id):
                if self.running.pop(request_id, None) is not None:
                    self.router.send(peer, Tokens((TokenEvent(request_id, (), (), "abort"),)))
            case GetStats():
                core = CoreStats(prompt_tokens=self.prompt_tokens, running=len(self.running))
                self.router.send(peer, SchedulerStats(core))
            case Shutdown():
                sys.exit(0)

    def submit(self, peer: bytes, message: Submit) -> None:
        prompt = np.frombuffer(message.prompt, np.int32).tolist()
        self.prompt_tokens += len(prompt)
        if len(prompt) == REJECTED_PROMPT:
            self.router.send(peer, Rejected(message.request_id, "needs 9 KV blocks, the cache has 8", "prompt"))
            return
        if len(message.generated) // 4 >= message.params.max_tokens:  # as the scheduler: all of it is there
            self.router.send(peer, Tokens((TokenEvent(message.request_id, (), (), "length"),)))
            return
        self.running[message.request_id] = (peer, message, prompt, len(message.generated) // 4)

    def step(self) -> None:
        self.steps += bool(self.running)
        for request_id, (peer, message, prompt, index) in list(self.running.items()):
            token = next_token(prompt, index)
            reason = None
            if token in message.params.stop_token_ids:
                reason = "stop"
            elif index + 1 >= message.params.max_tokens:
                reason = "length"
            drafts = {"accepted_drafts": 1, "rejected_drafts": index % 2} if message.params.speculation else {}
            event = TokenEvent(
                request_id, (token,), (depth(index),), reason, token if reason == "stop" else None, **drafts
            )
            gone = not self.router.send(peer, Tokens((event,)))
            if reason is not None or gone:
                del self.running[request_id]
            else:
                self.running[request_id] = (peer, message, prompt, index + 1)


def run_worker(run_dir: str, config: EngineConfig) -> int:
    """``load_format`` and ``model`` name the way it fails, if it is to fail."""
    context = zmq.Context()
    link = Dealer(context, endpoint(run_dir, "worker"), WorkerCommand)
    if config.model == "user-error":
        message = "model 'user-error' has no config.json"
        print(f"2026-01-01 00:00:00,000 ERROR worker: {message}", file=sys.stderr, flush=True)
        link.send(Fatal("worker", message, True))
        link.close()
        context.term()  # waits until the last words are out
        return 2
    if config.model == "crash":
        print("about to abort", file=sys.stderr, flush=True)
        os.abort()
    if config.model == "crash-later" and Path(run_dir, "crashed-once").exists():
        os._exit(7)
    Path(run_dir, "crashed-once").touch()
    link.send(WorkerReady(os.getpid(), fake_info(config), WIRE_VERSION))
    signal.pause()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--run-dir")
    parser.add_argument("--config")
    parser.add_argument("--parent-pid", type=int)
    args = parser.parse_args()
    die_with_parent(args.parent_pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = EngineConfig.from_json(args.config)
    if args.role == "worker":
        return run_worker(args.run_dir, config)
    FakeScheduler(args.run_dir).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
