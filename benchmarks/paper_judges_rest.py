"""What our results say to the paper's claims: K (section 6.4) and the appendices. ``paper_judges`` has the rest."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from depthbatch.benchmarks.paper_judges import MODELS, Answer, Results, counted, spread
from depthbatch.benchmarks.synthetic import LENGTH_LAWS, draw_lengths
from depthbatch.worker.simulated import find_profile

Row = Mapping[str, Any]
_SAME = 0.995  # of the best throughput: as good as the best
_LENGTHS = 50_000  # requests that lengths are taken from


# --- section 6.4: K


def _by_width(rows: Sequence[Row]) -> dict[int, dict[float, float]]:
    """Throughput over that of the best K, by W and K / W; 0 is K = 1."""
    found: dict[int, dict[float, float]] = {}
    for row in rows:
        if row["axis_policy"] == "refill":
            found.setdefault(row["axis_w"], {})[row["axis_k_share"]] = row["tokens_per_s"]
    return {w: {k: x / max(speeds.values()) for k, x in speeds.items()} for w, speeds in found.items()}


def _best(shares: Mapping[float, float]) -> str:
    at = max(shares, key=lambda k: shares[k])
    return "1" if at == 0 else f"{at:.3g} W"


def quarter_of_w(results: Results) -> Answer:
    found = _by_width(results.rows("fig07_k_huginn"))
    parts = [f"W = {w}: best {_best(shares)}, W/4 at {shares[0.25]:.3f} of it" for w, shares in found.items()]
    return Answer("; ".join(parts), counted(shares[0.25] >= _SAME for shares in found.values()))


def coda_at_once(results: Results) -> Answer:
    found = _by_width(results.rows("fig07_k_ouro"))
    text = f"K = 1 at {spread([shares[0.0] for shares in found.values()], '.3f')} of the best K"
    return Answer(text, counted(shares[0.0] >= _SAME for shares in found.values()))


def k_matters_less(results: Results) -> Answer:
    """What the worst K costs, at each model's W of most effect and at the largest W."""
    parts, agree = [], []
    for model in MODELS:
        cost = {w: 1 - min(shares.values()) for w, shares in _by_width(results.rows(f"fig07_k_{model}")).items()}
        at, last = max(cost, key=lambda w: cost[w]), max(cost)
        parts.append(
            f"{model}: the worst K costs {100 * cost[at]:.0f} % at W = {at}, {100 * cost[last]:.0f} % at {last}"
        )
        agree.append(cost[last] < cost[at])
    return Answer("; ".join(parts), counted(agree))


def batches_by_k(results: Results) -> Answer:
    """From K = 1 to K = W on Huginn at W = 64."""
    rows = [row for row in results.rows("fig07_k_huginn", w=64, policy="refill") if row["axis_k_share"] <= 0.5]
    core, coda = ([row["mean_batch"][stage] for row in rows] for stage in ("core", "coda"))
    text = f"to K = W/2: core {core[0]:.1f} to {core[-1]:.1f} rows, coda {coda[0]:.1f} to {coda[-1]:.1f}"
    return Answer(text, counted([core == sorted(core, reverse=True), coda == sorted(coda)]))


def _by_layers(results: Results) -> dict[int, list[Row]]:
    rows = [row for row in results.rows("fig07_layers_huginn") if row["axis_policy"] == "refill"]
    splits = sorted({row["axis_boundary_layers"] for row in rows}, reverse=True)
    return {split: [row for row in rows if row["axis_boundary_layers"] == split] for split in splits}


def _at_once(rows: Sequence[Row]) -> float:
    """K = 1 over the best K."""
    speed = {row["axis_k_share"]: row["tokens_per_s"] for row in rows}
    return float(speed[0.0] / max(speed.values()))


def fewer_layers_favour_k1(results: Results) -> Answer:
    shares = {split: _at_once(rows) for split, rows in _by_layers(results).items()}
    text = ", ".join(f"{x:.3f} ({split}-4-{split})" for split, x in shares.items())
    values = list(shares.values())
    return Answer(f"K = 1 at {text} of the best K", counted([values == sorted(values)]))


def fewer_layers_are_faster(results: Results) -> Answer:
    speed = {split: max(row["tokens_per_s"] for row in rows) for split, rows in _by_layers(results).items()}
    values = list(speed.values())
    text = ", ".join(f"{x / values[0]:.2f} ({split}-4-{split})" for split, x in speed.items())
    return Answer(f"tokens/s {text}", counted([values == sorted(values)]))


