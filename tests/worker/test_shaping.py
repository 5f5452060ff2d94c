"""Shaped logits and scores by themselves: plain arithmetic, exact neutrality, and rows that know nothing of each other."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.frames import (
    ADJUSTMENT_FIELDS,
    BAD_SEQUENCE_TOKENS,
    MAX_ADJUSTMENTS,
    SLOT_PARAMS,
    slot_param_words,
)
from depthbatch.worker.sampling.logits_processors import Shaping
from depthbatch.worker.sampling.logprobs import logprob_rows, num_likeliest
from depthbatch.worker.sampling.slot_params import SlotParams
from fakes.bans import bad_rows

VOCAB, SLOTS = 37, 6
CPU = torch.device("cpu")
Row = dict[str, float]

token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
penalties = st.tuples(
    st.sampled_from([0.0, 0.5, -2.0, 1.75]), st.sampled_from([0.0, 1.0, -0.25]), st.sampled_from([0.0, 1.0, 1.3, 0.6])
)


def params_of(rows: list[Row]) -> SlotParams:
    frame = np.zeros(len(rows), SLOT_PARAMS)
    for row, values in zip(frame, rows, strict=True):
        for name, value in values.items():
            row[name] = value
    return SlotParams(torch.from_numpy(slot_param_words(frame)))


def entries(slot: int, pairs: list[tuple[int, float]]) -> torch.Tensor:
    rows = [(slot, index, token, int(np.float32(value).view(np.int32))) for index, (token, value) in enumerate(pairs)]
    return torch.tensor(rows, dtype=torch.int32).view(-1, ADJUSTMENT_FIELDS)


def fill(shaping: Shaping, slot: int, prompt: list[int], output: list[int]) -> None:
    """As a resumed request does it: one chunk of prompt and output, then a last token of its own."""
    tokens = torch.tensor([*prompt, *output[:-1]], dtype=torch.int32)
    slots, starts = torch.tensor([slot]), torch.zeros(1, dtype=torch.int32)
    is_output = torch.arange(len(tokens)) >= len(prompt)
    shaping.note_prompt(slots, starts, torch.full((len(tokens),), slot), tokens, is_output)
    if output:
        shaping.note_output(slots, torch.tensor(output[-1:], dtype=torch.int32))


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.tuples(token_lists, token_lists, penalties), min_size=1, max_size=SLOTS),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.5, 0.25]), max_size=5),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=4),
    seed=st.integers(0, 1000),
)
def test_rows_are_shaped_as_written_down_and_alone(
    texts: list[tuple[list[int], list[int], tuple[float, float, float]]],
    bias: dict[int, float],
    stops: set[int],
    seed: int,
) -> None:
    """Against arithmetic token by token in float64; and bit for bit what each row gets in a batch of its own.

    Slots are filled twice, so what a former request left there would count if it were not forgotten; every second row
    is past its min_tokens.
    """
    logits = torch.randn(len(texts), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    shaping = Shaping(SLOTS + 1, VOCAB, CPU)
    pairs = [*bias.items(), *((token, -math.inf) for token in sorted(stops))]
    rows: list[Row] = []
    for slot, (prompt, output, (presence, frequency, repetition)) in enumerate(texts, start=1):
        fill(shaping, slot, output, prompt)
        fill(shaping, slot, prompt, output)
        shaping.set_adjustments(entries(slot, pairs))
        rows.append(
            {
                "presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition,
                "adjustments": len(pairs), "min_until": 10 + slot % 2,
            }
        )  # fmt: skip
    slots = torch.arange(1, len(texts) + 1)
    positions = torch.full((len(texts),), 10, dtype=torch.int32)
    got = shaping.apply(logits, slots, params_of(rows), positions)
    for index, (prompt, output, (presence, frequency, repetition)) in enumerate(texts):
        alone = shaping.apply(
            logits[index : index + 1], slots[index : index + 1], params_of(rows[index : index + 1]), positions[:1]
        )
        assert torch.equal(alone[0], got[index])
        for token in range(VOCAB):
            x = float(logits[index, token]) + bias.get(token, 0.0)
            if token in stops and (index + 1) % 2:
                assert got[index, token] == -math.inf
                continue
            if token in prompt or token in output:
                x = x / (repetition or 1.0) if x > 0 else x * (repetition or 1.0)
            x -= frequency * output.count(token) + presence * (token in output)
            assert float(got[index, token]) == pytest.approx(x, abs=1e-4)


def test_rows_that_ask_for_nothing_keep_their_bits() -> None:
    """Beside shaped rows, in slots whose tables and counts a former request has filled."""
    shaping = Shaping(3, VOCAB, CPU)
    for slot in (1, 2):
        fill(shaping, slot, [1, 2, 3], [4, 4, 5])
        shaping.set_adjustments(entries(slot, [(7, 5.0), (8, -math.inf)]))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    rows: list[Row] = [{}, {"presence_penalty": 1.0, "adjustments": 2, "min_until": 99}]
    shaped = shaping.apply(logits, torch.tensor([1, 2]), params_of(rows), torch.tensor([3, 3], dtype=torch.int32))
    assert torch.equal(shaped[0].view(torch.int32), logits[0].view(torch.int32))
    assert (shaped[1] != logits[1]).nonzero().flatten().tolist() == [4, 5, 7, 8]


def test_masks_allow_their_bits_and_free_rows_everything() -> None:
    """Bits of every word, the sign bit among them; the free row's slot still holds a mask that forbids all."""
    shaping = Shaping(3, 70, CPU)
    allowed = [0, 31, 32, 63, 69]
    mask = np.zeros(96, np.uint8)
    mask[allowed] = 1
    masks = torch.from_numpy(np.stack([np.packbits(mask, bitorder="little").view(np.int32), np.zeros(3, np.int32)]))
    shaping.set_allowed(torch.tensor([1, 2]), masks)
    logits = torch.randn(2, 70, generator=torch.Generator().manual_seed(2))
    got = shaping.constrain(logits, torch.tensor([1, 2]), params_of([{"constrained": 1}, {}]))
    assert got[0].isfinite().nonzero().flatten().tolist() == allowed
    assert torch.equal(got[0, allowed], logits[0, allowed]) and torch.equal(got[1], logits[1])


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_forbidden_tokens_are_those_of_a_plain_twin(data: st.DataObject) -> None:
    """Sequences of 1 to 16 tokens that the text ends with, or nearly; in prompts they do not count. A slot's ring and
    tables still hold a longer former request. Rows beside each other, and each alone; one row has an allow list."""
    few = st.integers(0, 3)
    shaping = Shaping(SLOTS + 1, VOCAB, CPU)
    rows: list[Row] = []
    texts = []
    for slot in (1, 2, 3):
        prompt = data.draw(st.lists(few, min_size=1, max_size=24))
        output = data.draw(st.lists(few, max_size=24))
        text, bad = prompt + output, []
        for length in data.draw(st.lists(st.integers(1, BAD_SEQUENCE_TOKENS), max_size=4)):
            changed = data.draw(st.integers(0, 2 * length))
            bad.append([token + (place == changed) for place, token in enumerate(text[len(text) - length + 1 :])])
            bad[-1].append(data.draw(few))
        table = [
            *bad,
            *([[0], [1]] if slot == 1 else []),
        ]  # what a former request has left behind the entries that count
        head = torch.tensor([[slot, index] for index in range(len(table))], dtype=torch.int32).view(-1, 2)
        tokens = torch.frombuffer(bytearray(bad_rows(table)), dtype=torch.int32) if table else head.view(-1)
        shaping.set_bad_sequences(torch.cat([head, tokens.view(len(table), -1)], 1) if table else head.new_empty(0, 18))
        for kept in (list(range(4)) * 12, text):
            slots = torch.full((len(kept),), slot)
            positions = torch.arange(len(kept), dtype=torch.int32)
            shaping.note_recent(
                slots, positions, torch.tensor(kept, dtype=torch.int32), torch.full_like(positions, len(kept))
            )
        mask = np.zeros(64, np.uint8)
        mask[[0, 2, 36]] = 1
        listed = np.packbits(mask, bitorder="little").view(np.int32)
        shaping.set_allow_lists(torch.tensor([[slot, *listed.tolist()]], dtype=torch.int32))
        rows.append({"num_bad_sequences": len(bad), "first_output": len(prompt), "allow_listed": int(slot == 2)})
        texts.append((prompt, output, bad))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    slots = torch.tensor([1, 2, 3])
    positions = torch.tensor([len(prompt) + len(output) for prompt, output, _ in texts], dtype=torch.int32)
    got = shaping.forbid(logits, slots, params_of(rows), positions)
    for index, (_, output, bad) in enumerate(texts):
        one = slice(index, index + 1)
        alone = shaping.forbid(logits[one], slots[one], params_of(rows[one]), positions[one])
        assert torch.equal(alone[0], got[index])
        want = logits[index].clone()
        if index == 1:
            want[[token for token in range(VOCAB) if token not in (0, 2, 36)]] = -math.inf
        for *others, last in bad:
            if len(others) <= len(output) and output[len(output) - len(others) :] == others:
                want[last] = -math.inf
        assert torch.equal(got[index], want)


