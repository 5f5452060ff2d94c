"""Scheduler and runner in one process, in lock-step, without sockets: the engine as a function of its requests.

Stages run as they are dispatched; results are delivered as late as the scheduler lets them be, so that every mode of
async scheduling runs as deep as it can.

Every stage is kept, so that a test can say what the schedule was and not only what came out of it; so is where each
prompt was cut, since that changes what some KV layouts hold. A run may be disturbed: sequences preempted, the worker or
the scheduler lost with everything in flight.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec import structs

from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import ROW_AUX, Stage, slot_param_rows, split_prefill_frame
from depthbatch.common.messages import RequestParams, StageBatch, StageResult, Submit
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.policy.view import Policy
from depthbatch.scheduler.stage_batch import ScheduledStage
from depthbatch.worker.build import BuiltRunner, assemble
from depthbatch.worker.device import resolve_device
from depthbatch.worker.models.loader import load_model

MAX_STAGES = 20_000


@dataclass
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    failure: str = ""
    chunks: tuple[int, ...] = ()  # tokens of each chunk of the prefill that gave the first token
    cuts: bytes = b""  # as the scheduler has told them
    scores: bytes = b""
    prompt_scores: bytes = b""
    accepted: int = 0  # drafts that were right
    rejected: int = 0


@dataclass
class Ran:
    """One stage that was run."""

    header: StageBatch
    loops: tuple[int, ...]  # of the real rows, core stages only


@dataclass
class Disturbance:
    """What happens before a stage of a run is chosen."""

    at_stage: int
    kind: str  # "preempt", "worker", "scheduler"
    pick: int = 0  # which of the active slots is preempted
    while_out: bool = False  # not before some K/V are in host memory

    def is_due(self, stages: int, scheduler: Scheduler) -> bool:
        offload = scheduler.admission.offload
        return stages >= self.at_stage and (
            not self.while_out or (offload is not None and offload.host.free < offload.host.total)
        )


class Late(NamedTuple):
    """A stage that has run and whose result is on its way."""

    stage: ScheduledStage
    result: StageResult


def _would_blame(scheduler: Scheduler) -> bool:
    """Lost now, the worker would be taken for killed by what ran alone, which fails: test_quarantine.py has that."""
    orders = scheduler._in_flight.orders()
    live = scheduler._requests._live.values()
    return len(orders) == 1 and any(request.deaths > 0 for request in live if request.order in orders)


class LockstepEngine:
    """Requests in, answers out."""

    def __init__(self, config: EngineConfig, backend: str | None = None) -> None:
        self._device = resolve_device(config.device)
        self._model = load_model(
            config.model,
            dtype=config.dtype,
            device=self._device,
            load_format=config.load_format,
            seed=config.seed,
            r_max=config.max_loops,
            state_init=config.state_init,
            quantization=config.quantization,
        )
        self.config = config
        self._backend = backend
        self.built = self._new_worker()
        self._policy: Policy | None = None
        self.history: list[Ran] = []
        self.preemptions = 0
        self.rebuilt = 0  # times that a sequence went on with a known token after its prefill
        self.last_rebuilt = 0  # slot of the last one
        self.restored = 0  # of those, with its K/V from host memory
        self.deepest = 0  # most stages in flight
        self._chunks: dict[int, list[int]] = {}  # by slot, of prompts that are partly prefilled

    def run(
        self,
        requests: Sequence[tuple[Sequence[int], RequestParams]],
        disturbances: Sequence[Disturbance] = (),
        policy: Policy | None = None,
    ) -> list[Answer]:
        """Submits all requests at once and runs until every one has its terminal event. ``policy``: in place of the
        config's."""
        answers = [Answer() for _ in requests]
        self._policy = policy
        scheduler = self._new_scheduler(requests, answers)
        late: deque[Late] = deque()
        self.deepest = self.preemptions = 0
        todo = sorted(disturbances, key=lambda one: one.at_stage)
        first = len(self.history)
        for now in range(MAX_STAGES):
            if not scheduler.num_unfinished and not late:
                break
            if todo and todo[0].is_due(len(self.history) - first, scheduler):
                scheduler = self._disturb(todo.pop(0), scheduler, late, requests, answers)
                continue
            stage = scheduler.next_stage(float(now))
            if stage is not None:
                late.append(self._run(stage, float(now)))
                self.deepest = max(self.deepest, len(late))
                continue
            assert late, "requests are left, but nothing can run"
            self._deliver(scheduler, late.popleft(), float(now), answers)
        assert scheduler.num_unfinished == 0
        scheduler.verify()
        self.preemptions += scheduler.counters.preemptions
        return answers

    def _new_worker(self) -> BuiltRunner:
        """With empty memory."""
        return assemble(self.config, self._model, self._device, self._backend)

    def _new_scheduler(
        self, requests: Sequence[tuple[Sequence[int], RequestParams]], answers: Sequence[Answer]
    ) -> Scheduler:
        """Knows of every unanswered request what a frontend knows: prompt, parameters, tokens and depths so far."""
        scheduler = Scheduler(SchedulerConfig.resolve(self.config, self.built.info), self._policy)
        for index, ((prompt, params), answer) in enumerate(zip(requests, answers, strict=True)):
            if answer.finish_reason is None:
                data, tokens = (np.asarray(ids, np.int32).tobytes() for ids in (prompt, answer.tokens))
                rejected = scheduler.submit(Submit(index, data, params, tokens, bytes(answer.depths), cuts=answer.cuts))
                assert rejected is None, rejected
        return scheduler

    def _disturb(
        self,
        what: Disturbance,
        scheduler: Scheduler,
        late: deque[Late],
        requests: Sequence[tuple[Sequence[int], RequestParams]],
        answers: Sequence[Answer],
    ) -> Scheduler:
        if what.kind == "preempt":
            active = [request for request in scheduler.admission.rows.request if request is not None]
            if active:
                scheduler._requests.preempt(active[what.pick % len(active)], may_offload=True)
            return scheduler
        late.clear()
        self.built = self._new_worker()
        if what.kind == "worker" and not _would_blame(scheduler):
            scheduler.recover()
            return scheduler
        self.preemptions += scheduler.counters.preemptions
        return self._new_scheduler(requests, answers)

    def _run(self, stage: ScheduledStage, now: float) -> Late:
        runner = self.built.runner
        result = runner.read(runner.launch(stage.header, stage.frame, stage.slot_params))
        loops = stage.frame[ROW_AUX, : stage.header.rows].tolist() if stage.header.stage == Stage.CORE else ()
        self.history.append(Ran(stage.header, tuple(loops)))
        if stage.header.stage == Stage.PREFILL and stage.header.extra is not None:
            self.rebuilt += len(stage.header.extra.forced_tokens) // 8
            self.restored += stage.header.extra.depths.count(0)
            for slot, _ in np.frombuffer(stage.header.extra.forced_tokens, np.int32).reshape(-1, 2).tolist():
                self.last_rebuilt = slot
        return Late(stage, structs.replace(result, start_s=now, end_s=now + 1))

    def _deliver(self, scheduler: Scheduler, late: Late, now: float, answers: list[Answer]) -> None:
        events = scheduler.complete(late.result, now)
        if late.stage.header.stage == Stage.PREFILL:
            self._note_prefills(late.stage, [answers[event.request_id] for event in events if event.token_ids])
        for event in events:
            answer = answers[event.request_id]
            assert answer.finish_reason is None, "news after the terminal event"
            answer.tokens += event.token_ids
            answer.depths += event.exit_depths
            answer.cuts = event.cuts or answer.cuts
            answer.scores += event.logprobs
            answer.prompt_scores += event.prompt_logprobs
            answer.finish_reason = event.finish_reason
            answer.failure = event.failure
            answer.accepted += event.accepted_drafts
            answer.rejected += event.rejected_drafts

    def _note_prefills(self, stage: ScheduledStage, sampled: list[Answer]) -> None:
        """Keeps the chunks by slot, and gives them to the request whose first token came of the last one."""
        header = stage.header
        parts = split_prefill_frame(stage.frame, header.rows, header.n_tokens, header.n_updates)
        finished = iter(sampled)
        fresh = set() if stage.slot_params is None else set(slot_param_rows(stage.slot_params)["slot"].tolist())
        for slot, start, length, sample in zip(*(part.tolist() for part in parts[:4]), strict=True):
            if slot in fresh:
                self._chunks[slot] = [start] if start else []  # a cached prefix was a chunk of its own
            self._chunks[slot].append(length)
            if sample:
                next(finished).chunks = tuple(self._chunks.pop(slot))
        assert next(finished, None) is None
