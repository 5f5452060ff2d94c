"""Markdown over the rows of a sweep: their figures, and ``auto`` against the fixed policies.

Sustained rates: a policy's p99 normalized latency is measured at the sweep's rates; between them it is interpolated, on a
logarithmic scale as latencies rise steeply near saturation. Where several rates give the same latency the highest counts.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from depthbatch.benchmarks.figures import figure_value

Row = Mapping[str, Any]
OURS = "auto"
PLAIN = ("no-refill", "refill:W/4")  # what one would choose without knowing the exits
_P99, _MEAN = "p99_normalized_latency_s", "normalized_latency_s"
_EQUAL = 1e-3  # latencies that differ by so small a share are equal
_PERCENTILES = (("ttft", "50"), ("ttft", "99"), ("itl", "50"), ("itl", "99"), ("itl", "99.9"))


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"] + [f"| {' | '.join(c)} |" for c in lines]
    )


def table(rows: Sequence[Row], axes: Iterable[str], columns: Sequence[str] = ()) -> str:
    """The axes that vary, and ``columns``, or the main figures."""
    varying = [name for name in axes if len({json.dumps(row[f"axis_{name}"]) for row in rows}) > 1]
    figures = list(columns)
    if not figures:
        figures = ["tokens_per_s", "relative_to_cb", "s_e2e", "realized", "prefill_share", "idle_share", "mean_depth"]
        if any(row["axis_rate"] is not None for row in rows):
            figures += [_MEAN, _P99]
        if any("goodput_tokens_per_s" in row for row in rows):
            figures += ["goodput_tokens_per_s", *(f"p{q}_{x}_ms" for x, q in _PERCENTILES)]
    cells = (
        [*(str(r[f"axis_{name}"]) for name in varying), *(f"{figure_value(r, name):.4g}" for name in figures)]
        for r in rows
    )
    return markdown([*varying, *figures], cells)


def slots_table(rows: Sequence[Row]) -> str:
    """Of a sweep over ``s``: throughput over that of the default S, and p99 ITL, by profile and workload, ``cb`` apart."""
    rows = [row for row in rows if row["axis_policy"] != "cb"]
    sizes = sorted({row["axis_s"] for row in rows})
    default = max(1, rows[0]["axis_w"] // 8)
    lines = []
    for profile, workload in dict.fromkeys((row["axis_profile"], row["axis_workload"]) for row in rows):
        by_s = {
            row["axis_s"]: row for row in rows if (row["axis_profile"], row["axis_workload"]) == (profile, workload)
        }
        base = by_s[default]["tokens_per_s"]
        cells = (f"{by_s[s]['tokens_per_s'] / base:.3f} ({1e3 * by_s[s]['p99_itl_s']:.0f} ms)" for s in sizes)
        lines.append((profile, workload, *cells))
    head = ("profile", "workload", *(f"S = {s}" for s in sizes))
    return f"Tokens/s over those at S = {default}, the default, and p99 ITL.\n\n{markdown(head, lines)}"


def memory_table(rows: Sequence[Row]) -> str:
    """Of a sweep over ``kv_capacity``: what each way of preempting gives, ``cb`` apart."""
    head = (
        "layout",
        "capacity",
        "preemption",
        "tokens/s",
        "p99 normalized latency (s)",
        "p99 ITL (s)",
        "preempted",
        "GiB copied",
        "tokens computed again",
        "mean, p99 gap of a preempted one (s)",
    )
    lines = []
    for row in rows:
        if row["axis_policy"] == "cb":
            continue
        gaps = (row["mean_next_token_s"], row["p99_next_token_s"])
        lines.append(
            (
                row["axis_kv_layout"],
                f"{row['axis_kv_capacity']:g}",
                row["axis_preemption"],
                f"{row['tokens_per_s']:.0f}",
                f"{row[_P99]:.3f}",
                f"{row['p99_itl_s']:.4f}",
                str(row["preemptions"]),
                f"{row['moved_gib']:.1f}",
                str(row["recomputed_tokens"]),
                "-" if None in gaps else ", ".join(f"{gap:.2f}" for gap in gaps),
            )
        )
    return markdown(head, lines)


# --- auto against every fixed setting


class Cell(NamedTuple):
    """One comparison: everything but the policy."""

    profile: str
    exits: str
    workload: str
    w: int


class Ratios(NamedTuple):
    """Throughput of auto over that of fixed settings on the same requests."""

    best: float
    plain: float


def auto_ratios(rows: Sequence[Row]) -> dict[Cell, Ratios]:
    """auto over the best fixed setting (cb apart), and over the better of PLAIN, for each cell that has all of them."""
    cells: dict[Cell, dict[str, float]] = {}
    for row in rows:
        cell = Cell(*(row[f"axis_{name}"] for name in Cell._fields))
        cells.setdefault(cell, {})[row["axis_policy"]] = row["tokens_per_s"]
    ratios = {}
    for cell, speed in cells.items():
        fixed = [value for policy, value in speed.items() if policy not in (OURS, "cb")]
        if OURS in speed and set(PLAIN) <= speed.keys():
            ratios[cell] = Ratios(speed[OURS] / max(fixed), speed[OURS] / max(speed[policy] for policy in PLAIN))
    return ratios


def auto_table(rows: Sequence[Row]) -> str:
    """Per profile and exits, the least ratios over workloads for each width, and their spread over all cells."""
    ratios = auto_ratios(rows)
    if not ratios:
        return "No cell has auto and " + " and ".join(PLAIN) + "."
    widths = sorted({cell.w for cell in ratios})
    lines = []
    for name, exits in dict.fromkeys((cell.profile, cell.exits) for cell in ratios):
        entries = []
        for w in widths:
            found = [r for cell, r in ratios.items() if (cell.profile, cell.exits, cell.w) == (name, exits, w)]
            least = f"{min(r.best for r in found):.3f} ({min(r.plain for r in found):.3f})" if found else "-"
            entries.append(least)
        lines.append([name, exits, *entries])
    best, plain = (np.array(values) for values in zip(*ratios.values(), strict=True))
    return "\n".join(
        [
            f"{len(ratios)} cells. Each entry: auto / best fixed setting (auto / better of {' and '.join(PLAIN)}), "
            "least over workloads.",
            "",
            markdown(["profile", "exits", *(f"W = {w}" for w in widths)], lines),
            "",
            _spread("best fixed", best, 0.99),
            _spread(f"better of {' and '.join(PLAIN)}", plain, 1.0),
        ]
    )


def draft_ratios(rows: Sequence[Row]) -> dict[tuple[Any, ...], Ratios]:
    """speculation auto over the best of off and all fixed drafts, and over off, by (profile, exits, acceptance, w)."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["axis_policy"] != "cb":
            cell = tuple(row[f"axis_{name}"] for name in ("profile", "exits", "draft_acceptance", "w"))
            cells.setdefault(cell, {})[row["axis_speculation"]] = row["tokens_per_s"]
    return {
        cell: Ratios(
            speed["auto"] / max(value for name, value in speed.items() if name != "auto"), speed["auto"] / speed["off"]
        )
        for cell, speed in cells.items()
        if {"auto", "off"} <= speed.keys()
    }