def fully_looped_wants_k1(results: Results) -> Answer:
    share = _at_once(_by_layers(results)[0])
    return Answer(f"K = 1 at {share:.3f} of the best K", counted([share >= 0.98]))


def gap_closes(results: Results) -> Answer:
    """Up to what chance makes of a window."""
    gaps = {split: max(row["realized"] for row in rows) for split, rows in _by_layers(results).items()}
    values = list(gaps.values())
    text = ", ".join(f"{x:.3f} ({split}-4-{split})" for split, x in gaps.items())
    rises = all(after > before - 0.005 for before, after in itertools.pairwise(values))
    return Answer(f"of S_e2e: {text}", counted([rises and values[-1] > values[0] + 0.005]))


# --- appendix A: admission and preemption


def _by_slots(results: Results) -> dict[tuple[str, str], dict[int, float]]:
    """Throughput over that of the best S, by profile and workload."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in results.rows("min_free_slots", policy="refill"):
        found.setdefault((row["axis_profile"], row["axis_workload"]), {})[row["axis_s"]] = row["tokens_per_s"]
    return {cell: {s: x / max(speeds.values()) for s, x in speeds.items()} for cell, speeds in found.items()}


def _best_slots(shares: Mapping[int, float]) -> int:
    return max(shares, key=lambda s: shares[s])


def both_ends_cost(results: Results) -> Answer:
    found = _by_slots(results)
    parts = [
        f"{_model(profile)}, {workload}: best S = {_best_slots(x)}, S = 1 at {x[1]:.3f}, 32 at {x[32]:.3f}"
        for (profile, workload), x in found.items()
    ]
    return Answer("; ".join(parts), counted(x[1] < _SAME and x[32] < _SAME for x in found.values()))


def short_prompts_wait(results: Results) -> Answer:
    found = _by_slots(results)
    pairs = [tuple(_best_slots(found[name, w]) for w in ("alpaca", "sharegpt")) for name in MODELS.values()]
    text = "; ".join(f"{m}: {a} against {b}" for m, (a, b) in zip(MODELS, pairs, strict=True))
    return Answer(f"best S, Alpaca against ShareGPT: {text}", counted(a > b for a, b in pairs))


def default_slots(results: Results) -> Answer:
    values = [x[8] for x in _by_slots(results).values()]
    return Answer(f"at {spread(values, '.3f')} of the best S", "left open")


def headroom(results: Results) -> Answer:
    """Best share kept free by KV memory, of recompute and offload, and what 0 % costs against it."""
    parts = []
    for capacity in dict.fromkeys(row["axis_kv_capacity"] for row in results.rows("headroom")):
        for way in ("recompute", "offload"):
            speed = {
                float(row["axis_preemption"].partition(":")[2]): row["tokens_per_s"]
                for row in results.rows("headroom", kv_capacity=capacity, policy="refill")
                if row["axis_preemption"].startswith(way)
            }
            best = max(speed, key=lambda share: speed[share])
            parts.append(f"{100 * best:g} % ({way}, {capacity:g} of need; 0 % at {speed[0.0] / speed[best]:.3f})")
    return Answer("best: " + ", ".join(parts), "left open")


def prefill_is_cheap(results: Results) -> Answer:
    """A token of a full prefill against one of decode at W = 64 and ShareGPT's mean context, full depth, on the profiles."""
    ratios = []
    for model, name in MODELS.items():
        profile = find_profile(name)
        row = results.rows(f"fig05_width_{model}", workload="sharegpt", policy="cb", w=64)[0]
        prefill_ms = profile.prefill.delta_ms / 8192 + profile.prefill.gamma_ms
        decode_ms = 1e3 * (1 - row["prefill_share"]) / row["tokens_per_s"]
        ratios.append(decode_ms / prefill_ms)
    text = f"prefill is {spread(ratios, '.0f')} times as fast a token (profiles; W = 64)"
    return Answer(text, counted(ratio > 3 for ratio in ratios))


def _model(profile: str) -> str:
    return next(model for model, name in MODELS.items() if name == profile)


# --- appendix C: workloads


