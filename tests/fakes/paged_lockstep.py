"""Drives a scheduler and a PagedWorker, with results held back as long as one likes, and keeps the books."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from depthbatch.common.messages import Submit, TokenEvent
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.policy.view import Policy
from depthbatch.scheduler.stage_batch import ScheduledStage
from depthbatch.scheduler.verdicts import Verdicts
from fakes.paged_model import plain_decode
from fakes.paged_worker import PagedWorker, logprobs_of


@dataclass
class Answer:
    """What a client has seen of a request."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    cuts: bytes = field(default=b"", compare=False)
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    cached_tokens: int = field(default=0, compare=False)
    finish_reason: str | None = None
    stop_reason: int | None = None


class GivenVerdicts(Verdicts):
    """Learns nothing."""

    def __init__(self, awaits: Callable[[], bool]) -> None:
        super().__init__(None)
        self._awaits = awaits

    def awaited(self, sequences: int, active: int) -> bool:
        return self._awaits()

    @property
    def due_behind_a_core_step(self) -> bool:
        return self._awaits()


class Lockstep:
    """Scheduler and worker in one thread. Every event is checked against the rules of a stream."""

    def __init__(
        self,
        config: SchedulerConfig,
        verify_every: int = 1,
        acceptance: float = 0.0,
        policy: Policy | None = None,
        awaits: Callable[[], bool] | None = None,
    ) -> None:
        """``acceptance``: how often drafts are right. ``policy``: in place of the config's. ``awaits``: whether a coda that
        says which guesses are right is awaited, and if not, then behind a core step, in place of what is learned."""
        self.config = config
        self._policy = policy
        self._awaits = awaits
        self.scheduler = self._new_scheduler()
        self.worker = PagedWorker(config, acceptance)
        self.results: deque = deque()
        self.submits: dict[int, Submit] = {}
        self.answers: dict[int, Answer] = {}
        self.rejected: dict[int, str] = {}
        self.stages: list[tuple] = []
        self.dispatched = 0
        self.keep_stages = False
        self.blamed: set[int] = set()  # requests that ended because workers died under them
        self._deaths = 0  # of workers, under this scheduler
        self.waits = 0  # times that a preempted request's tokens in flight held everything up
        self._verify_every = verify_every
        self._operations = 0

    def submit(self, submit: Submit) -> bool:
        refusal = self.scheduler.submit(submit)
        if refusal is not None:
            self.rejected[submit.request_id] = refusal.reason
        else:
            generated = np.frombuffer(submit.generated, "<i4").tolist()
            self.submits[submit.request_id] = submit
            if self.config.draft_lanes:
                prompt = np.frombuffer(submit.prompt, "<i4").tolist()
                self.worker.truth[submit.params.seed] = plain_decode(prompt, submit.params, self.config).tokens
            self.answers[submit.request_id] = Answer(tokens=generated, depths=list(submit.generated_depths))
        self._settle(self.scheduler.drain_events())
        return refusal is None

    def abort(self, request_id: int) -> bool:
        known = self.scheduler.abort(request_id)
        answer = self.answers.get(request_id)
        assert known == (answer is not None and answer.finish_reason is None), "abort knows what is unanswered"
        self._settle(self.scheduler.drain_events())
        return known

    def lose_worker(self) -> None:
        """It dies with everything in flight; the next one starts empty."""
        self.results.clear()
        self._deaths += 1
        self.scheduler.recover()
        self._start_worker()
        self._settle(self.scheduler.drain_events())

    def lose_scheduler(self) -> None:
        """It dies, and its worker with it; what is unanswered is submitted again with what has been seen of it."""
        self.results.clear()
        self._deaths = 0
        self.scheduler = self._new_scheduler()
        self._start_worker()
        for request_id, answer in self.answers.items():
            if answer.finish_reason is None:
                submit = self.submits[request_id]
                generated = np.asarray(answer.tokens, np.int32).tobytes()
                known = Submit(
                    request_id, submit.prompt, submit.params, generated, bytes(answer.depths), cuts=answer.cuts
                )
                assert self.scheduler.submit(known) is None
        self._settle(self.scheduler.drain_events())

    def _new_scheduler(self) -> Scheduler:
        scheduler = Scheduler(self.config, self._policy)
        if self._awaits is not None:
            scheduler._dispatch.verdicts = GivenVerdicts(self._awaits)
        return scheduler

    def _start_worker(self) -> None:
        former, self.worker = self.worker, PagedWorker(self.config, self.worker.acceptance)
        self.worker.last_step_id = self.scheduler._dispatch.next_step_id - 1
        self.worker.cuts, self.worker.truth = former.cuts, former.truth
        self.worker.rebuilt, self.worker.forced = former.rebuilt, former.forced

    def dispatch(self) -> ScheduledStage | None:
        """One stage, executed at once (the worker's order is the order of dispatch), its result held back."""
        may_choose = not self.scheduler._in_flight.full()
        stage = self.scheduler.next_stage(0.0)
        self.waits += stage is None and may_choose and self.scheduler._requests.unsettled
        if stage is not None:
            self.dispatched += 1
            if self.keep_stages:
                params = None if stage.slot_params is None else stage.slot_params.tobytes()
                self.stages.append((int(stage.header.stage), stage.header.rows, stage.frame.tobytes(), params))
            self.results.append(self.worker.execute(stage))
            assert len(self.results) <= self.config.max_stages_in_flight
            self._verify()
        return stage

    def complete(self) -> bool:
        if not self.results:
            return False
        self._settle(self.scheduler.complete(self.results.popleft(), 0.0))
        return True

    def run(self, hold: Callable[[], bool] = lambda: False, steps: int = 1_000_000) -> None:
        """Until nothing is left. ``hold`` says whether to let results wait although one could be taken."""
        for _ in range(steps):
            if self.results and not hold():
                self.complete()
            elif self.dispatch() is None and not self.complete():
                assert self.scheduler.num_unfinished == 0, "nothing can run, yet requests are unanswered"
                return
        raise AssertionError(f"not finished after {steps} steps")

    def interleave(self, requests: list[Submit], rng: random.Random) -> set[int]:
        """Submits all of them, with aborts, stages, results and lost processes between; the ids that were aborted."""
        todo, aborted = list(requests), set()
        while todo:
            match rng.randrange(8):
                case 0:
                    self.submit(todo.pop())
                case 1 if self.answers:
                    victim = rng.choice(sorted(self.answers))
                    if rng.random() < 0.4 and self.abort(victim):
                        aborted.add(victim)
                case 2 | 3 | 4:
                    self.dispatch()
                case 5:
                    if rng.random() < 0.3:
                        rng.choice((self.lose_worker, self.lose_scheduler))()
                case _:
                    self.complete()
        return aborted

    def run_script(self, script: dict[int, list[Callable[["Lockstep"], object]]], rng: random.Random | None) -> None:
        """Applies actions at stage counts (or, when nothing can run, at once), so that they fall on the same points
        of the schedule however late results come. rng None: results come as late as the scheduler allows."""
        todo = sorted(script)
        while True:
            while todo and todo[0] <= self.dispatched:
                for action in script[todo.pop(0)]:
                    action(self)
            if rng is not None and self.results and rng.random() < 0.5:
                self.complete()
            elif self.dispatch() is None and not self.complete():
                if not todo:
                    assert self.scheduler.num_unfinished == 0
                    return
                for action in script[todo.pop(0)]:
                    action(self)

    def _settle(self, events: list[TokenEvent]) -> None:
        for event in events:
            answer = self.answers[event.request_id]
            assert answer.finish_reason is None, "news of a request that was answered"
            assert len(event.token_ids) == len(event.exit_depths)
            answer.tokens.extend(event.token_ids)
            answer.depths.extend(event.exit_depths)
            answer.accepted_drafts += event.accepted_drafts
            answer.rejected_drafts += event.rejected_drafts
            answer.cached_tokens += event.cached_tokens
            wants = self.submits[event.request_id].params.logprobs
            assert event.logprobs == (logprobs_of(event.token_ids) if wants else b""), "logprobs of another token"
            answer.cuts = event.cuts or answer.cuts
            if event.kills_worker:
                assert self._deaths >= 2 and event.finish_reason == "error", "blamed for what it cannot have done twice"
                self.blamed.add(event.request_id)
            answer.finish_reason, answer.stop_reason = event.finish_reason, event.stop_reason
        self._verify()

    def _verify(self) -> None:
        self._operations += 1
        if self._operations % self._verify_every == 0:
            self.scheduler.verify()
            view, scheduler = self.scheduler.view, self.scheduler
            lanes = self.config.max_num_seqs * (1 + self.config.draft_lanes)
            assert view.q_d + view.q_r + view.q_c <= lanes
            assert scheduler.num_running + scheduler.num_waiting <= scheduler.num_unfinished
