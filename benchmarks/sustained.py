"""Which request rate a policy sustains at a given p99 normalized latency, from the rows of a serving sweep.

A policy's p99 is measured at the sweep's rates; between them it is interpolated, on a logarithmic scale as latencies
rise steeply near saturation. Where several rates give the same latency the highest counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Row = Mapping[str, Any]
OURS = "auto"
_P99 = "p99_normalized_latency_s"


class Comparison(NamedTuple):
    """At the p99 of the best fixed policy at some rate."""

    p99_s: float
    fixed: str  # the policy that sustains most there
    fixed_rate: float
    our_rate: float


def sustained_rate(curve: Sequence[tuple[float, float]], level_s: float) -> float:
    """The highest rate whose p99 is at most ``level_s``. Below the lowest rate measured the curve is continued, but not
    below 0; never beyond the highest one. ``curve``: two rates or more, ascending, with their p99 in seconds."""
    rates = [rate for rate, _ in curve]
    logs, level = np.log([p99_s for _, p99_s in curve]), np.log(level_s)
    within = np.flatnonzero(logs <= level + 1e-9)
    if not within.size:
        slope = max((logs[1] - logs[0]) / (rates[1] - rates[0]), 1e-12)
        return max(0.0, float(rates[0] - (logs[0] - level) / slope))
    last = int(within[-1])
    if last == len(rates) - 1:
        return float(rates[last])
    share = (level - logs[last]) / (logs[last + 1] - logs[last])
    return float(rates[last] + max(share, 0.0) * (rates[last + 1] - rates[last]))


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """One comparison at every latency that the best fixed policy has at a measured rate. ``rows``: one setting but for
    policy and rate."""
    by_policy: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["axis_rate"] is not None:
            by_policy.setdefault(row["axis_policy"], []).append((row["axis_rate"], row[_P99]))
    curves = {name: sorted(points) for name, points in by_policy.items()}
    ours = curves.pop(OURS)
    out = []
    for at in range(len(ours)):
        level_s = min(curve[at][1] for curve in curves.values())
        rates = {name: sustained_rate(curve, level_s) for name, curve in curves.items()}
        best = max(rates, key=lambda name: rates[name])
        out.append(Comparison(level_s, best, rates[best], sustained_rate(ours, level_s)))
    return out


def table(rows: Sequence[Row]) -> str:
    """Markdown: for every threshold, the rates that auto and the best fixed policy sustain at equal p99."""
    lines = ["| exits | p99 normalized latency (s) | best fixed | its rate | rate of auto | |", "|---" * 6 + "|"]
    for exits in dict.fromkeys(row["axis_exits"] for row in rows):
        for c in compare([row for row in rows if row["axis_exits"] == exits]):
            cells = [exits, f"{c.p99_s:.4g}", c.fixed, f"{c.fixed_rate:.3g}", f"{c.our_rate:.3g}"]
            lines.append("| " + " | ".join([*cells, f"{c.our_rate / c.fixed_rate:.3f}"]) + " |")
    return "\n".join(lines)
