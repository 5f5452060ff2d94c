"""One running engine as its frontend sees it: processes, socket, live requests, health.

Nothing here blocks but ``wait`` and ``close``, and there is no thread: ``descriptors`` says what to wait for, ``poll``
handles whatever has come. LLM drives it with ``wait``, AsyncEngine from its event loop. It keeps, of every live
request, the prompt and the tokens received with their exit depths, so that any process may die: a dead worker is
started again (the scheduler rebuilds its sequences); a dead scheduler is started again with a fresh worker, and every
live request is resubmitted with its tokens and depths, from which the same K/V follow. Draws depend on (seed, position)
alone, so the continuation is the one that nothing has disturbed.
"""

import atexit
import dataclasses
import heapq
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, DepthbatchError, EngineDeadError, RequestError
from depthbatch.common.frames import logprob_fields
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import (
    WIRE_VERSION,
    Abort,
    EngineInfo,
    EngineReady,
    Fatal,
    FinishReason,
    GetStats,
    Hello,
    Message,
    Rejected,
    RequestParams,
    SchedulerHeartbeat,
    SchedulerMessage,
    SchedulerStats,
    Submit,
    SubmitAll,
    TokenEvent,
    Tokens,
)
from depthbatch.common.run_dir import RunDir
from depthbatch.common.transport import SCHEDULER_ENDPOINT, Dealer
from depthbatch.frontend.attach import AttachedProcess, AttachedProcesses, ForeignRunDir
from depthbatch.frontend.grammar import refusal
from depthbatch.frontend.health import EngineHealth, HealthMonitor
from depthbatch.frontend.params import RequestDefaults, SamplingParams, check_token_ids
from depthbatch.frontend.processes import Child, Launcher

FATAL_GRACE_S = 0.3  # a dying worker's last words come through the scheduler
MAX_RESTARTS = 5  # within RESTART_WINDOW_S; more means that restarting does not help
RESTART_WINDOW_S = 60.0
USER_ERROR_EXIT_CODE = 2

log = get_logger("frontend")

# a request's id with what has come for it; an event's prompt_logprobs are those of the whole prompt, with its first token
News = tuple[int, TokenEvent | DepthbatchError]


@dataclass
class LiveRequest:
    """What it takes to submit a request again."""

    prompt: bytes  # int32
    params: RequestParams
    generated: "array[int]" = field(default_factory=lambda: array("i"))
    depths: bytearray = field(default_factory=bytearray)  # exit depth of each of them
    cuts: bytes = b""  # int32, where the prompt was cut, if that matters
    prompt_logprobs: list[bytes] = field(default_factory=list)  # until they go out with the first token
    prompt_logprobs_sent: int = 0  # prompt tokens whose logprobs have come


