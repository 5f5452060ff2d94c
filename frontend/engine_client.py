"""One running engine as its frontend sees it: requests in, news of them out, whatever dies meanwhile.

Nothing here blocks but ``wait`` and ``close``, and there is no thread: ``descriptors`` says what to wait for, ``poll``
handles whatever has come. LLM drives it with ``wait``, AsyncEngine from its event loop. Any process may die: a dead
worker is started again (the scheduler rebuilds its sequences); a dead scheduler is started again with a fresh worker,
and every live request is resubmitted with its tokens and depths, from which the same K/V follow. Draws depend on (seed,
position) alone, so the continuation is the one that nothing has disturbed.
"""

import atexit
import math
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import zmq

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import DepthbatchError, EngineDeadError, RequestError
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
    Loading,
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
from depthbatch.common.transport import SCHEDULER_ENDPOINT, Dealer, endpoint
from depthbatch.frontend.hangs import HangWatch
from depthbatch.frontend.health import EngineHealth, HealthMonitor
from depthbatch.frontend.live_requests import LiveRequest, LiveRequests, News, Progress, check_progress
from depthbatch.frontend.params import RequestDefaults, SamplingParams
from depthbatch.frontend.processes import MAX_FRONTENDS, Launcher, Processes
from depthbatch.frontend.prompt_checks import check_length, check_token_ids
from depthbatch.frontend.restarts import Loss, Restarts
from depthbatch.frontend.token_bans import Encode

log = get_logger("frontend")


