"""What our results say to the paper's claims: each function reads results and returns an Answer. ``paper_claims`` has the claims.

An answer compares what can be compared: ratios, shares, orders. How many of the cases that a claim covers agree with it is
part of the answer.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from depthbatch.benchmarks.sweep import AXES
from depthbatch.benchmarks.tables import sustained_rate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.device_profile import DeviceProfile
from depthbatch.worker.simulated import find_profile

Row = Mapping[str, Any]
AGREES, CONTRADICTS, NOT_HERE = "agrees", "contradicts", "not measured here"
MODELS = {"ouro": "h100-ouro-1.4b", "huginn": "h100-huginn-3.5b"}
WORKLOADS = ("alpaca", "sharegpt", "arxiv")
SELECTED = {"ouro": "q=0.2", "huginn": "q=0.28"}
FEW_EXITS = {"ouro": "q=0.5", "huginn": "q=0.1"}
OWN_POLICY = {"ouro": "refill", "huginn": "no-refill"}
CPU_RESULTS = "fig09_cpu.json"
FIGURE = {"ouro": 12, "huginn": 13}
_TOLERANCE = 0.005  # of a ratio
_NEAR = 0.01  # of a figure that the paper rounds to a hundredth
MOST_LATENCY = 2.0  # of CB's at the lowest rate: capacity is the rate that keeps mean normalized latency within it


class Answer(NamedTuple):
    """Our figures, and what they say."""

    ours: str
    verdict: str


class Results:
    """Results by the name of their sweep: those of this report, and of accuracy."""

    def __init__(self, directory: Path, accuracy: Path) -> None:
        self._directory, self._accuracy = directory, accuracy
        self._read: dict[str, list[dict[str, Any]]] = {}

    def has(self, name: str) -> bool:
        return (self._directory / f"{name}.json").exists()

    def rows(self, name: str, **axes: Any) -> list[dict[str, Any]]:
        """Of a sweep, those that have these values of axes. Raises FileNotFoundError."""
        if name not in self._read:
            rows = json.loads((self._directory / f"{name}.json").read_text())["rows"]
            self._read[name] = [{f"axis_{axis}": value for axis, value in AXES.items()} | row for row in rows]
        return [row for row in self._read[name] if all(row[f"axis_{axis}"] == value for axis, value in axes.items())]

    def one(self, name: str, **axes: Any) -> dict[str, Any]:
        (row,) = self.rows(name, **axes)
        return row

    def cpu(self) -> dict[str, Any]:
        """Of this machine's CPU."""
        found: dict[str, Any] = json.loads((self._directory / CPU_RESULTS).read_text())
        return found

    def accuracy(self, model: str) -> dict[str, Any]:
        """A report of ``bench accuracy``."""
        found: dict[str, Any] = json.loads((self._accuracy / f"accuracy-{model}.json").read_text())
        return found


def counted(holds: Iterable[bool]) -> str:
    """The verdict of several cases."""
    cases = list(holds)
    if all(cases):
        return AGREES
    return f"{AGREES} in {sum(cases)} of {len(cases)}" if any(cases) else CONTRADICTS


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """From least to most."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _within(values: Sequence[float], low: float, high: float) -> Answer:
    return Answer(spread(values), counted(low - _TOLERANCE <= value <= high + _TOLERANCE for value in values))


def _profiles() -> dict[str, DeviceProfile]:
    return {model: find_profile(name) for model, name in MODELS.items()}


# --- section 4: layouts and asynchronous scheduling


def kv_sizes(results: Results) -> Answer:
    """Table 4: KiB a token, whole model, of the profiles' bytes."""
    paper = {"ouro": (768, 192, 384), "huginn": (1402, 165, 248)}
    layouts = (KVLayout.DEPTH_INDEXED, KVLayout.SINGLE, KVLayout.FIRST_THEN_SHARED)
    ours = {}
    for model, profile in _profiles().items():
        outside = (
            profile.boundary_layers / 4 if profile.boundary_layers else 0
        )  # in planes of Huginn's four core layers
        ours[model] = [profile.bytes_per_kv_token * (x.num_planes(profile.r_max) + outside) / 1024 for x in layouts]
    agree = [abs(a - b) < 1 for model in MODELS for a, b in zip(ours[model], paper[model], strict=True)]
    return Answer("; ".join(", ".join(f"{x:.0f}" for x in ours[model]) for model in MODELS), counted(agree))


