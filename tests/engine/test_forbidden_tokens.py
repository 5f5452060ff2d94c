"""Bad words and allowed tokens of the whole engine against the batch-1 reference and a plain twin of vLLM's rules.

Which token a bad sequence forbids follows from the tokens before it, which under ``lookahead`` are on the device alone.
"""

import numpy as np
import pytest
from engine.test_lockstep import engine
from engine.test_logits import LAYOUT, OUTPUTS, Row, bias_bytes, full_depth_requests, reference_logits

from depthbatch.common.frames import BAD_SEQUENCE_TOKENS
from depthbatch.common.messages import RequestParams, Variant
from depthbatch.frontend.token_bans import allow_list
from fakes.bans import bad_rows
from reference.oracle import NEAR_TIE, OURO, R_MAX, prompts_of

FEW = (11, 12, 13)
SETTINGS = [
    {"async_scheduling": "off"},
    {"async_scheduling": "async"},
    {"async_scheduling": "lookahead"},
    {"max_num_batched_tokens": 13},
    {"policy": "no-refill", "max_num_seqs": 3},
    {"policy": "cb"},
    {"policy": "refill", "speculation": "2"},
    {"kv_blocks": 20, "block_size": 4},
]


def forbidden(logits: Row, output: list[int], allowed: tuple[int, ...], bad: list[list[int]]) -> Row:
    """The plain twin: what is not allowed, then the last token of each bad sequence whose others end the output."""
    x = logits.copy()
    if allowed:
        x[[token for token in range(len(x)) if token not in allowed]] = -np.inf
    left = x.copy()
    for *others, last in bad:
        if len(others) <= len(output) and output[len(output) - len(others) :] == others:
            left[last] = -np.inf
    return left if left.max() > -np.inf else x


def rules(free: list[list[int]], prompts: list[list[int]]) -> list[tuple[tuple[int, ...], list[list[int]]]]:
    """(allowed, bad sequences) of each prompt, made of what it answers when it is free, so that each rule bites."""
    a, b, c = FEW
    return [
        ((), [free[0][:1]]),
        ((), [free[1][1:3], free[1][:2]]),
        (FEW, [[a, a], [b, b], [c, c]]),
        ((), []),
        (FEW, [[a, b], [b, a], [a, a, a], [b, b, b], [c, c, c, c]]),
        ((), [[prompts[5][-1], free[5][0]], free[5][:OUTPUTS]]),  # of the prompt's last token nothing follows
        (FEW[:2], [[a], [b]]),  # nothing would be left
    ]


def batch_of(
    made: list[tuple[tuple[int, ...], list[list[int]]]], vocab: int, temperature: float = 0.0
) -> list[tuple[list[int], RequestParams]]:
    mixes: list[dict[str, object]] = [
        {
            "bad_sequences": bad_rows(bad),
            "allow_list": allow_list(allowed, vocab) if allowed else b"",
            "logit_bias": bias_bytes({FEW[0]: 5.0}) if index == 4 else b"",
        }
        for index, (allowed, bad) in enumerate(made)
    ]
    return full_depth_requests(mixes, temperature)


@pytest.fixture(scope="module")
def made() -> list[tuple[tuple[int, ...], list[list[int]]]]:
    prompts, vocab = prompts_of(OURO), len(reference_logits((1,)))
    free = engine(OURO, LAYOUT).run(batch_of([((), [])] * len(prompts), vocab))
    return rules([answer.tokens for answer in free], prompts)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_greedy_tokens_are_the_plain_twins(
    made: list[tuple[tuple[int, ...], list[list[int]]]], options: dict[str, object]
) -> None:
    """Each token maximises what the twin leaves, given the tokens before it: in every schedule, with prompts in chunks,
    slots used again and sequences that are preempted and rebuilt. Not luck: most tokens would be others."""
    vocab, differ = len(reference_logits((1,))), 0
    batch = batch_of(made, vocab)
    running = engine(OURO, LAYOUT, **options)
    answers = running.run(batch)
    for index, ((prompt, _), answer, (allowed, bad)) in enumerate(zip(batch, answers, made, strict=True)):
        assert len(answer.tokens) == OUTPUTS
        for place, token in enumerate(answer.tokens):
            raw = reference_logits(tuple(prompt + answer.tokens[:place])).copy()
            raw[FEW[0]] += 5.0 * (index == 4)
            want = forbidden(raw, answer.tokens[:place], allowed, bad)
            assert want.max() - want[token] < 2 * NEAR_TIE, (index, place, token)
            differ += raw.max() - raw[token] > 0.01
    assert differ > 15
    assert (running.preemptions > 0) == ("kv_blocks" in options)
    assert any(Variant.FORBID in ran.header.variant for ran in running.history)


def test_draws_keep_the_rules_and_do_not_depend_on_the_schedule(
    made: list[tuple[tuple[int, ...], list[list[int]]]],
) -> None:
    """Temperature 1: no bad sequence is in an output, whatever the setting, and the draws are the same in all."""
    batch = batch_of(made, len(reference_logits((1,))), temperature=1.0)
    tokens = [[answer.tokens for answer in engine(OURO, LAYOUT, **options).run(batch)] for options in SETTINGS]
    assert all(other == tokens[0] for other in tokens[1:])
    for output, (allowed, bad) in zip(tokens[0][:-1], made[:-1], strict=True):
        assert not allowed or set(output) <= set(allowed)
        for sequence in bad:
            starts = range(len(output) - len(sequence) + 1)
            assert not any(output[start : start + len(sequence)] == sequence for start in starts)


def test_the_longest_sequence_is_seen_whole() -> None:
    """16 tokens, the first of which lies 15 back: one more, or one fewer, and the last one is allowed."""
    a, b = FEW[:2]
    vocab = len(reference_logits((1,)))
    bad = [[a] * BAD_SEQUENCE_TOKENS, [b]]
    params = RequestParams(
        max_tokens=BAD_SEQUENCE_TOKENS + 3,
        max_loops=R_MAX[OURO],
        bad_sequences=bad_rows(bad),
        allow_list=allow_list((*FEW, 14), vocab),
        logit_bias=bias_bytes({a: 100.0}),
    )
    for mode in ("off", "lookahead"):
        (answer,) = engine(OURO, LAYOUT, async_scheduling=mode).run([(prompts_of(OURO)[0], params)])
        assert answer.tokens[: BAD_SEQUENCE_TOKENS - 1] == [a] * (BAD_SEQUENCE_TOKENS - 1)
        assert answer.tokens[BAD_SEQUENCE_TOKENS - 1] not in (a, b) and answer.tokens[BAD_SEQUENCE_TOKENS:] == [a] * 3
