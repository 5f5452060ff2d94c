"""What auto learns online: hazards from depths, fixed costs from stage times, the flow of prompts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.frames import Stage
from depthbatch.scheduler.policy.auto import _Flow
from depthbatch.scheduler.policy.cost_model import LinearFit, StageCosts
from depthbatch.scheduler.policy.exit_forecast import ExitForecast
from depthbatch.scheduler.policy.observed import Observed
from depthbatch.scheduler.policy.view import RetiredStage
from fakes.small_engine import BASE


@given(weights=st.lists(st.integers(0, 9), min_size=2, max_size=12).filter(any), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_forecast_is_the_conditional_distribution(weights: list[int], seed: int) -> None:
    """Against the definition: P(depth = l + s | depth > l) and P(depth = l + s | depth > l + 1), from the depths given."""
    r_max, width = len(weights), 8
    forecast = ExitForecast(width, r_max)
    rng = np.random.default_rng(seed)
    seen = rng.choice(np.arange(1, r_max + 1), (forecast.capacity // width, width), p=np.array(weights) / sum(weights))
    for row in seen:
        forecast.add(np.arange(1, width + 1), tuple(row.tolist()))
    forecast.refresh()
    for loops in range(r_max):
        beyond = seen[seen > loops]
        later = seen[seen > loops + 1]
        for step in range(1, r_max - loops + 1):
            if beyond.size > 200:
                assert forecast.blind[loops, step - 1] == pytest.approx(np.mean(beyond == loops + step), abs=0.01)
            if later.size > 200:
                assert forecast.stay[loops, step - 1] == pytest.approx(np.mean(later == loops + step), abs=0.01)


def test_forecast_forgets() -> None:
    """Traffic that changes its depths is forecast by the new ones once the memory has turned over."""
    forecast = ExitForecast(4, 4)
    for depth in (2, 3):
        for _ in range(forecast.capacity // 4):
            forecast.add(np.arange(1, 5), (depth,) * 4)
    forecast.refresh()
    assert forecast.mean_depth == 3.0
    assert forecast.blind[0].tolist() == pytest.approx([0, 0, 1, 0], abs=0.01)


def test_a_stage_may_bring_several_depths_of_a_slot() -> None:
    """With drafts: written to one place, all but the last of them would be lost."""
    forecast = ExitForecast(3, 4)
    forecast.add(np.array([2, 1, 2, 2]), (1, 4, 2, 3))
    forecast.add(np.array([2]), (4,))
    forecast.refresh()
    sequences = forecast.sequences(1)
    assert sequences is not None and sequences.tolist() == [[1, 2, 3, 4]]
    assert forecast.tokens == 5 and forecast.mean_depth == 14 / 5


def test_sequences_keep_each_slots_order() -> None:
    """The tournament replays what is alike about neighbours; shuffled depths would lose it."""
    forecast = ExitForecast(2, 9)
    assert forecast.sequences(2) is None
    for depth in (1, 2, 3, 4, 5):
        forecast.add(np.array([2]), (depth,))
    forecast.refresh()
    sequences = forecast.sequences(2)
    assert sequences is not None
    for row in sequences.tolist():
        assert sorted(row) == [1, 2, 3, 4, 5]
        assert sum((b - a) % 5 == 1 for a, b in pairwise(row)) == 4


@given(
    delta=st.floats(1e-4, 1e-2),
    gamma=st.floats(1e-6, 1e-3),
    alpha=st.floats(1e-8, 1e-5),
    seed=st.integers(0, 999),
)
@settings(max_examples=25, deadline=None)
def test_fit_recovers_costs_from_noisy_stages(delta: float, gamma: float, alpha: float, seed: int) -> None:
    """200 stages with 1 % noise, and a few that were interrupted and took 20 times as long: delta within 15 % wherever
    it is a fair share of the time (else it does not matter)."""
    rng = np.random.default_rng(seed)
    fit = LinearFit(2)
    for i in range(200):
        rows, tokens = int(rng.integers(1, 65)), int(rng.integers(100, 30_000))
        seconds = (delta + gamma * rows + alpha * tokens) * rng.normal(1.0, 0.01)
        fit.add((rows, tokens), seconds * (20.0 if i > 50 and i % 40 == 0 else 1.0))
        if i == 50:
            fit.solve()
    typical = delta + gamma * 32 + alpha * 15_000
    solved = fit.solve()
    assert solved is not None
    assert abs(solved - delta) < max(0.15 * delta, 0.02 * typical)


def test_fit_follows_a_device_that_has_become_slower() -> None:
    """Ten times slower for good (a clock limit): a filter of outliers alone would refuse every sample from then on."""
    fit = LinearFit(1)
    for factor in (1.0, 10.0, 10.0, 10.0):
        for rows in range(1, 400):
            fit.add((rows % 64,), factor * (1e-3 + 1e-5 * (rows % 64)))
        solved = fit.solve()
    assert solved == pytest.approx(1e-2, rel=0.2)


def test_samples_that_nobody_asks_for_do_not_pile_up() -> None:
    """Traffic of prefills alone never refits."""
    fit = LinearFit(1)
    for _ in range(20_000):
        fit.add((1,), 1e-3)
    fit.solve()
    assert fit.samples <= 4096


def test_costs_that_never_varied_are_split_by_the_prior() -> None:
    """With one batch size only, delta cannot be known; it must come out between 0 and the whole, never negative or huge."""
    costs = StageCosts()
    for _ in range(50):
        costs.add(Stage.CORE, 64, 64, 10_000, 0.01)
        costs.add(Stage.CODA, 64, 64, 0, 0.002)
    costs.refit()
    assert costs.decode is None and costs.prefill_delta is None  # no prelude, no prefill yet
    costs.add(Stage.PRELUDE, 64, 64, 0, 0.001)
    costs.refit()
    assert costs.decode is None  # one sample says nothing
    for _ in range(5):
        costs.add(Stage.PRELUDE, 64, 64, 0, 0.001)
    costs.refit()
    assert costs.decode is not None and 0.0 <= costs.decode.core_delta <= 0.01
    assert 0.0 <= costs.decode.boundary_delta <= 0.003


def test_padded_rows_are_told_from_rows() -> None:
    """Time that follows the bucket (what CPU and CUDA graphs do), and time that follows the rows (what a profile says)."""
    for slope_rows, slope_padded in ((0.0, 2e-4), (2e-4, 0.0)):
        fit = LinearFit(2, padded=True)
        for rows in range(1, 65):
            padded = next(bucket for bucket in (1, 2, 4, 8, 16, 32, 64) if bucket >= rows)
            fit.add((rows, padded), 1e-3 + slope_rows * rows + slope_padded * padded)
        fit.solve()
        assert fit.coefficients == pytest.approx([1e-3, slope_rows, slope_padded], rel=0.1, abs=2e-6)


def test_one_bucket_leaves_its_share_to_delta() -> None:
    """Padded rows that never vary cannot be told from a fixed cost; splitting them would halve delta."""
    fit = LinearFit(2, padded=True)
    for rows in range(1, 65):
        fit.add((rows, 64), 1e-3 + 1e-5 * rows)
    assert fit.solve() == pytest.approx(1e-3, rel=0.02)
    assert fit.coefficients is not None and fit.coefficients[-1] == 0.0


def flow(prompt_tokens: int) -> _Flow:
    """W = 16; a prompt and a coda every four core steps."""
    passed = _Flow(16)
    for _ in range(17):
        for stage, tokens in [(Stage.CORE, 0)] * 4 + [(Stage.CODA, 0), (Stage.PREFILL, prompt_tokens)]:
            passed.add(RetiredStage(stage, 1, np.arange(1, 2), (4,), tokens, (), False, 0.0, 0.0))
    return passed


def test_prefill_batch_is_the_order_quantity_while_prompts_fit() -> None:
    """phi = 1/4, kappa = (1 + 0.25 * 4) / 16 = 1/8: sqrt(2 * 10 / 4 * 8) = 6.3 prompts, however short they are."""
    assert flow(100).prefill_batch(1.0, 4.0, 10.0, 8192) == 6
    assert flow(1).prefill_batch(1.0, 4.0, 0.01, 8192) == 1


def test_long_prompts_share_batches_by_being_cut() -> None:
    """Prompts of 7,000 tokens in batches of 8,192: one at a time takes a batch each, 7 take 6 batches. 20 (ceil(S 7/8.2) / S)
    + S / 4 is 20.25 at S = 1 and 18.89 at S = 7. A rule that takes whole prompts only would say 1."""
    assert flow(7_000).prefill_batch(1.0, 4.0, 20.0, 8192) == 7
    assert flow(8_192).prefill_batch(1.0, 4.0, 20.0, 8192) == 1  # nothing to share


def test_copies_before_a_stage_are_not_its_cost() -> None:
    """Bug: the time in which a victim's K/V came back was learned as the cost of the prefill that gave it a slot. What the
    device waited beside that is."""
    observed = Observed(BASE)
    first = RetiredStage(Stage.PREFILL, 1, np.array([1]), (4,), 10, (), False, 0.0, 1.0)
    assert observed.add(first) == 1.0
    assert observed.add(first._replace(start_s=3.0, end_s=4.0, moved_s=1.5)) == 1.5
