"""Generated workloads have the paper's statistics; a pass is not luck: 40,000 requests put the standard error of each
mean below a third of its tolerance, and every seed must pass."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.benchmarks import synthetic
from depthbatch.common.errors import ConfigError

# workload: mean prompt, mean output, prompt p99 (Appendix C.1)
PAPER = {"sharegpt": (267, 311, 3264), "alpaca": (18, 60, 75), "arxiv": (6989, 370, None)}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PAPER)
def test_lengths_match_appendix_c(name: str, seed: int) -> None:
    prompt, output = synthetic.draw_lengths(name, 40_000, np.random.default_rng(seed))
    mean_prompt, mean_output, p99 = PAPER[name]
    assert prompt.mean() == pytest.approx(mean_prompt, rel=0.05)
    assert output.mean() == pytest.approx(mean_output, rel=0.03)
    if p99:
        assert np.percentile(prompt, 99) == pytest.approx(p99, rel=0.08)
    else:
        assert np.median(prompt) == pytest.approx(6436, rel=0.02)
        assert np.median(output) == pytest.approx(199, rel=0.03)
    assert min(prompt.min(), output.min()) >= 4
    assert (prompt + output).max() <= 16_384


@given(
    weights=st.dictionaries(st.integers(1, 32), st.floats(0.05, 1.0), min_size=1, max_size=8),
    stickiness=st.floats(0.0, 0.9),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30, deadline=None)
def test_stickiness_leaves_the_marginal_alone(weights: dict[int, float], stickiness: float, seed: int) -> None:
    """Guards against a chain whose long-run mix is not the distribution asked for. The tolerance is six standard
    errors of a chain with this stickiness, so a wrong marginal of even a few percent fails."""
    counts = np.full(400, 250)
    depths = np.concatenate(synthetic.draw_exit_depths(counts, weights, np.random.default_rng(seed), stickiness))
    total = sum(weights.values())
    effective = counts.sum() * (1 - stickiness) / (1 + stickiness)
    for depth, weight in weights.items():
        p = weight / total
        assert abs((depths == depth).mean() - p) < 6 * np.sqrt(p * (1 - p) / effective) + 1e-9


def test_neighbouring_tokens_are_as_alike_as_stickiness_says() -> None:
    """P(same as predecessor) = s + (1 - s) sum p^2; a generator without correlation would give 0.42, not 0.65."""
    exits = {2: 0.5, 3: 0.4, 4: 0.1}
    depths = synthetic.draw_exit_depths(np.full(100, 2_000), exits, np.random.default_rng(3), stickiness=0.4)
    same = np.mean([np.mean(row[1:] == row[:-1]) for row in depths])
    assert same == pytest.approx(0.4 + 0.6 * 0.42, abs=0.01)


def test_sequences_are_independent_of_each_other() -> None:
    """A sequence's first token must not continue the previous sequence: with length 1 nothing is sticky."""
    depths = np.concatenate(
        synthetic.draw_exit_depths(np.ones(50_000, int), {2: 0.5, 3: 0.5}, np.random.default_rng(0), 0.9)
    )
    assert np.mean(depths[1:] == depths[:-1]) == pytest.approx(0.5, abs=0.02)


def test_exit_tables_are_distributions_in_range() -> None:
    for table, r_min, r_max, fewest in ((synthetic.OURO_EXITS, 2, 4, 3), (synthetic.HUGINN_EXITS, 7, 16, 4)):
        for threshold, weights in table.items():
            assert sum(weights.values()) == pytest.approx(1.0)
            assert r_min <= min(weights) and max(weights) <= r_max
            assert len(weights) >= fewest or threshold in (0.0, 1.0)


@pytest.mark.parametrize("bad", [{}, {"0": 1}, {"2": -1}, {"x": 1}, {"2": 0}, {"300": 1}, [1, 2]])
def test_bad_distributions_are_refused_by_name(bad: object) -> None:
    with pytest.raises(ConfigError, match="exit distribution"):
        synthetic.parse_distribution(bad)  # type: ignore[arg-type]


def test_unknown_workload_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown workload 'alpacca'"):
        synthetic.draw_lengths("alpacca", 1, np.random.default_rng(0))
