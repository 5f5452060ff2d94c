"""Scheduler and runner in one process, in lock-step, without sockets: the engine as a function of its requests.

Stages run as they are dispatched; results are delivered as late as the scheduler lets them be, so that every mode of
async scheduling runs as deep as it can.

Every stage is kept, so that a test can say what the schedule was and not only what came out of it; so is how each
request was prefilled, since chunk borders and recomputation after preemption change what some KV layouts hold.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import ROW_AUX, Stage, split_prefill_frame
from depthbatch.common.messages import RequestParams, StageBatch, StageResult, Submit
from depthbatch.scheduler.assembly import ScheduledStage
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.build import BuiltRunner, assemble
from depthbatch.worker.device import resolve_device
from depthbatch.worker.loader import load_model

MAX_STAGES = 20_000


class Prefilled(NamedTuple):
    """One prefill of a request: over its prompt and, after preemption, its output so far."""

    outputs_before: int
    chunks: tuple[int, ...]  # tokens


@dataclass
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prefills: list[Prefilled] = field(default_factory=list)
    scores: bytes = b""
    prompt_scores: bytes = b""


@dataclass
class Ran:
    """One stage that was run."""

    header: StageBatch
    loops: tuple[int, ...]  # of the real rows, core stages only


class Late(NamedTuple):
    """A stage that has run and whose result is on its way."""

    stage: ScheduledStage
    result: StageResult


class LockstepEngine:
    """Requests in, answers out."""

    def __init__(self, config: EngineConfig, backend: str | None = None) -> None:
        device = resolve_device(config.device)
        model = load_model(
            config.model,
            dtype=config.dtype,
            device=device,
            load_format=config.load_format,
            seed=config.seed,
            r_max=config.max_loops,
            state_init=config.state_init,
        )
        self.built: BuiltRunner = assemble(config, model, device, backend)
        self.config = config
        self.history: list[Ran] = []
        self.preemptions = 0
        self.deepest = 0  # most stages in flight
        self._chunks: dict[int, list[int]] = {}  # by slot, of prompts that are partly prefilled

    def run(self, requests: Sequence[tuple[Sequence[int], RequestParams]]) -> list[Answer]:
        """Submits all requests at once and runs until every one has its terminal event."""
        scheduler = Scheduler(SchedulerConfig.resolve(self.config, self.built.info))
        answers = [Answer() for _ in requests]
        for index, (prompt, params) in enumerate(requests):
            rejected = scheduler.submit(Submit(index, np.asarray(prompt, np.int32).tobytes(), params))
            assert rejected is None, rejected
        late: deque[Late] = deque()
        self.deepest = 0
        for now in range(MAX_STAGES):
            if not scheduler.num_unfinished and not late:
                break
            stage = scheduler.next_stage(float(now))
            if stage is not None:
                late.append(self._run(stage, float(now)))
                self.deepest = max(self.deepest, len(late))
                continue
            assert late, "requests are left, but nothing can run"
            self._deliver(scheduler, late.popleft(), float(now), answers)
        assert scheduler.num_unfinished == 0
        scheduler.verify()
        self.preemptions = scheduler.counters.preemptions
        return answers

    def _run(self, stage: ScheduledStage, now: float) -> Late:
        output = self.built.runner.run(stage.header, stage.frame, stage.slot_params)
        loops = stage.frame[ROW_AUX, : stage.header.rows].tolist() if stage.header.stage == Stage.CORE else ()
        self.history.append(Ran(stage.header, tuple(loops)))
        parts = (output.token_ids, output.flags, output.scores, output.prompt_scores)
        result = StageResult(stage.header.step_id, now, now + 1, *[part.tobytes() for part in parts])
        return Late(stage, result)

    def _deliver(self, scheduler: Scheduler, late: Late, now: float, answers: list[Answer]) -> None:
        events = scheduler.complete(late.result, now)
        if late.stage.header.stage == Stage.PREFILL:
            self._note_prefills(late.stage, [answers[event.request_id] for event in events if event.token_ids])
        for event in events:
            answer = answers[event.request_id]
            assert answer.finish_reason is None, "news after the terminal event"
            answer.tokens += event.token_ids
            answer.depths += event.exit_depths
            answer.scores += event.logprobs
            answer.prompt_scores += event.prompt_logprobs
            answer.finish_reason = event.finish_reason

    def _note_prefills(self, stage: ScheduledStage, sampled: list[Answer]) -> None:
        """Keeps the chunks by slot, and gives them to the request whose first token came of the last one."""
        header = stage.header
        parts = split_prefill_frame(stage.frame, header.rows, header.n_tokens, header.n_updates)
        finished = iter(sampled)
        for slot, start, length, sample in zip(*(part.tolist() for part in parts[:4]), strict=True):
            if start == 0:
                self._chunks[slot] = []
            self._chunks[slot].append(length)
            if sample:
                answer = next(finished)
                answer.prefills.append(Prefilled(len(answer.tokens), tuple(self._chunks.pop(slot))))
        assert next(finished, None) is None
