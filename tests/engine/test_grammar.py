"""Constrained output of the whole engine: a grammar holds in every schedule, and changes nothing for its neighbours.

The model's weights are random, so without the mask nearly every token would leave the grammar; the tokenizer is the
demo's, whose tokens are bytes, beside the tiny model.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine.test_lockstep import engine
from msgspec import structs
from tokenizers import Tokenizer

from depthbatch.common.errors import RequestError
from depthbatch.common.messages import RequestParams, Submit, Variant
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend.grammar import grammar_text
from depthbatch.frontend.params import RequestDefaults, SamplingParams
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.runner.overlapped import OverlappedRunner
from fakes.adverse_accelerator import AdverseAccelerator
from fakes.lockstep import Answer, LockstepEngine
from fakes.overlapped_serving import serve
from reference.oracle import OURO, prompts_of

EOS = (0, 2)
EXPRESSIONS = [
    r"[0-9]{10,12}",
    "",
    r"(yes|no), (yes|no), (yes|no)",
    r"[a-c]*x",
    "",
    r"\{\"a\": ?[0-9]+\}",
    r"[A-Z][a-z]{9}",
]
SETTINGS = [
    {},
    {"policy": "cb"},
    {"policy": "no-refill", "max_num_seqs": 3},
    {"max_num_batched_tokens": 13, "async_scheduling": "lookahead"},
    {"kv_blocks": 20, "block_size": 4},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("grammar") / "model"
    shutil.copytree(OURO, path)
    shutil.copy(resolve_model_dir("demo") / "tokenizer.json", path)
    yield path


def constrained_requests(**more: object) -> list[tuple[list[int], RequestParams]]:
    """Seven prompts; five constrained, at a temperature that makes draws wild."""
    return [
        (
            prompt,
            RequestParams(
                max_tokens=14, max_loops=4, stop_token_ids=EOS, temperature=1.5, seed=index,
                grammar=grammar_text(None, expression or None, ()), **more,  # type: ignore[arg-type]
            ),
        )
        for index, (prompt, expression) in enumerate(zip(prompts_of(OURO), EXPRESSIONS, strict=True))
    ]  # fmt: skip


def check_texts(model: Path, tokens: list[list[int]], reasons: list[str | None]) -> None:
    """Whole outputs match their expressions; cut ones are the beginning of a match (all characters are ASCII)."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ended = 0
    for expression, own, reason in zip(EXPRESSIONS, tokens, reasons, strict=True):
        text = tokenizer.decode(own, skip_special_tokens=True)
        if expression and reason == "stop":
            ended += 1
            assert re.fullmatch(expression, text), (expression, text)
        elif expression:
            assert len(own) == 14 and re.fullmatch(r"[a-c]*|\{\"a\": ?[0-9]*", text), (expression, text)
    assert ended >= 3


def run(model: Path, **options: object) -> tuple[LockstepEngine, list[Answer]]:
    running = engine(model, "last_exited", **options)
    return running, running.run(constrained_requests())


def test_a_grammar_holds_in_every_schedule(model: Path) -> None:
    """The same tokens under every policy, with chunks, stages in flight, and preemption, after which the matcher is
    told again what the request has said. The unconstrained neighbours say what they say without any grammar."""
    answers = []
    for options in SETTINGS:
        running, got = run(model, **options)
        assert (running.preemptions > 0) == ("kv_blocks" in options)
        check_texts(model, [answer.tokens for answer in got], [answer.finish_reason for answer in got])
        answers.append([(answer.tokens, answer.finish_reason) for answer in got])
    assert all(other == answers[0] for other in answers[1:])
    free = [
        (prompt, RequestParams(max_tokens=14, max_loops=4, stop_token_ids=EOS, temperature=1.5, seed=index))
        for index, (prompt, _) in enumerate(constrained_requests())
    ]
    running = engine(model, "last_exited")
    alone = [answer.tokens for answer in running.run(free)]
    assert not any(ran.header.variant & Variant.CONSTRAIN for ran in running.history)
    same = [mine == other for (mine, _), other in zip(answers[0], alone, strict=True)]
    assert same[1] and same[4] and sum(same) == 2