def _idle(results: Results) -> list[dict[str, float]]:
    """Idle shares by mode, a map a model and W."""
    rows = [row for model in MODELS for row in results.rows(f"fig03_idle_{model}", policy="refill")]
    cells = dict.fromkeys((row["axis_profile"], row["axis_w"]) for row in rows)
    return [
        {
            row["axis_async_scheduling"]: row["idle_share"]
            for row in rows
            if (row["axis_profile"], row["axis_w"]) == cell
        }
        for cell in cells
    ]


def async_alone(results: Results) -> Answer:
    cells = _idle(results)
    text = ", ".join(f"{100 * c['off']:.1f} to {100 * c['async']:.1f} %" for c in cells)
    return Answer(f"idle falls from {text}", counted(c["async"] > 0.5 * c["off"] for c in cells))


def with_lookahead(results: Results) -> Answer:
    cells = _idle(results)
    shares = [100 * c["lookahead"] for c in cells]
    return Answer(f"{spread(shares, '.1f')} %", counted(share < 5 for share in shares))


def naive_loses(results: Results) -> Answer:
    ratios = []
    for model in MODELS:
        for w in dict.fromkeys(row["axis_w"] for row in results.rows(f"fig03_idle_{model}")):
            rows = results.rows(f"fig03_idle_{model}", w=w)
            fixed = max(row["tokens_per_s"] for row in rows if row["axis_policy"] == "cb")
            (plain,) = (r for r in rows if r["axis_policy"] == "refill" and r["axis_async_scheduling"] == "off")
            ratios.append(plain["tokens_per_s"] / fixed)
    text = f"refill without overlap is at {spread(ratios)} of CB with it"
    return Answer(text, counted(ratio < 1 for ratio in ratios))


# --- section 5: limits


def bound_of_fully_looped(results: Results) -> Answer:
    """S_dec over r_max / d at the selected thresholds."""
    shares = {}
    for model, profile in _profiles().items():
        rows = results.rows(
            f"fig05_threshold_{model}", exits=SELECTED[model], policy=OWN_POLICY[model], workload="sharegpt"
        )
        shares[model] = rows[0]["s_dec"] * rows[0]["mean_depth"] / profile.r_max
    text = f"S_dec is {shares['ouro']:.3f} of r_max / d on Ouro, {shares['huginn']:.3f} on Huginn"
    return Answer(text, counted([shares["ouro"] > 0.95, shares["huginn"] < shares["ouro"] <= 1.0]))


def loops_saved(results: Results) -> Answer:
    saved = {m: 100 / (p.flops.boundary / p.flops.core + p.r_max) for m, p in _profiles().items()}
    text = f"a skipped loop saves {saved['ouro']:.1f} % of a token at r_max 4, {saved['huginn']:.1f} % at 16"
    return Answer(text, counted([saved["huginn"] < saved["ouro"]]))


def two_regimes(results: Results) -> Answer:
    """Doubling the batch, well below and well above B*, on the real CPU at the shortest context. Two claims in one: what was
    not measured below does not agree."""
    below, above = [], []
    for step in results.cpu()["steps"]:
        context = min(p["context"] for p in step["points"])
        core = step["core"]
        saturation = core["delta_ms"] / (core["gamma_ms"] + core["alpha_ms"] * context)
        points = [p for p in step["points"] if p["context"] == context]
        for small, large in itertools.pairwise(points):
            ratio = large["core_ms"] / small["core_ms"]
            if large["batch"] <= saturation / 2:
                below.append(ratio)
            elif small["batch"] >= 2 * saturation:
                above.append(ratio)
    if not above:
        return Answer("no batch well above B*", NOT_HERE)
    where = (
        f"{spread(above)} well above" if below else f"{spread(above)} times as long well above B*; none is well below"
    )
    text = (
        "on this CPU twice the batch takes "
        + (f"{spread(below)} times as long well below B*, " if below else "")
        + where
    )
    return Answer(text, counted([bool(below) and max(below) < 1.4, min(above) > 1.6]))