class EngineClient:
    """See the module docstring. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        config: EngineConfig,
        before_restart: Callable[[], None] = lambda: None,
        processes: Processes | None = None,
    ) -> None:
        """``before_restart`` is called before descriptors are closed, for event loops that watch them.
        ``processes``: scheduler and worker that somebody else runs; by default they are started, and ended, here."""
        self.info: EngineInfo | None = None  # set once the engine has been ready
        self.failure: DepthbatchError | None = None  # set once it is dead for good, or closed
        self.stats: SchedulerStats | None = None
        self.on_loading: Callable[[int, int], None] = lambda done, total: None  # told of bytes read, and of how many
        self.encode: Encode | None = None  # by the model's tokenizer, where the owner has one: bad words need it
        self._seed = config.seed
        self._processes: Processes = Launcher(config) if processes is None else processes
        self._restarts = Restarts(self._processes)
        self._monitor = HealthMonitor(self._processes)
        self._hangs = HangWatch(self._processes, config.hang_s)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link: Dealer | None = None
        self._requests = _requests_of(self._processes)
        self._defaults: RequestDefaults | None = None
        self._ready = False  # the scheduler has had a worker and knows our requests
        self._before_restart = before_restart
        self._closed = False
        atexit.register(self.close)  # for those who never close, or are interrupted before they can

    # --- life

    def launch(self) -> None:
        """Starts both processes; ``info`` is set by a later ``poll``."""
        self._restarts.start()
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
        """Ends both processes, if they are ours. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._ready = False
        self.failure = self.failure or EngineDeadError("the engine is closed")
        self._processes.stop()
        if self._link is not None:
            self._link.close(0)
        self._context.destroy(0)

    @property
    def run_dir(self) -> Path:
        return self._processes.run_dir

    # --- requests

    def submit_all(
        self,
        requests: Sequence[tuple[Sequence[int], SamplingParams]],
        client: int = 0,
        progress: Progress | None = None,
    ) -> list[int]:
        """Accepts requests, token ids and parameters each, in one message: all are queued before the scheduler chooses a
        stage. Returns their ids, which are ours and never used twice. ``client``: whose they are; clients take turns.
        ``progress``: of the one request, which another engine has begun.

        Raises RequestError for what this engine cannot serve, EngineDeadError when there is none, with none of them
        accepted. A refusal by the scheduler (too few KV blocks) comes as news of it.
        """
        resolved = [
            self.check(*request, ordinal)
            for request, ordinal in zip(requests, count(self._requests.next_id, self._requests.stride), strict=False)
        ]
        if progress is not None:
            assert self.info is not None
            check_progress(progress, requests[0][1], resolved[0].max_tokens, self.info)
        return self.accept(
            [
                (LiveRequest.begin(prompt_ids, own, client, progress), params.timeout_s)
                for (prompt_ids, params), own in zip(requests, resolved, strict=True)
            ]
        )

    def kept_form(self, request_id: int) -> Submit:
        """What it takes to submit a live request again."""
        return self._requests.submit(request_id)

    def accept(self, requests: Sequence[tuple[LiveRequest, float | None]]) -> list[int]:
        """Requests that were checked, each with the seconds that it may take, in one message. Returns their ids. Raises
        EngineDeadError."""
        if self.failure is not None:
            raise self.failure
        request_ids = [self._requests.add(live, timeout_s) for live, timeout_s in requests]
        if self._ready and request_ids:
            self._send(SubmitAll(tuple(map(self._requests.submit, request_ids))))
        return request_ids

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, ordinal: int = 0) -> RequestParams:
        """The parameters a request would run with; ``ordinal`` varies the seed of those that name none.

        Raises like submit_all.
        """
        if self.failure is not None:
            raise self.failure
        if self.info is None or self._defaults is None:
            raise EngineDeadError("the engine is not ready yet")
        check_length(len(prompt_ids), None, self.info.max_model_len)  # before any of them is looked at
        check_token_ids(prompt_ids, self.info)
        return self._defaults.resolve(params, len(prompt_ids), ordinal, self.encode)

    def abort(self, request_id: int) -> bool:
        """Ends a request without further news; False when it is not live (any more), which is fine."""
        if not self._requests.drop(request_id):
            return False
        if self._ready:
            self._send(Abort(request_id))
        return True

    def ask_stats(self) -> None:
        """Asks for the scheduler's counters; ``stats`` is set by a later ``poll``."""
        self.stats = None
        if self._link is not None:
            self._link.send(GetStats())

    # --- waiting and news

    def descriptors(self) -> set[int]:
        """File descriptors whose readability means that ``poll`` has something to do. Changes with restarts."""
        watched = self._restarts.descriptors()
        if self._link is None or self._closed:
            return watched
        return watched | {self._link.socket.getsockopt(zmq.FD)}  # type: ignore[arg-type]

    def wait(self, timeout_s: float) -> None:
        """Blocks until there is something for ``poll``, or the time is over."""
        poller = zmq.Poller()
        if self._link is not None:
            poller.register(self._link.socket, zmq.POLLIN)
        for descriptor in self._restarts.descriptors():
            poller.register(descriptor, zmq.POLLIN)
        poller.poll(math.ceil(1000 * self._requests.seconds_to_deadline(timeout_s)))

    def poll(self) -> list[News]:
        """Handles everything that has come: messages, deaths, deadlines. Returns the news of live requests, in the order
        of their tokens; an event with a finish reason, or an error, is a request's last."""
        if self._closed:
            return []
        news: list[News] = []
        self._drain(news)
        self._hangs.look(self._monitor.hung(self._ready, self._hangs.limit_s))
        loss = self._restarts.look() if self.failure is None else None
        if loss is not None:
            self._after_loss(loss, news)
        for request_id in self._requests.overdue():
            if self.abort(request_id):
                news.append((request_id, TokenEvent(request_id, (), (), FinishReason.TIMEOUT)))
        return news

    def health(self, stall_s: float = 30.0) -> EngineHealth:
        """Judged by progress; asks nobody, only reads what the scheduler has pushed."""
        return self._monitor.health(self._ready, self.failure, stall_s)

    # --- the scheduler's side

    def _connect(self) -> None:
        self._link = Dealer(self._context, endpoint(self.run_dir, SCHEDULER_ENDPOINT), SchedulerMessage)
        self._link.send(Hello(WIRE_VERSION))

    def _send(self, message: Message) -> None:
        assert self._link is not None
        self._link.send(message)

    def _drain(self, news: list[News]) -> None:
        while self._link is not None and (received := self._link.receive()) is not None:
            match received.message:
                case Tokens(events):
                    assert self.info is not None
                    for event in events:
                        if (told := self._requests.take(event, self.info)) is not None:
                            news.append(told)
                case SchedulerHeartbeat() as heartbeat:
                    self._monitor.heartbeat(heartbeat)
                case EngineReady(info):
                    self._on_ready(info)
                case Loading(done, total) if self.info is None:
                    self.on_loading(done, total)
                case Rejected(request_id, reason, param):
                    if self._requests.drop(request_id):
                        news.append((request_id, RequestError(reason, param)))
                case SchedulerStats() as stats:
                    self.stats = stats
                case Fatal() as fatal:
                    if not fatal.user_error:  # those are raised by whoever waits for the engine
                        log.error("%s: %s", fatal.process, fatal.message)
                    self._restarts.last_words = fatal
                    if fatal.other_version:
                        self._fail(EngineDeadError(fatal.message), news)

    def _on_ready(self, info: EngineInfo) -> None:
        self.info = info
        self._defaults = RequestDefaults(info, self._seed)
        self._restarts.ready(info)
        self._monitor.ready()
        if self._ready:
            return  # a new worker under the scheduler that knows our requests
        self._ready = True
        if self._requests:
            self._send(self._requests.submit_all())

    def _after_loss(self, loss: Loss, news: list[News]) -> None:
        """What an old scheduler had sent is taken before its connection is closed; what it had not is generated again."""
        if loss.failure is not None:
            self._fail(loss.failure, news)
            return
        self._before_restart()
        self._monitor.worker_lost()
        if loss.of_scheduler and self._link is not None:
            self._drain(news)
            self._link.close(0)
            self._ready = False
        self._restarts.replace(loss)
        if loss.of_scheduler:
            self._connect()

    def _fail(self, error: DepthbatchError, news: list[News]) -> None:
        self.failure = error
        self._ready = False
        news.extend(self._requests.fail(error))


def _requests_of(processes: Processes) -> LiveRequests:
    """With ids of its own. A scheduler that outlives its frontend still holds requests of the former one, and it may have other
    frontends: none of their ids may come again."""
    if not processes.outlive_frontend:
        return LiveRequests(1)
    return LiveRequests(time.time_ns() // 1000 * MAX_FRONTENDS + processes.frontend, MAX_FRONTENDS)