def test_the_longest_sequence_is_seen_whole() -> None:
    """Its first token lies 15 back: with another one there it forbids nothing."""
    shaping = Shaping(2, VOCAB, CPU)
    output = list(range(1, BAD_SEQUENCE_TOKENS))
    tokens = torch.frombuffer(bytearray(bad_rows([[*output, 20], [7, *output[1:], 21]])), dtype=torch.int32)
    head = torch.tensor([[1, 0], [1, 1]], dtype=torch.int32)
    shaping.set_bad_sequences(torch.cat([head, tokens.view(2, -1)], 1))
    positions = torch.arange(3, 3 + len(output), dtype=torch.int32)
    slots = torch.ones(len(output), dtype=torch.int64)
    ends = torch.full_like(positions, 3 + len(output))
    shaping.note_recent(slots, positions, torch.tensor(output, dtype=torch.int32), ends)
    params = params_of([{"num_bad_sequences": 2, "first_output": 3}])
    got = shaping.forbid(torch.zeros(1, VOCAB), torch.tensor([1]), params, ends[:1])
    assert (got == -math.inf).nonzero().tolist() == [[0, 20]]


def test_bad_words_that_leave_nothing_are_let_through() -> None:
    """Both allowed tokens are bad: the allow list holds, and the row beside it, which may still choose, is held to its."""
    shaping = Shaping(3, VOCAB, CPU)
    head = torch.tensor([[1, 0], [1, 1], [2, 0]], dtype=torch.int32)
    tokens = torch.frombuffer(bytearray(bad_rows([[3], [4], [3]])), dtype=torch.int32).view(3, -1)
    shaping.set_bad_sequences(torch.cat([head, tokens], 1))
    shaping.set_allow_lists(torch.tensor([[1, 0b11000, 0], [2, 0b11000, 0]], dtype=torch.int32))
    rows: list[Row] = [{"num_bad_sequences": 2, "allow_listed": 1}, {"num_bad_sequences": 1, "allow_listed": 1}]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    got = shaping.forbid(logits, torch.tensor([1, 2]), params_of(rows), torch.zeros(2, dtype=torch.int32))
    assert [row.isfinite().nonzero().flatten().tolist() for row in got] == [[3, 4], [4]]
    assert torch.equal(got[0, 3:5], logits[0, 3:5]) and got[1, 4] == logits[1, 4]