def lengths(results: Results) -> Answer:
    """Means (ShareGPT, Alpaca, arXiv), medians and p99 as the paper states them, within 5 %."""
    found = {name: draw_lengths(name, _LENGTHS, np.random.default_rng(0)) for name in LENGTH_LAWS}
    stated = {
        "alpaca": (18, 60, None, None, 75),
        "sharegpt": (267, 311, None, None, 3264),
        "arxiv": (6989, 370, 6436, 199, None),
    }
    parts, agree = [], []
    for name, values in stated.items():
        prompt, output = found[name]
        ours = (prompt.mean(), output.mean(), np.median(prompt), np.median(output), np.percentile(prompt, 99))
        parts.append(f"{name} {ours[0]:.0f} and {ours[1]:.0f}")
        agree += [abs(a / b - 1) < 0.05 for a, b in zip(ours, values, strict=True) if b is not None]
    return Answer(f"means of prompt and output: {', '.join(parts)}", counted(agree))


# --- appendix E: accuracy, of the models that ship


def gated_beats_fixed(results: Results) -> Answer:
    """Each gate's accuracy less that of fixed depths, interpolated at its mean depth."""
    margins = {}
    for model in ("demo", "demo-huginn-single"):
        report = results.accuracy(model)
        fixed = report["by_fixed_depth"]
        margins[model] = [
            row["accuracy"]
            - float(np.interp(row["mean_depth"], [f["depth"] for f in fixed], [f["accuracy"] for f in fixed]))
            for row in report["by_threshold"]
            if row["gate"] == "own"
        ]
    text = ", ".join(f"{model} {100 * min(m):+.1f} to {100 * max(m):+.1f} points" for model, m in margins.items())
    return Answer(f"gate over fixed depth: {text}", counted(x > -0.002 for m in margins.values() for x in m))


def _behind_own(results: Results, gate: str) -> list[float]:
    """Points that a gate of demo loses against the model's own at equal mean depth, where that has one."""
    rows = results.accuracy("demo")["by_threshold"]
    own = sorted((row["mean_depth"], row["accuracy"]) for row in rows if row["gate"] == "own")
    depths, accuracies = zip(*own, strict=True)
    return [
        100 * (float(np.interp(row["mean_depth"], depths, accuracies)) - row["accuracy"])
        for row in rows
        if row["gate"] == gate and row["mean_depth"] >= depths[0]
    ]


def lookahead_is_as_good(results: Results) -> Answer:
    behind = _behind_own(results, "lookahead")
    text = f"demo: {spread(behind, '.1f')} points behind its own gate at equal mean depth, by threshold"
    return Answer(text, counted(x <= 1.0 for x in behind))


def preloop_is_worse(results: Results) -> Answer:
    behind = _behind_own(results, "preloop")
    text = f"demo: {spread(behind, '.1f')} points behind its own gate at equal mean depth, by threshold"
    return Answer(text, counted(x > 1.0 for x in behind))


def delay_costs_huginn_nothing(results: Results) -> Answer:
    report = results.accuracy("demo-huginn-single")
    least = min(row["accuracy"] for row in report["by_threshold"] if row["gate"] == "convergence")
    text = f"demo-huginn: {100 * least:.1f} % or more at every threshold, full depth {100 * report['full_depth_accuracy']:.1f} %"
    return Answer(text, counted([least >= report["full_depth_accuracy"] - 0.005]))


def _layouts(results: Results, model: str) -> dict[str, float]:
    report = results.accuracy(model)
    return {row["layout"]: row["accuracy"] for row in report["by_layout"] if row["max_loops"] == report["r_max"]}


def huginn_shares_planes(results: Results) -> Answer:
    found = _layouts(results, "demo-huginn")
    names = ("depth_indexed", "single", "first_then_shared")
    text = "demo-huginn: " + ", ".join(f"{name} {100 * found[name]:.1f} %" for name in names)
    return Answer(text, counted(found[name] >= found["depth_indexed"] - 0.01 for name in names[1:]))


def ouro_does_not(results: Results) -> Answer:
    found = _layouts(results, "demo")
    names = ("depth_indexed", "first_then_shared", "single")
    text = "demo: " + ", ".join(f"{name} {100 * found[name]:.1f} %" for name in names)
    values = [found[name] for name in names]
    return Answer(text, counted([values[0] > values[1] + 0.01, values[1] > values[2]]))


def single_is_better_when_cut(results: Results) -> Answer:
    rows = results.accuracy("demo-huginn")["by_layout"]
    by = {(row["layout"], row["max_loops"]): row["accuracy"] for row in rows}
    cut = sorted({loops for _, loops in by})[:-1]
    margins = [100 * (by["single", loops] - by["depth_indexed", loops]) for loops in cut]
    text = f"demo-huginn at {', '.join(map(str, cut))} loops: {', '.join(f'{x:+.1f}' for x in margins)} points"
    return Answer(text, counted(x > 0 for x in margins))