def draft_table(rows: Sequence[Row]) -> str:
    """Learned drafts against every fixed setting, by profile, exits, acceptance and width."""
    ratios = draft_ratios(rows)
    if not ratios:
        return "No cell has speculation off and auto."
    widths = sorted({cell[-1] for cell in ratios})
    lines = []
    for name in dict.fromkeys(cell[:-1] for cell in ratios):
        found = [ratios.get((*name, w)) for w in widths]
        lines.append([*map(str, name), *("-" if r is None else f"{r.best:.3f} ({r.plain:.2f})" for r in found)])
    best, plain = (np.array(values) for values in zip(*ratios.values(), strict=True))
    header = ["profile", "exits", "acceptance", *(f"W = {w}" for w in widths)]
    return "\n".join(
        [
            f"{len(ratios)} cells. Each entry: auto / best of no drafts and all fixed ones (auto / no drafts).",
            "",
            markdown(header, lines),
            "",
            _spread("best fixed", best, 0.99),
            _spread("no drafts", plain, 0.99),
        ]
    )


def _spread(name: str, ratios: np.ndarray, target: float) -> str:
    least, median, most = ratios.min(), np.median(ratios), ratios.max()
    share = np.mean(ratios >= target)
    return f"auto / {name}: least {least:.4f}, median {median:.4f}, most {most:.4f}; {share:.1%} of cells at {target:g} or more."