def test_a_full_table_holds_the_last_entry() -> None:
    """MAX_ADJUSTMENTS entries fit, none of them spills into the next slot."""
    shaping = Shaping(3, MAX_ADJUSTMENTS + 5, CPU)
    shaping.set_adjustments(entries(1, [(token, 1.0) for token in range(MAX_ADJUSTMENTS)]))
    logits = torch.zeros(2, MAX_ADJUSTMENTS + 5)
    row: Row = {"adjustments": MAX_ADJUSTMENTS}
    got = shaping.apply(logits, torch.tensor([1, 2]), params_of([row, row]), torch.zeros(2, dtype=torch.int32))
    assert got[0].tolist() == [1.0] * MAX_ADJUSTMENTS + [0.0] * 5
    assert not got[1].any()


@pytest.mark.parametrize("vocab", [5, 20, 400])
def test_scores_are_log_softmax_and_the_best_in_order(vocab: int) -> None:
    """Large logits, where exponentials overflow unless the maximum is taken out; vocabularies smaller than the 20."""
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)) * 40 + 500
    tokens = torch.arange(9, dtype=torch.int32) % vocab
    rows = logprob_rows(logits, tokens)
    k = num_likeliest(vocab)
    assert rows.shape == (9, 1 + 2 * k) and k == min(vocab, 20)
    want = torch.log_softmax(logits.double(), -1)
    floats = rows.view(torch.float32)
    torch.testing.assert_close(floats[:, 0].double(), want.gather(1, tokens.long()[:, None])[:, 0], atol=1e-4, rtol=0)
    values, likeliest = want.topk(k)
    torch.testing.assert_close(floats[:, 1 + k :].double(), values, atol=1e-4, rtol=0)
    assert torch.equal(rows[:, 1 : 1 + k].long(), likeliest)
