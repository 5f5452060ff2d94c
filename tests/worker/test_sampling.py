"""Sampling: right distribution, exact greedy, and a draw that depends on nothing but (logits, parameters, seed, position)."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from depthbatch.common.frames import SLOT_PARAMS, slot_param_words
from depthbatch.worker.sampling.random_numbers import uniform
from depthbatch.worker.sampling.sampler import greedy_tokens, sample_tokens
from depthbatch.worker.sampling.slot_params import SlotParams

FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.5, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.3, 9, 0.85, 0.05),
    (1.0, 1, 1.0, 0.0),
    (0.9, 0, 1e-6, 0.0),
    (2.0, 7, 0.9, 0.9),
    (1.0, 1000, 1.0, 1.0),
]


def params(rows: list[tuple[float, int, float, float]], seeds: list[int]) -> SlotParams:
    """Parameters of rows (temperature, top_k, top_p, min_p)."""
    frame = np.zeros(len(rows), SLOT_PARAMS)
    names = ("temperature", "top_k", "top_p", "min_p")
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        frame[name] = values
    frame["seed_low"], frame["seed_high"] = np.array(seeds, np.int64).view(np.int32).reshape(-1, 2).T
    return SlotParams(torch.from_numpy(slot_param_words(frame)))


def distribution(
    logits: npt.NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    """The plain twin: one row, float64, step by step as vLLM documents it."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = list(order[: top_k or len(p)])
    q = p[kept] / p[kept].sum()
    if top_p < 1:
        kept = kept[: int(np.searchsorted(np.cumsum(q), top_p)) + 1]
    kept = [token for token in kept if p[token] >= min_p * p.max()]
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


def chi_square_limit(degrees: int) -> float:
    """Wilson-Hilferty quantile at 1e-5: with fixed seeds the test is deterministic, the limit says how far is too far."""
    return float(degrees * (1 - 2 / (9 * degrees) + 4.265 * (2 / (9 * degrees)) ** 0.5) ** 3)


@pytest.mark.parametrize("row", FILTERS)
def test_draws_follow_the_distribution_of_the_plain_twin(row: tuple[float, int, float, float]) -> None:
    """20,000 draws at different (seed, position); chi-square over the support, and no draw outside it.

    The twin knows nothing of sorting tricks or cumulated sums, and a filter that keeps one token more or less puts
    hundreds of draws where the twin has none (or none where it has some).
    """
    draws, vocab = 20_000, 24
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    rows = params([row] * draws, [index % 7 + (index % 3 << 40) for index in range(draws)])
    positions = torch.arange(draws, dtype=torch.int32)
    tokens = sample_tokens(logits.expand(draws, vocab), rows, positions, filtered=True)
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    expected = distribution(logits.numpy(), *row) * draws
    assert counts[expected == 0].sum() == 0
    support = expected > 0
    assert counts[support].min() > 0
    if support.sum() > 1:
        statistic = ((counts[support] - expected[support]) ** 2 / expected[support]).sum()
        assert statistic < chi_square_limit(int(support.sum()) - 1)


@pytest.mark.parametrize("row", FILTERS)
def test_each_draw_is_the_inverse_of_the_twins_distribution(row: tuple[float, int, float, float]) -> None:
    """Token by token: the first index whose cumulated probability exceeds the row's uniform number."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(200, 40, generator=generator) * 2
    rows = params([row] * 200, list(range(200)))
    positions = torch.arange(200, dtype=torch.int32) * 3
    tokens = sample_tokens(logits, rows, positions, filtered=True)
    numbers = uniform(rows.seed_low, rows.seed_high, positions, 0)
    for index in range(200):
        cumulated = np.cumsum(distribution(logits[index].numpy(), *row))
        number = float(numbers[index])
        if np.abs(cumulated - number).min() > 1e-5:  # nearer, and fp32 rounding may decide
            assert int(tokens[index]) == int(np.searchsorted(cumulated, number, side="right"))


def test_greedy_rows_are_exact_argmax_beside_sampled_ones() -> None:
    """Temperature 0 in a SAMPLE batch; every second row draws, and their draws differ from the argmax somewhere."""
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(5))
    rows = params([(0.0, 3, 0.5, 0.1) if index % 2 else (2.0, 0, 1.0, 0.0) for index in range(64)], [9] * 64)
    tokens = sample_tokens(logits, rows, torch.arange(64, dtype=torch.int32), filtered=True)
    greedy = greedy_tokens(logits)
    assert torch.equal(tokens[1::2], greedy[1::2])
    assert not torch.equal(tokens[0::2], greedy[0::2])


def test_a_draw_does_not_depend_on_neighbours_batch_or_the_filtered_form() -> None:
    """A row alone, the same row in batches of any size and place, and through the unfiltered form: one token."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(33, 300, generator=generator) * 2
    kinds = [FILTERS[index % len(FILTERS)] for index in range(33)]
    seeds = [index * 77 for index in range(33)]
    positions = torch.arange(33, dtype=torch.int32) + 5
    whole = sample_tokens(logits, params(kinds, seeds), positions, filtered=True)
    order = torch.randperm(33, generator=generator)
    shuffled = params([kinds[index] for index in order], [seeds[index] for index in order])
    assert torch.equal(sample_tokens(logits[order], shuffled, positions[order], filtered=True), whole[order])
    for index in range(33):
        alone = params([kinds[index]], [seeds[index]])
        pick = slice(index, index + 1)
        assert torch.equal(sample_tokens(logits[pick], alone, positions[pick], filtered=True), whole[pick])
        if kinds[index][1:] == (0, 1.0, 0.0):
            assert torch.equal(sample_tokens(logits[pick], alone, positions[pick], filtered=False), whole[pick])


def test_draws_change_with_seed_and_with_position() -> None:
    """Flat logits over 10,000 tokens: equal tokens for different seeds or positions would be a coincidence of 1e-4 each."""
    logits = torch.zeros(3, 10_000)
    rows = params([(1.0, 0, 1.0, 0.0)] * 3, [1, 1 << 33, 1])
    tokens = sample_tokens(logits, rows, torch.tensor([4, 4, 5], dtype=torch.int32), filtered=False)
    assert len(set(tokens.tolist())) == 3


def test_parameter_columns_carry_float_bits() -> None:
    """The frame's float columns are bits; a value cast instead of reinterpreted would read 0.7 as 1060320051."""
    from depthbatch.worker.slots import SlotState
    from fakes.worker import tiny_spec

    state = SlotState(2, 1, tiny_spec(), torch.device("cpu"))
    row = np.zeros(1, SLOT_PARAMS)
    row["slot"], row["top_k"], row["seed_high"] = 2, 5, -3
    row["temperature"], row["min_p"] = 0.7, 0.25
    state.set_params(torch.tensor(slot_param_words(row)))
    got = state.gather_params(torch.tensor([2, 1]))
    assert got.temperature.tolist() == [np.float32(0.7), 0.0] and got.min_p.tolist() == [0.25, 0.0]
    assert got.top_k.tolist() == [5, 0] and got.seed_high.tolist() == [-3, 0]
