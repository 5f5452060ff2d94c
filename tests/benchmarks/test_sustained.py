"""Rates at equal p99: the one figure by which policies are compared online."""

import pytest

from depthbatch.benchmarks.tables import compare, sustained_rate, sustained_table


def test_between_rates_latency_grows_exponentially() -> None:
    """p99 of 1, 4 and 16 s at rates 1, 2, 3: half way between them lies 2 s, then 8 s; nothing beyond
    the highest rate that was measured."""
    curve = [(1.0, 1.0), (2.0, 4.0), (3.0, 16.0)]
    assert [sustained_rate(curve, s) for s in (0.5, 1.0, 2.0, 8.0, 16.0, 99.0)] == pytest.approx(
        [0.5, 1, 1.5, 2.5, 3, 3]
    )


def test_a_bump_does_not_hide_a_higher_rate() -> None:
    assert sustained_rate([(1.0, 2.0), (2.0, 5.0), (3.0, 4.0), (4.0, 16.0)], 8.0) == pytest.approx(3.5)


def test_a_tie_is_no_miss() -> None:
    """Bug: where p99 fell from one rate to the next, a policy that was slower by a part in 10,000 there was said to sustain no
    more than the rate before the bump, 0.82 of the other's."""
    curve = [(0.5, 1.0), (0.6, 2.0), (0.7, 1.5001)]
    assert sustained_rate(curve, 1.5) == 0.7
    assert sustained_rate([*curve[:2], (0.7, 1.51)], 1.5) < 0.6


def test_auto_is_held_against_the_policy_that_sustains_most() -> None:
    """refill is better at 1 request/s, no-refill at 2; each latency is compared with the better one there."""
    p99 = {"no-refill": (2.0, 6.0), "refill": (1.0, 8.0), "auto": (1.0, 4.0)}
    rows = [
        {"axis_policy": name, "axis_rate": rate, "p99_normalized_latency_s": value, "normalized_latency_s": value / 2}
        for name, values in p99.items()
        for rate, value in zip((1.0, 2.0), values, strict=True)
    ]
    low, high = compare(rows)
    assert (low.fixed, low.p99_s, low.fixed_rate, low.our_rate) == ("refill", 1.0, 1.0, 1.0)
    assert (high.fixed, high.p99_s, high.fixed_rate, high.our_rate) == ("no-refill", 6.0, 2.0, 2.0)


def test_a_point_is_shown_with_its_spread_over_seeds() -> None:
    """With one seed a miss may be luck: auto's p99 is that of refill under seed 0, and reached at half the rate under 1."""
    rows = [
        {
            "axis_policy": name,
            "axis_exits": "q",
            "axis_seed": seed,
            "axis_rate": rate,
            "p99_normalized_latency_s": p99_s,
            "normalized_latency_s": 0.5 if name == "auto" else 1.0,
        }
        for seed in (0, 1)
        for name in ("refill", "auto")
        for rate, p99_s in ((1.0, 1.0), (2.0, 4.0 if name == "auto" and seed else 2.0))
    ]
    *_, low, high = sustained_table(rows).splitlines()
    same = "1.000 (1.000 to 1.000)"
    assert low == f"| q | 1 | refill | 1 | 1 | {same} | {same} | 0.500 (0.500 to 0.500) |"
    assert "| q | 2 | refill | 2 | 1.75 | 0.875 (0.750 to 1.000) | 1.500 (1.000 to 2.000) | 0.500" in high
    assert sustained_table(rows[:4]).splitlines()[-1] == "| q | 2 | refill | 2 | 2 | 1.000 | 1.000 | 0.500 |"