def saturation_falls(results: Results) -> Answer:
    parts, agree = [], []
    for step in results.cpu()["steps"]:
        core = step["core"]
        contexts = sorted({p["context"] for p in step["points"]})
        found = [core["delta_ms"] / (core["gamma_ms"] + core["alpha_ms"] * c) for c in contexts]
        parts.append(
            f"{step['model']}: B* {', '.join(f'{x:.3g}' for x in found)} at L = {', '.join(map(str, contexts))}"
        )
        agree.append(found == sorted(found, reverse=True) and found[-1] < found[0])
    fits = [step["r_squared"] for step in results.cpu()["steps"]]
    return Answer(f"on this CPU {'; '.join(parts)} (R^2 of the fits {spread(fits)})", counted(agree))


def linear_in_depth(results: Results) -> Answer:
    fits = [line["r_squared"] for line in results.cpu()["depths"]]
    return Answer(f"on this CPU, `demo`: R^2 {spread(fits, '.4f')}", counted(fit >= 0.999 for fit in fits))


# --- section 6.2: offline throughput


def _selected(results: Results, model: str) -> list[dict[str, Any]]:
    return results.rows(f"fig05_threshold_{model}", exits=SELECTED[model], policy=OWN_POLICY[model])


def most_realized(results: Results) -> Answer:
    found = max(row["realized"] for row in _selected(results, "ouro"))
    return Answer(f"{found:.3f} at most", counted([found >= 0.99 - _NEAR]))


def speedup(results: Results, model: str, low: float, high: float) -> Answer:
    return _within([row["relative_to_cb"] for row in _selected(results, model)], low, high)


def realized(results: Results, model: str, low: float, high: float) -> Answer:
    return _within([row["realized"] for row in _selected(results, model)], low, high)


def other_policy_is_worse(results: Results, model: str) -> Answer:
    """At the selected threshold, by workload."""
    other = "refill" if OWN_POLICY[model] == "no-refill" else "no-refill"
    rows = {
        policy: results.rows(f"fig05_threshold_{model}", exits=SELECTED[model], policy=policy)
        for policy in (OWN_POLICY[model], other)
    }
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(rows[OWN_POLICY[model]], rows[other], strict=True)]
    return Answer(f"{spread(ratios)} times {other}", counted(ratio > 1 for ratio in ratios))


def full_depth_by_launch(results: Results) -> Answer:
    rows = results.rows("full_depth", policy="no-refill")
    by_launch: dict[float, list[float]] = {}
    for row in rows:
        by_launch.setdefault(row["axis_launch_us"], []).append(row["relative_to_cb"])
    text = "; ".join(f"{launch:g} us: {spread(values, '.3f')}" for launch, values in by_launch.items())
    agrees = any(min(v) >= 0.95 - _TOLERANCE and max(v) <= 0.99 + _TOLERANCE for v in by_launch.values())
    return Answer(f"with a launch of {text}", AGREES if agrees else CONTRADICTS)


def full_depth_of_processes(results: Results) -> Answer:
    """CB through the real processes runs the stages of CDB at full depth, one by one; beside it CB in virtual time, which
    waits for nothing."""
    shares = []
    for model, profile in MODELS.items():
        for row in results.rows(f"fig03_idle_{model}", policy="cb", async_scheduling="lookahead"):
            virtual = results.one("full_depth_virtual", profile=profile, w=row["axis_w"])
            shares.append(row["tokens_per_s"] / virtual["tokens_per_s"])
    return Answer(spread(shares, ".3f"), counted(share >= 0.95 - _TOLERANCE for share in shares))


def batch_is_w(results: Results) -> Answer:
    """Mean core batch of CB over W."""
    shares = [
        row["mean_batch"]["core"] / row["axis_w"]
        for model in MODELS
        for row in results.rows(f"fig05_width_{model}", policy="cb")
    ]
    return Answer(f"mean core batch of CB is {spread(shares)} of W", counted(share >= 0.9 for share in shares))


