"""Requests and a loop to serve them with, for runners that have several stages in flight.

At the top of the tests, since a package named ``cuda`` is installed where there are GPUs.
"""

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from depthbatch.common.config import EngineConfig
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams, Submit, TokenEvent
from depthbatch.frontend.token_bans import allow_list
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.runner.stage_io import LaunchedStage, StageRunner
from fakes.bans import bad_rows

VOCAB = 320  # huginn-tiny's; the 300 of ouro-tiny take as many words of a mask
FIDELITY = Path(__file__).parent.parent / "data" / "fidelity"
Answers = dict[int, tuple[list[int], list[int], list[float]]]  # tokens, depths, scores


def configure(model: str, mode: str, layout: str, **options: Any) -> EngineConfig:
    config = EngineConfig(
        model=str(FIDELITY / model),
        policy="refill",  # auto goes by the clock
        max_num_seqs=4,
        max_num_batched_tokens=48,
        kv_blocks=60,
        max_model_len=128,
        kv_layout=layout,
        async_scheduling=mode,
    )
    return msgspec.structs.replace(config, **options)


def requests(gate: Gate, r_max: int) -> list[Submit]:
    """Nine prompts of mixed lengths, some sampled: more than the slots, so that slots and staging are reused."""
    rng = np.random.default_rng(7)
    made = []
    for index in range(9):
        params = RequestParams(
            max_tokens=5 + index,
            gate=gate,
            exit_threshold=0.4,
            min_loops=2,
            max_loops=r_max,
            temperature=0.8 if index % 3 == 0 else 0.0,
            top_k=20 if index % 6 == 0 else 0,
            seed=index,
            presence_penalty=1.5 if index % 4 == 1 else 0.0,
            repetition_penalty=1.3 if index % 4 == 2 else 1.0,
            logit_bias=np.array([[5, np.float32(50).view(np.int32)]], np.int32).tobytes() if index == 3 else b"",
            bad_sequences=bad_rows([[5, 5], [6, 6], [7, 7], [5, 6, 5]]) if index in (6, 7) else b"",
            allow_list=allow_list((5, 6, 7), VOCAB) if index in (7, 8) else b"",
            logprobs=index % 3 == 1,
            prompt_logprobs=index % 4 == 0,
        )
        prompt = rng.integers(1, 290, 3 + 11 * index % 60).astype(np.int32)
        made.append(Submit(index, prompt.tobytes(), params))
    return made


def warm(submits: list[Submit]) -> list[Submit]:
    """The same without penalties and so warm that models of random weights draft right about every second time."""
    made = []
    for submit in submits:
        params = msgspec.structs.replace(
            submit.params, temperature=10.0, presence_penalty=0.0, repetition_penalty=1.0, logit_bias=b""
        )
        made.append(msgspec.structs.replace(submit, params=params))
    return made


def longer(submits: list[Submit]) -> list[Submit]:
    """The same of 24 tokens each and with nothing that shapes them, so that blocks run short and victims' K/V can leave."""
    plainer = {"max_tokens": 24, "presence_penalty": 0.0, "repetition_penalty": 1.0, "bad_sequences": b""}
    return [
        msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, **plainer, allow_list=b""))
        for each in submits
    ]


def serve(
    scheduler: Scheduler, runner: StageRunner, submits: list[Submit], lost_at: tuple[int, ...] = ()
) -> tuple[Answers, int]:
    """Launches whatever the scheduler allows ahead, reads when it allows no more; also the most stages in flight.

    After ``lost_at`` stages the scheduler takes everything in flight for lost and rebuilds its sequences.
    """
    answers: Answers = {submit.request_id: ([], [], []) for submit in submits}
    for submit in submits:
        assert scheduler.submit(submit) is None
    in_flight: deque[LaunchedStage] = deque()
    deepest, now, launched = 0, 0.0, 0
    while scheduler.num_unfinished:
        now += 1.0
        if launched in lost_at:
            lost_at = tuple(at for at in lost_at if at != launched)
            scheduler.recover()
        stage = scheduler.next_stage(now)
        if stage is not None:
            in_flight.append(runner.launch(stage.header, stage.frame, stage.slot_params))
            deepest, launched = max(deepest, len(in_flight)), launched + 1
            continue
        note(answers, scheduler.complete(runner.read(in_flight.popleft()), now))
    for stage_in_flight in in_flight:
        runner.read(stage_in_flight)
    return answers, deepest


def note(answers: Answers, events: list[TokenEvent]) -> None:
    for event in events:
        answers[event.request_id][0].extend(event.token_ids)
        answers[event.request_id][1].extend(event.exit_depths)
        for scores in (event.logprobs, event.prompt_logprobs):
            answers[event.request_id][2].extend(np.frombuffer(scores, np.float32).tolist())