# --- rates that are sustained


class Comparison(NamedTuple):
    """At the p99 of the best fixed policy at some rate."""

    p99_s: float
    fixed: str  # the policy that sustains most there
    fixed_rate: float
    our_rate: float
    p99: float  # ours over the least of fixed policies, at the measured rate
    mean: float  # the same of mean normalized latency


def sustained_rate(curve: Sequence[tuple[float, float]], level_s: float) -> float:
    """The highest rate whose p99 is at most ``level_s``. Below the lowest rate measured the curve is continued, but not
    below 0; never beyond the highest one. ``curve``: two rates or more, ascending, with their p99 in seconds."""
    rates = [rate for rate, _ in curve]
    logs, level = np.log([p99_s for _, p99_s in curve]), np.log(level_s)
    within = np.flatnonzero(logs <= level + _EQUAL)
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
    by_policy: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        if row["axis_rate"] is not None:
            point = (row["axis_rate"], row[_P99], row[_MEAN])
            by_policy.setdefault(row["axis_policy"], []).append(point)
    points = {name: sorted(own) for name, own in by_policy.items()}
    curves = {name: [(rate, p99_s) for rate, p99_s, _ in own] for name, own in points.items()}
    ours, our_curve = points.pop(OURS), curves.pop(OURS)
    out = []
    for at, (_, p99_s, mean_s) in enumerate(ours):
        level_s, least_s = (min(own[at][figure] for own in points.values()) for figure in (1, 2))
        rates = {name: sustained_rate(curve, level_s) for name, curve in curves.items()}
        best = max(rates, key=lambda name: rates[name])
        our_rate = sustained_rate(our_curve, level_s)
        out.append(Comparison(level_s, best, rates[best], our_rate, p99_s / level_s, mean_s / least_s))
    return out


def sustained_table(rows: Sequence[Row]) -> str:
    """For every threshold, the rates that auto and the best fixed policy sustain at equal p99, and what auto's latencies are
    at the same rate; over seeds, where there are several, the mean of each ratio, the least and the most."""
    head = ("exits", "p99 normalized latency (s)", "best fixed", "its rate", "rate of auto", "ratio", "p99", "mean")
    lines = []
    for exits in dict.fromkeys(row["axis_exits"] for row in rows):
        own = [row for row in rows if row["axis_exits"] == exits]
        by_seed = [
            compare([row for row in own if row.get("axis_seed") == seed])
            for seed in dict.fromkeys(row.get("axis_seed") for row in own)
        ]
        for at in zip(*by_seed, strict=True):
            rates = (f"{np.mean([getattr(c, name) for c in at]):.3g}" for name in ("fixed_rate", "our_rate"))
            fixed = ", ".join(dict.fromkeys(c.fixed for c in at))
            p99_s = float(np.mean([c.p99_s for c in at]))
            ratios = ([c.our_rate / c.fixed_rate for c in at], [c.p99 for c in at], [c.mean for c in at])
            lines.append((exits, f"{p99_s:.4g}", fixed, *rates, *map(_over_seeds, ratios)))
    return markdown(head, lines)


def _over_seeds(ratios: Sequence[float]) -> str:
    spread = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
    return f"{np.mean(ratios):.3f}{spread}"