def near_bound_at_every_width(results: Results) -> Answer:
    values = [row["realized"] for row in results.rows("fig05_width_ouro", policy="refill")]
    return Answer(f"{spread(values)} of S_e2e", counted(abs(value - 1) <= 0.05 + _TOLERANCE for value in values))


def _advantage(results: Results, model: str, workload: str) -> dict[int, float]:
    """Refill over no-refill by W."""
    speed = {
        policy: {
            row["axis_w"]: row["tokens_per_s"]
            for row in results.rows(f"fig05_width_{model}", workload=workload, policy=policy)
        }
        for policy in ("refill", "no-refill")
    }
    return {w: speed["refill"][w] / speed["no-refill"][w] for w in speed["refill"]}


def refill_wins_at_every_width(results: Results) -> Answer:
    values = [x for workload in WORKLOADS for x in _advantage(results, "ouro", workload).values()]
    return Answer(f"{spread(values)} times no-refill", counted(value > 1 for value in values))


def advantage_near_saturation(results: Results) -> Answer:
    """Largest at a W up to twice B*, and less at the largest W."""
    parts, agree = [], []
    for workload in WORKLOADS:
        ratios = _advantage(results, "ouro", workload)
        at = max(ratios, key=lambda w: ratios[w])
        rows = results.rows("fig05_width_ouro", workload=workload, policy="cb")
        saturation = float(np.mean([row["saturation_batch"] for row in rows]))
        last = max(ratios)
        parts.append(f"{workload} {ratios[at]:.2f} at W = {at} (B* = {saturation:.0f}), {ratios[last]:.2f} at {last}")
        agree.append(at <= 2 * saturation and ratios[last] < ratios[at])
    return Answer("; ".join(parts), counted(agree))


def no_refill_wins_when_small(results: Results) -> Answer:
    values = [x for workload in WORKLOADS for w, x in _advantage(results, "huginn", workload).items() if w <= 16]
    return Answer(f"refill at {spread(values)} of no-refill, W up to 16", counted(value < 1 for value in values))


def modes_converge(results: Results) -> Answer:
    parts, agree = [], []
    for workload in WORKLOADS:
        ratios = _advantage(results, "huginn", workload)
        small, large = ratios[min(ratios)], ratios[max(ratios)]
        parts.append(f"{workload} {small:.3f} at W = {min(ratios)}, {large:.3f} at {max(ratios)}")
        agree.append(abs(1 - large) < abs(1 - small))
    return Answer("refill over no-refill: " + "; ".join(parts), counted(agree))


def _prefill(results: Results, workload: str) -> list[dict[int, float]]:
    """Shares of CB's time by W, a map a model."""
    return [
        {
            row["axis_w"]: row["prefill_share"]
            for row in results.rows(f"fig05_width_{m}", workload=workload, policy="cb")
        }
        for m in MODELS
    ]


def prefill_share(results: Results) -> Answer:
    values = [share for workload in WORKLOADS for by_w in _prefill(results, workload) for share in by_w.values()]
    text = f"{100 * min(values):.1f} to {100 * max(values):.1f} %"
    return Answer(text, counted(0.037 - _TOLERANCE <= value <= 0.36 + _TOLERANCE for value in values))


def prefill_by_workload(results: Results) -> Answer:
    most = {workload: max(max(by_w.values()) for by_w in _prefill(results, workload)) for workload in WORKLOADS}
    text = ", ".join(f"{name} up to {100 * share:.1f} %" for name, share in most.items())
    return Answer(text, counted([max(most, key=lambda name: most[name]) == "arxiv"]))


def prefill_by_width(results: Results) -> Answer:
    ends = [(by_w[min(by_w)], by_w[max(by_w)]) for workload in WORKLOADS for by_w in _prefill(results, workload)]
    text = ", ".join(f"{100 * small:.1f} to {100 * large:.1f} %" for small, large in ends)
    return Answer(f"from W = 2 to 512: {text}", counted(large > small for small, large in ends))