@pytest.mark.parametrize("seed", range(3))
def test_overlapped_runner_waits_for_the_tokens_that_masks_follow_from(model: Path, seed: int) -> None:
    """Graphs, staging ring and adversely interleaved lanes, stages far ahead: the tokens of the plain runner. A mask
    made before the token it follows from has come, or for the slot's former request, would give others."""
    _, want = run(model)
    config = engine(model, "last_exited", async_scheduling="lookahead")
    plain = config.built.runner
    runner = OverlappedRunner(plain.stages, plain.limits, AdverseAccelerator(seed), 8192, plain.grammars)
    submits = [
        Submit(index, np.array(prompt, np.int32).tobytes(), params)
        for index, (prompt, params) in enumerate(constrained_requests())
    ]
    got, deepest = serve(Scheduler(SchedulerConfig.resolve(config.config, config.built.info)), runner, submits)
    assert [got[index][0] for index in range(len(want))] == [answer.tokens for answer in want]
    assert deepest > 2


LATE = r"[0-9]{5}(a?){3000}a{3000}"  # the library gives up on it after five digits and an a


@pytest.mark.parametrize("options", SETTINGS)
def test_a_grammar_that_fails_later_is_told_and_disturbs_nobody(model: Path, options: dict[str, object]) -> None:
    """Bug: a grammar that gave up midway ended its text with "stop". The request ends with an error that says why, its
    slot and blocks are free again, and its neighbours say what they say beside the good grammar."""
    requests = constrained_requests()
    good = engine(model, "last_exited", **options).run(requests)
    requests[0] = (requests[0][0], structs.replace(requests[0][1], grammar=grammar_text(None, LATE, ())))
    got = engine(model, "last_exited", **options).run(requests)
    assert got[0].finish_reason == "error" and "too many expressions" in got[0].failure
    assert len(got[0].tokens) == 6
    assert [(a.tokens, a.finish_reason, a.failure) for a in got[1:]] == [
        (a.tokens, a.finish_reason, "") for a in good[1:]
    ]


def test_overlapped_runner_tells_of_a_grammar_that_fails(model: Path) -> None:
    """The same with stages far ahead: those in flight when a mask fails are run and their tokens dropped."""
    config = engine(model, "last_exited", async_scheduling="lookahead")
    plain = config.built.runner
    runner = OverlappedRunner(plain.stages, plain.limits, AdverseAccelerator(0), 8192, plain.grammars)
    scheduler = Scheduler(SchedulerConfig.resolve(config.config, config.built.info))
    requests = constrained_requests()
    requests[0] = (requests[0][0], structs.replace(requests[0][1], grammar=grammar_text(None, LATE, ())))
    submits = [Submit(i, np.array(p, np.int32).tobytes(), params) for i, (p, params) in enumerate(requests)]
    got, _ = serve(scheduler, runner, submits)
    good = engine(model, "last_exited").run(constrained_requests())
    assert len(got[0][0]) == 6 and scheduler.stats().finished["error"] == 1
    assert [got[index][0] for index in range(1, 7)] == [answer.tokens for answer in good[1:]]


def test_grammars_with_penalties_bias_and_logprobs(model: Path) -> None:
    """What a grammar forbids stays forbidden whatever is added to its logit, and logprobs still come."""
    bias = np.array([[50, np.float32(100).view(np.int32)]], np.int32).tobytes()
    answers = engine(model, "last_exited").run(
        constrained_requests(logit_bias=bias, presence_penalty=2.0, logprobs=True)
    )
    check_texts(model, [answer.tokens for answer in answers], [answer.finish_reason for answer in answers])
    assert all(answer.scores for answer in answers)


def test_without_a_tokenizer_a_grammar_is_refused() -> None:
    """The engine says that it has none, and the edge refuses, by the field."""
    running = engine(OURO, "last_exited")
    assert not running.built.info.grammars
    defaults = RequestDefaults(running.built.info, seed=0)
    with pytest.raises(RequestError) as refused:
        defaults.resolve(SamplingParams(max_tokens=1, regex="a"), 1, 0)
    assert refused.value.param == "regex"
    assert defaults.resolve(SamplingParams(max_tokens=1), 1, 0).grammar == ""
