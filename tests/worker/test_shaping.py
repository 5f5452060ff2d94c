"""Shaped logits and scores by themselves: plain arithmetic, exact neutrality, and rows that know nothing of each other."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.frames import ADJUSTMENT_FIELDS, MAX_ADJUSTMENTS, SLOT_PARAMS, slot_param_words
from depthbatch.worker.sampling.logits_processors import Shaping
from depthbatch.worker.sampling.logprobs import logprob_rows, num_likeliest
from depthbatch.worker.sampling.slot_params import SlotParams

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