def bounds_apart(results: Results) -> Answer:
    """S_e2e over S_dec of the policy that is best, by workload."""
    least = {}
    for workload in WORKLOADS:
        rows = [
            row
            for model in MODELS
            for row in results.rows(f"fig05_threshold_{model}", policy=OWN_POLICY[model], workload=workload)
        ]
        least[workload] = min(row["s_e2e"] / row["s_dec"] for row in rows)
    text = ", ".join(f"{name} {share:.3f}" for name, share in least.items())
    holds = [least["alpaca"] > 0.9, least["sharegpt"] > 0.9, least["arxiv"] < 0.9]
    return Answer(f"S_e2e / S_dec at least: {text}", counted(holds))


def decode_rules(results: Results) -> Answer:
    rows = [row for model in MODELS for row in results.rows(f"fig05_width_{model}")]
    most = max(row["prefill_share"] for row in rows)
    return Answer(f"at most {100 * most:.0f} % of the time is prefill", counted([most < 0.5]))


def stable(results: Results) -> Answer:
    """Largest deviation from the mean over seeds, of throughput over CB's."""
    cells: dict[tuple[str, str], list[float]] = {}
    for row in results.rows("stability"):
        if row["axis_policy"] != "cb":
            cells.setdefault((row["axis_profile"], row["axis_policy"]), []).append(row["relative_to_cb"])
    worst = max(float(np.abs(np.array(v) / np.mean(v) - 1).max()) for v in cells.values())
    return Answer(f"within {100 * worst:.1f} % of the mean over 3 seeds (ShareGPT, W = 64)", counted([worst < 0.02]))


# --- section 6.3: serving


def capacity(rows: Sequence[Row], level_s: float) -> float:
    """The highest rate whose mean normalized latency is at most ``level_s``."""
    return sustained_rate(sorted((row["axis_rate"], row["normalized_latency_s"]) for row in rows), level_s)


def gains(results: Results, model: str, workload: str, exits: str) -> dict[str, float]:
    """What refill and no-refill add to the capacity of CB, as shares of it."""
    name = f"fig{FIGURE[model]}_{workload}_{model}"
    rows = {policy: results.rows(name, exits=exits, policy=policy) for policy in ("cb", "no-refill", "refill", "auto")}
    level_s = MOST_LATENCY * min(rows["cb"], key=lambda row: row["axis_rate"])["normalized_latency_s"]
    base = capacity(rows["cb"], level_s)
    return {policy: capacity(own, level_s) / base - 1 for policy, own in rows.items() if policy != "cb"}


def half_the_gain(results: Results) -> Answer:
    found = gains(results, "ouro", "sharegpt", SELECTED["ouro"])
    text = f"refill +{100 * found['refill']:.0f} %, no-refill +{100 * found['no-refill']:.0f} %"
    share = found["no-refill"] / found["refill"]
    return Answer(f"{text}: {share:.2f} of it", counted([0.35 <= share <= 0.65]))


def same_capacity(results: Results) -> Answer:
    found = gains(results, "huginn", "sharegpt", SELECTED["huginn"])
    text = f"refill +{100 * found['refill']:.0f} %, no-refill +{100 * found['no-refill']:.0f} %"
    return Answer(text, counted([abs((1 + found["refill"]) / (1 + found["no-refill"]) - 1) <= 0.03]))


def few_exits(results: Results) -> Answer:
    """The better policy's gain where few leave early, against where many do."""
    parts, agree = [], []
    for model in MODELS:
        for workload in WORKLOADS:
            many, few = (
                max(x for name, x in gains(results, model, workload, exits).items() if name != "auto")
                for exits in (SELECTED[model], FEW_EXITS[model])
            )
            parts.append(f"{100 * many:.0f} to {100 * few:.0f} %")
            agree.append(few < 0.5 * many)
    return Answer(f"gain from {', '.join(parts)}", counted(agree))


def holds_for_all_workloads(results: Results) -> Answer:
    values = [
        max(x for name, x in gains(results, model, workload, SELECTED[model]).items() if name != "auto")
        for model in MODELS
        for workload in WORKLOADS
    ]
    return Answer(f"capacity +{spread([100 * v for v in values], '.0f')} %", counted(value > 0.05 for value in values))