class EngineClient:
    """See the module docstring. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        config: EngineConfig,
        before_restart: Callable[[], None] = lambda: None,
        processes: AttachedProcesses | None = None,
    ) -> None:
        """``before_restart`` is called before descriptors are closed, for event loops that watch them.
        ``processes``: scheduler and worker that somebody else runs; by default they are started, and ended, here."""
        self.config = config
        self.info: EngineInfo | None = None  # set once the engine has been ready
        self.failure: DepthbatchError | None = None  # set once it is dead for good
        self.stats: SchedulerStats | None = None
        self._run_dir = RunDir() if processes is None else ForeignRunDir(processes.run_dir)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._launcher = Launcher(config, self._run_dir.path) if processes is None else processes
        self._link: Dealer | None = None
        self._defaults: RequestDefaults | None = None
        self._ready = False  # the scheduler has had a worker and knows our requests
        self._worker_ready = False  # False again while a worker that died is started anew
        self._live: dict[int, LiveRequest] = {}
        # a scheduler that outlives its frontend still holds requests of the former one: ids must not come back
        self._next_id = 1 if processes is None else time.time_ns() // 1000
        self._deadlines: list[tuple[float, int]] = []  # heap of (monotonic s, request id)
        self._restart_times: deque[float] = deque()
        self._last_words: Fatal | None = None
        self._monitor = HealthMonitor()
        self._before_restart = before_restart
        self._closed = False
        atexit.register(self.close)  # for those who never close, or are interrupted before they can

    # --- life

    def launch(self) -> None:
        """Starts both processes; ``info`` is set by a later ``poll``."""
        self._launcher.start("scheduler")
        self._launcher.start("worker")
        self._connect()

    def wait_ready(self) -> EngineInfo:
        """Blocks until the engine is ready. Raises ConfigError, ModelError or EngineDeadError."""
        while self.info is None:
            self.wait(0.1)
            self.poll()
            if self.failure is not None:
                raise self.failure
        return self.info

    def close(self) -> None:
        """Ends both processes and removes the run directory. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._ready = False
        self.failure = self.failure or EngineDeadError("the engine is closed")
        self._launcher.stop()
        if self._link is not None:
            self._link.close(0)
        self._context.destroy(0)
        self._run_dir.remove()

    @property
    def run_dir(self) -> RunDir | ForeignRunDir:
        return self._run_dir

    # --- requests

    def submit_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[int]:
        """Accepts requests, token ids and parameters each, in one message: all are queued before the scheduler chooses a
        stage. Returns their ids, which are ours and never used twice.

        Raises RequestError for what this engine cannot serve, EngineDeadError when there is none, with none of them
        accepted. A refusal by the scheduler (too few KV blocks) comes as news of it.
        """
        resolved = [self.check(*request, ordinal) for ordinal, request in enumerate(requests, self._next_id)]
        request_ids = [self._accept(*request, own) for request, own in zip(requests, resolved, strict=True)]
        if self._ready and request_ids:
            self._send(SubmitAll(tuple(map(self._submit_message, request_ids))))
        return request_ids

    def _accept(self, prompt_ids: Sequence[int], params: SamplingParams, resolved: RequestParams) -> int:
        request_id = self._next_id
        self._next_id += 1
        self._live[request_id] = LiveRequest(np.asarray(prompt_ids, dtype=np.int32).tobytes(), resolved)
        if params.timeout_s is not None:
            heapq.heappush(self._deadlines, (time.monotonic() + params.timeout_s, request_id))
        return request_id

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, ordinal: int = 0) -> RequestParams:
        """The parameters a request would run with; ``ordinal`` varies the seed of those that name none.

        Raises like submit_all.
        """
        if self.failure is not None:
            raise self.failure
        if self.info is None or self._defaults is None:
            raise EngineDeadError("the engine is not ready yet")
        check_token_ids(prompt_ids, self.info)
        return self._defaults.resolve(params, len(prompt_ids), ordinal)

    def abort(self, request_id: int) -> bool:
        """Ends a request without further news; False when it is not live (any more), which is fine."""
        if self._live.pop(request_id, None) is None:
            return False
        if self._ready and self._link is not None:
            self._link.send(Abort(request_id))
        return True

    @property
    def num_live(self) -> int:
        return len(self._live)

    def ask_stats(self) -> None:
        """Asks for the scheduler's counters; ``stats`` is set by a later ``poll``."""
        self.stats = None
        if self._link is not None:
            self._link.send(GetStats())

    # --- waiting and news

    def descriptors(self) -> set[int]:
        """File descriptors whose readability means that ``poll`` has something to do. Changes with restarts."""
        children = {child.fd for child in self._launcher.children.values() if not child.death_noticed}
        if self._link is None or self._closed:
            return children
        return children | {self._link.socket.getsockopt(zmq.FD)}  # type: ignore[arg-type]

    def wait(self, timeout_s: float) -> None:
        """Blocks until there is something for ``poll``, or the time is over."""
        poller = zmq.Poller()
        if self._link is not None:
            poller.register(self._link.socket, zmq.POLLIN)
        for child in self._launcher.children.values():
            if not child.death_noticed:
                poller.register(child.fd, zmq.POLLIN)
        deadline = self._deadlines[0][0] - time.monotonic() if self._deadlines else timeout_s
        poller.poll(math.ceil(1000 * max(0.0, min(timeout_s, deadline))))

    def poll(self) -> list[News]:
        """Handles everything that has come: messages, deaths, deadlines. Returns the news of live requests, in the order
        of their tokens; an event with a finish reason, or an error, is a request's last."""
        if self._closed:
            return []
        news: list[News] = []
        self._drain(news)
        self._watch_children(news)
        self._expire(news)
        return news

    def health(self, stall_s: float = 30.0) -> EngineHealth:
        """Judged by progress; asks nobody, only reads what the scheduler has pushed."""
        return self._monitor.health(self._launcher, self._ready, self._worker_ready, self.failure, stall_s)

    # --- messages

    def _connect(self) -> None:
        self._link = Dealer(self._context, self._run_dir.endpoint(SCHEDULER_ENDPOINT), SchedulerMessage)
        self._link.send(Hello(WIRE_VERSION))

    def _send(self, message: Message) -> None:
        assert self._link is not None
        self._link.send(message)

    def _submit_message(self, request_id: int) -> Submit:
        live = self._live[request_id]
        generated, depths = live.generated.tobytes(), bytes(live.depths)
        return Submit(request_id, live.prompt, live.params, generated, depths, live.prompt_logprobs_sent, live.cuts)

    def _drain(self, news: list[News]) -> None:
        while self._link is not None and (received := self._link.receive()) is not None:
            match received.message:
                case Tokens(events):
                    for event in events:
                        self._on_event(event, news)
                case SchedulerHeartbeat() as heartbeat:
                    self._monitor.heartbeat(heartbeat)
                case EngineReady(info):
                    self._on_ready(info)
                case Rejected(request_id, reason, param):
                    if self._live.pop(request_id, None) is not None:
                        news.append((request_id, RequestError(reason, param)))
                case SchedulerStats() as stats:
                    self.stats = stats
                case Fatal() as fatal:
                    log.error("%s: %s", fatal.process, fatal.message)
                    self._last_words = fatal
                    if fatal.other_version:
                        self._fail(EngineDeadError(fatal.message), news)

    def _on_event(self, event: TokenEvent, news: list[News]) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            return  # aborted here; the scheduler had not heard of it yet
        if event.prompt_logprobs:
            assert self.info is not None
            live.prompt_logprobs.append(event.prompt_logprobs)
            live.prompt_logprobs_sent += len(event.prompt_logprobs) // (4 * logprob_fields(self.info.max_logprobs))
        if event.finish_reason is None and not event.token_ids:
            return
        live.generated.extend(event.token_ids)
        live.depths.extend(event.exit_depths)
        live.cuts = event.cuts or live.cuts
        if event.finish_reason is not None:
            del self._live[event.request_id]
        if event.finish_reason is FinishReason.ERROR:
            news.append((event.request_id, refusal(live.params.grammar, event.failure)))
            return
        if live.prompt_logprobs:
            rows = b"".join(live.prompt_logprobs) if event.token_ids else b""  # else they are not all there
            event = msgspec.structs.replace(event, prompt_logprobs=rows)
            live.prompt_logprobs.clear()
        news.append((event.request_id, event))

    def _on_ready(self, info: EngineInfo) -> None:
        self.info = info
        # A worker that is started again must have the KV memory that the scheduler counts with.
        self._launcher.config = dataclasses.replace(self.config, kv_blocks=info.num_blocks - 1)
        self._defaults = RequestDefaults(info, self.config.seed)
        self._last_words = None
        self._monitor.start()
        self._worker_ready = True
        if self._ready:
            return  # a new worker under the scheduler that knows our requests
        self._ready = True
        if self._live:
            self._send(SubmitAll(tuple(map(self._submit_message, self._live))))

    # --- deaths and deadlines

    def _watch_children(self, news: list[News]) -> None:
        dead = [child for child in self._launcher.children.values() if not child.alive]
        if not dead or self.failure is not None:
            return
        if self.info is None:
            self._watch_start(dead, news)
        elif self._may_restart():
            self._replace(dead, news)
        else:
            reason = self._last_words.message if self._last_words is not None else dead[0].epitaph()
            self._fail(EngineDeadError(f"restarting does not help: {reason}"), news)

    def _replace(self, dead: Sequence[Child | AttachedProcess], news: list[News]) -> None:
        self._before_restart()
        self._worker_ready = False
        for child in dead:
            log.warning("%s; starting it again", child.epitaph())
        if any(child.name == "scheduler" for child in dead):
            self._restart_all(news)
        else:
            self._launcher.start("worker")

    @staticmethod
    def _will_be_replaced(child: Child | AttachedProcess) -> bool:
        """Whoever supervises it has not given it up: this frontend, started again itself, met it at a bad moment."""
        child.epitaph()  # asks the supervisor
        return isinstance(child, AttachedProcess) and child.pid != 0 and child.exit_code is None

    def _watch_start(self, dead: Sequence[Child | AttachedProcess], news: list[News]) -> None:
        """A child that dies before the engine was ever ready ends the engine, with the best reason to be had."""
        if self._last_words is None and all(child.dead_for_s < FATAL_GRACE_S for child in dead):
            return
        if self._last_words is None and self._will_be_replaced(dead[0]) and self._may_restart():
            self._replace(dead, news)
        elif self._last_words is not None:
            text, user_error = self._last_words.message, self._last_words.user_error
            self._fail(ConfigError(text) if user_error else EngineDeadError(f"{dead[0].name}: {text}"), news)
        elif dead[0].exit_code == USER_ERROR_EXIT_CODE:
            self._fail(ConfigError(dead[0].last_line() or dead[0].epitaph()), news)
        else:
            self._fail(EngineDeadError(dead[0].epitaph()), news)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restart_times and self._restart_times[0] < now - RESTART_WINDOW_S:
            self._restart_times.popleft()
        self._restart_times.append(now)
        return len(self._restart_times) <= MAX_RESTARTS

    def _restart_all(self, news: list[News]) -> None:
        """The scheduler is dead, so the worker's KV means nothing any more: both start afresh, on a new connection.

        What the old scheduler had sent is taken first; what it had not is generated again.
        """
        assert self._link is not None
        self._drain(news)
        self._link.close(0)
        self._ready = False
        self._launcher.kill("worker")
        self._launcher.start("scheduler")
        self._launcher.start("worker")
        self._connect()

    def _fail(self, error: DepthbatchError, news: list[News]) -> None:
        self.failure = error
        self._ready = False
        news.extend((request_id, error) for request_id in self._live)
        self._live.clear()

    def _expire(self, news: list[News]) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if self.abort(request_id):
                news.append((request_id, TokenEvent(request_id, (), (), FinishReason.TIMEOUT)))
