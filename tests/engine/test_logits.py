"""Logprobs and shaped logits of the whole engine against the batch-1 reference and plain numpy arithmetic.

Every request runs at full depth, where a token's logits are those of a prefill over the text before it: the oracle is
one reference prefill a token, a log-softmax, and penalties written down as vLLM documents them.
"""

from collections import deque
from functools import cache

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from engine.test_lockstep import engine

from depthbatch.common.frames import MAX_LOGPROBS, logprob_fields
from depthbatch.common.messages import RequestParams, StageBatch, StageResult, Submit, Variant
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from fakes.lockstep import Answer
from reference import ouro
from reference.oracle import NEAR_TIE, OURO, R_MAX, prompts_of

LAYOUT = "last_exited"
OUTPUTS = 7
Row = npt.NDArray[np.float64]


@cache
def reference_logits(ids: tuple[int, ...]) -> Row:
    """fp32 logits after ``ids``, by the oracle."""
    return ouro.generate(OURO, ids, 1, LAYOUT, r_max=R_MAX[OURO]).logits[0].double().numpy()


def log_softmax(logits: Row) -> Row:
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def rows_of(scores: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(scores, np.int32).reshape(-1, logprob_fields(MAX_LOGPROBS))


def check_scores(scores: bytes, prompt: list[int], tokens: list[int], first: int) -> None:
    """Rows of scores for tokens first .. of prompt + tokens: own logprob, the 20 best in order, within 1e-4."""
    text = prompt + tokens
    rows = rows_of(scores)
    for row, place in zip(rows, range(first, first + len(rows)), strict=True):
        want = log_softmax(reference_logits(tuple(text[:place])))
        floats = row.view(np.float32)
        assert abs(floats[0] - want[text[place]]) < 1e-4
        np.testing.assert_allclose(floats[1 + MAX_LOGPROBS :], np.sort(want)[::-1][:MAX_LOGPROBS], atol=1e-4)
        np.testing.assert_allclose(want[row[1 : 1 + MAX_LOGPROBS]], floats[1 + MAX_LOGPROBS :], atol=1e-4)
        assert len(set(row[1 : 1 + MAX_LOGPROBS].tolist())) == MAX_LOGPROBS


def bias_bytes(bias: dict[int, float]) -> bytes:
    rows = np.array([(token, np.float32(value).view(np.int32)) for token, value in bias.items()], np.int32)
    return rows.tobytes()


def shaped(logits: Row, prompt: list[int], output: list[int], params: RequestParams) -> Row:
    """The plain twin: additions, then the repetition penalty, then frequency and presence."""
    x = logits.copy()
    pairs = np.frombuffer(params.logit_bias, np.int32).reshape(-1, 2)
    for token, bits in pairs.tolist():
        x[token] += float(np.int32(bits).view(np.float32))
    if len(output) < params.min_tokens:
        x[list(params.stop_token_ids)] = -np.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def requests(logprobs: bool = False, temperature: float = 0.0) -> list[tuple[list[int], RequestParams]]:
    """Seven prompts, each with another mix of penalties; two of them plain neighbours."""
    mixes: list[dict[str, object]] = [
        {"presence_penalty": 2.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.8},
        {},
        {"logit_bias": bias_bytes({7: 3.0, 9: 100.0, 11: -100.0}), "frequency_penalty": 2.0},
        {"repetition_penalty": 0.7, "presence_penalty": -2.0},
        {},
        {"frequency_penalty": -1.0, "repetition_penalty": 1.2, "logit_bias": bias_bytes({3: 2.0})},
    ]
    for index, mix in enumerate(mixes):
        mix |= {"logprobs": logprobs and index % 2 == 0, "prompt_logprobs": logprobs and index % 3 == 0}
    return full_depth_requests(mixes, temperature)


def full_depth_requests(
    mixes: list[dict[str, object]], temperature: float = 0.0
) -> list[tuple[list[int], RequestParams]]:
    """The prompts, each with a mix of parameters and its index as the seed."""
    common: dict[str, object] = {"max_tokens": OUTPUTS, "max_loops": R_MAX[OURO], "temperature": temperature}
    return [
        (prompt, RequestParams(**common, **mix, seed=index))  # type: ignore[arg-type]
        for index, (prompt, mix) in enumerate(zip(prompts_of(OURO), mixes, strict=True))
    ]


SETTINGS = [
    {"policy": "refill"},
    {"policy": "cb"},
    {"policy": "no-refill", "max_num_seqs": 3},
    {"max_num_batched_tokens": 13},
    {"async_scheduling": "lookahead"},
    {"kv_blocks": 20, "block_size": 4},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_shaped_greedy_tokens_are_the_plain_twins(options: dict[str, object]) -> None:
    """Each token maximises the twin's shaped logits, given the tokens before it, in every schedule.

    Not luck: without the penalties most requests say something else, which is checked; chunks, preemption (which
    happens in the last setting) and slots used again must each rebuild or forget the counts.
    """
    batch = requests()
    running = engine(OURO, LAYOUT, **options)
    answers = running.run(batch)
    differ = 0
    for (prompt, params), answer in zip(batch, answers, strict=True):
        assert len(answer.tokens) == OUTPUTS
        for place, token in enumerate(answer.tokens):
            raw = reference_logits(tuple(prompt + answer.tokens[:place]))
            want = shaped(raw, prompt, answer.tokens[:place], params)
            assert want.max() - want[token] < 2 * NEAR_TIE, (place, token)
            differ += params.changes_logits and raw.max() - raw[token] > 0.01
    assert differ > 12
    assert (running.preemptions > 0) == ("kv_blocks" in options)


def test_shaped_draws_do_not_depend_on_the_schedule() -> None:
    """Temperature 1 with penalties: a draw is a function of the request's own text, seed and place in every setting."""
    batch = requests(temperature=1.0)
    tokens = [[answer.tokens for answer in engine(OURO, LAYOUT, **options).run(batch)] for options in SETTINGS]
    assert all(other == tokens[0] for other in tokens[1:])
    plain = [
        (prompt, RequestParams(max_tokens=OUTPUTS, max_loops=4, temperature=1.0, seed=i))
        for i, (prompt, _) in enumerate(batch)
    ]
    unshaped = [answer.tokens for answer in engine(OURO, LAYOUT).run(plain)]
    same = [mine == other for mine, other in zip(tokens[0], unshaped, strict=True)]
    assert same[2] and same[5] and sum(same) <= 3  # the plain neighbours draw as if they were alone


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_logprobs_are_the_references(options: dict[str, object]) -> None:
    """Raw log-softmax of output and prompt tokens, for those requests alone that asked, penalties or not; each once,
    in order, through chunks and recomputation."""
    batch = requests(logprobs=True)
    answers = engine(OURO, LAYOUT, **options).run(batch)
    for (prompt, params), answer in zip(batch, answers, strict=True):
        assert len(rows_of(answer.scores)) == (OUTPUTS if params.logprobs else 0)
        assert len(rows_of(answer.prompt_scores)) == (len(prompt) - 1 if params.prompt_logprobs else 0)
        check_scores(answer.scores, prompt, answer.tokens, len(prompt))
        check_scores(answer.prompt_scores, prompt, answer.tokens, 1)


def test_min_tokens_holds_stop_tokens_off() -> None:
    """The three likeliest first tokens are stop tokens: without min_tokens the request ends at once, with it the first
    tokens are others, and after it a stop token ends the request again."""
    prompt = prompts_of(OURO)[0]
    best = np.argsort(-reference_logits(tuple(prompt)))[:3].tolist()
    fields = {"max_tokens": 6, "max_loops": 4, "stop_token_ids": tuple(best), "logit_bias": bias_bytes({best[0]: 60.0})}
    ends, held = engine(OURO, LAYOUT).run(
        [(prompt, RequestParams(**fields)), (prompt, RequestParams(min_tokens=3, **fields))]
    )
    assert (ends.tokens, ends.finish_reason) == ([best[0]], "stop")
    assert not set(held.tokens[:3]) & set(best)
    assert (held.tokens[3:], held.finish_reason) == ([best[0]], "stop")


def test_batches_that_ask_for_nothing_pay_nothing() -> None:
    """Ordinary requests after shaped and scored ones in the same slots: no stage carries a bit or an extra of theirs."""
    running = engine(OURO, LAYOUT)
    running.run(requests(logprobs=True))
    extras = Variant.LOGITS | Variant.LOGPROBS
    assert any(ran.header.variant & extras for ran in running.history)
    running.history.clear()
    running.run([(prompt, RequestParams(max_tokens=3, max_loops=4)) for prompt, _ in requests()])
    headers: list[StageBatch] = [ran.header for ran in running.history]
    assert headers and not any(header.variant or header.extra for header in headers)


@pytest.mark.parametrize("lost_after", [1, 4, 9, 15])
def test_a_new_worker_rebuilds_counts_and_scores_each_token_once(lost_after: int) -> None:
    """The worker is replaced after some stages, mid-prompt ones among them: tokens and scores are those of a quiet run.

    The new worker's slots hold no counts and other requests, so what is not rebuilt from the prefill would show; a
    score that was lost on the way, or sent twice, would shift all later ones.
    """
    options = {"max_num_batched_tokens": 13, "async_scheduling": "lookahead"}
    batch = requests(logprobs=True)
    want = engine(OURO, LAYOUT, **options).run(batch)
    workers = [engine(OURO, LAYOUT, **options) for _ in range(2)]
    scheduler = Scheduler(SchedulerConfig.resolve(workers[0].config, workers[0].built.info))
    for index, (prompt, params) in enumerate(batch):
        assert scheduler.submit(Submit(index, np.array(prompt, np.int32).tobytes(), params)) is None
    answers = [Answer() for _ in batch]
    for now, worker in enumerate(workers):
        results: deque[StageResult] = deque()
        dispatched = 0
        while scheduler.num_unfinished and (now or dispatched < lost_after):
            stage = scheduler.next_stage(float(now))
            if stage is not None:
                results.append(worker.built.runner.run(stage.header, stage.frame, stage.slot_params))
                dispatched += 1
                continue
            for event in scheduler.complete(results.popleft(), float(now)):
                answers[event.request_id].tokens += event.token_ids
                answers[event.request_id].scores += event.logprobs
                answers[event.request_id].prompt_scores += event.prompt_logprobs
        if not now:
            assert results, "nothing was in flight when the worker was lost"
            scheduler.recover()
    for mine, other in zip(answers, want, strict=True):
        assert mine.tokens == other.tokens
        for a, b in ((mine.scores, other.scores), (mine.prompt_scores, other.prompt_scores)):
            np.testing.assert_allclose(rows_of(a).view(np.float32)[:, 0], rows_of(b).view(np.float32)[:, 0], atol=1e-4)


def test_a_resubmitted_request_is_scored_from_where_it_was() -> None:
    """After a crash of the scheduler: a prompt of which 20 tokens had been scored, and one that has generated."""
    prompt, params = prompts_of(OURO)[2], requests()[0][1]
    params = msgspec.structs.replace(params, prompt_logprobs=True, logprobs=True)
    want = engine(OURO, LAYOUT).run([(prompt, params)])[0]
    running = engine(OURO, LAYOUT)
    scheduler = Scheduler(SchedulerConfig.resolve(running.config, running.built.info))
    data = np.array(prompt, np.int32).tobytes()
    assert scheduler.submit(Submit(0, data, params, prompt_logprobs_sent=20)) is None
    said, depths = np.array(want.tokens[:3], np.int32).tobytes(), bytes(want.depths[:3])
    again = Submit(1, data, params, generated=said, generated_depths=depths, prompt_logprobs_sent=len(prompt) - 1)
    assert scheduler.submit(again) is None
    tokens, scores, prompt_scores = [[], want.tokens[:3]], [b"", b""], [b"", b""]
    while scheduler.num_unfinished:
        stage = scheduler.next_stage(0.0)
        assert stage is not None
        result = running.built.runner.run(stage.header, stage.frame, stage.slot_params)
        for event in scheduler.complete(result, 0.0):
            tokens[event.request_id] += event.token_ids
            scores[event.request_id] += event.logprobs
            prompt_scores[event.request_id] += event.prompt_logprobs
    assert tokens == [want.tokens, want.tokens]
    check_scores(prompt_scores[0], prompt, want.tokens, 21)
    assert len(rows_of(prompt_scores[0])) == len(prompt) - 21 and not prompt_scores[1]
    check_scores(scores[1], prompt, want.tokens, len(prompt) + 3)
    assert len(rows_of(scores[1])) == OUTPUTS - 3
