"""What the objectives of ``auto`` buy: ``python -m depthbatch.benchmarks.tradeoff`` (figures, a table and the raw rows).

ShareGPT lengths with Poisson arrivals at a rising rate, W = 64, virtual time on the shipped profiles: throughput against
TTFT, ITL and goodput for the three objectives and the better fixed policy of each model; then, at one rate, ``latency``
under a falling ITL target. TTFT counts from arrival, ITL between successive tokens of a request, goodput the tokens of
requests whose TTFT and mean ITL keep the targets; all are of the whole run, its beginning and its end included.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from depthbatch.benchmarks.arrivals import arrival_times
from depthbatch.benchmarks.figures import import_pyplot
from depthbatch.benchmarks.simulate import Run, simulate
from depthbatch.benchmarks.sources import load_workload
from depthbatch.benchmarks.trace import virtual_engine
from depthbatch.benchmarks.workload import Workload
from depthbatch.benchmarks.workloads import HUGINN_EXITS, OURO_EXITS
from depthbatch.common.config import OBJECTIVES, EngineConfig
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.worker.device_profile import DeviceProfile
from depthbatch.worker.simulated import find_profile

Row = dict[str, Any]
RESULTS = Path(__file__).resolve().parent / "results" / "tradeoff"
WIDTH, REQUESTS = 64, 500
_COLOURS = {"fixed": "0.45", "throughput": "tab:green", "latency": "tab:blue", "goodput": "tab:orange"}


class Case(NamedTuple):
    """A model's experiment."""

    profile: str
    exits: Mapping[int, float]
    fixed: str  # policy
    rates: Sequence[float]  # requests a second; the last ones are beyond what the device can do
    ttft_ms: float
    itl_ms: float
    swept_rate: float
    swept_itl_ms: Sequence[float]


CASES = {
    "ouro": Case(
        "h100-ouro-1.4b", OURO_EXITS[0.2], "refill", (2, 4, 5, 6, 7, 8, 10), 1000, 50, 6, (120, 80, 60, 50, 45, 40)
    ),
    "huginn": Case(
        "h100-huginn-3.5b", HUGINN_EXITS[0.28], "no-refill", (1, 1.5, 2, 2.5, 3, 4), 1000, 100, 2, (800, 400, 200, 140, 110, 90)
    ),
}  # fmt: skip


def run_case(name: str, requests: int, bar: "tqdm[Any]") -> list[Row]:
    """All rows of a model: by rate for every policy, then by ITL target at one rate."""
    case = CASES[name]
    profile = find_profile(case.profile)
    rows = []
    for rate in case.rates:
        workload = timed_workload(case, profile, rate, requests)
        for label in _COLOURS:
            rows.append({"model": name, "policy": label} | measure(case, profile, workload, rate, label, case.itl_ms))
            bar.update()
    workload = timed_workload(case, profile, case.swept_rate, requests)
    for itl_ms in case.swept_itl_ms:
        measured = measure(case, profile, workload, case.swept_rate, "latency", itl_ms)
        rows.append({"model": name, "policy": "latency, target swept"} | measured)
        bar.update()
    return rows


def timed_workload(case: Case, profile: DeviceProfile, rate: float, requests: int) -> Workload:
    """Poisson arrivals, seed 0."""
    plain = load_workload("sharegpt", requests, dict(case.exits), profile.r_max)
    times = arrival_times(requests, rate, seed=0).tolist()
    return Workload(tuple(replace(r, arrival_s=t) for r, t in zip(plain.requests, times, strict=True)))


def measure(case: Case, profile: DeviceProfile, workload: Workload, rate: float, label: str, itl_ms: float) -> Row:
    """A row: one policy (an objective of auto, or ``fixed``) under one ITL target."""
    options = EngineConfig(
        policy="auto" if label in OBJECTIVES else case.fixed,
        objective=label if label in OBJECTIVES else "throughput",
        ttft_target_ms=case.ttft_ms if label in ("latency", "goodput") else None,
        itl_target_ms=itl_ms if label in ("latency", "goodput") else None,
        max_num_seqs=WIDTH,
        preemption="off",
        async_scheduling="off",
    )
    info = virtual_engine(workload, WIDTH, profile.r_max, None, profile.boundary_layers)
    run = simulate(workload, profile, SchedulerConfig.resolve(options, info), progress=False)
    targets = {"rate": rate, "ttft_target_ms": case.ttft_ms, "itl_target_ms": itl_ms}
    return targets | latencies(run, workload, case.ttft_ms, itl_ms)


def latencies(run: Run, workload: Workload, ttft_ms: float, itl_ms: float) -> Row:
    """Tokens a second, tokens a second of requests within both targets, and percentiles in ms."""
    requests = workload.requests
    ttft = 1e3 * np.array([run.first_token_s[i] - r.arrival_s for i, r in enumerate(requests)])
    decode = 1e3 * np.array([run.last_token_s[i] - run.first_token_s[i] for i in range(len(requests))])
    output = np.array([r.output_tokens for r in requests])
    good = (ttft <= ttft_ms) & (decode <= itl_ms * (output - 1))
    gaps = 1e3 * np.array(run.gaps_s)
    row: Row = {
        "tokens_per_s": run.tokens_per_s,
        "goodput_tokens_per_s": float(output[good].sum()) / run.duration_s,
        "good_requests": float(good.mean()),
        "prefills": run.steps["prefill"],
    }
    for name, values in (("ttft", ttft), ("itl", gaps)):
        row |= {f"p{q:g}_{name}_ms": float(np.percentile(values, q)) for q in (50, 99, 99.9)}
    return {key: round(value, 4) for key, value in row.items()}


def draw(rows: Sequence[Row], path: Path) -> None:
    """A row of panels a model: TTFT, ITL and goodput against throughput, and the sweep of the ITL target."""
    plt = import_pyplot()
    canvas, axes = plt.subplots(len(CASES), 5, figsize=(21, 3.9 * len(CASES)), squeeze=False, layout="constrained")
    for line, (name, case) in zip(axes, CASES.items(), strict=True):
        mine = [row for row in rows if row["model"] == name]
        panels = ("p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "goodput_tokens_per_s")
        for ax, y in zip(line, panels, strict=False):
            for label, colour in _COLOURS.items():
                found = [row for row in mine if row["policy"] == label]
                x = "rate" if y == "goodput_tokens_per_s" else "tokens_per_s"
                shown = f"{case.fixed}" if label == "fixed" else label
                ax.plot([r[x] for r in found], [r[y] for r in found], "o-", ms=3.5, color=colour, label=shown)
            ax.set(xlabel="requests/s" if x == "rate" else "tokens/s", title=f"{name}: {y.replace('_', ' ')}")
            if "ttft" in y:
                ax.set_yscale("log")
                ax.axhline(case.ttft_ms, color="0.7", ls=":")
            elif "itl" in y:
                ax.axhline(case.itl_ms, color="0.7", ls=":")
            ax.grid(alpha=0.3)
        line[0].legend(fontsize=8)
        _draw_sweep(line[4], mine, name, case)
    canvas.savefig(path, dpi=90)
    plt.close(canvas)


def _draw_sweep(ax: Any, rows: Sequence[Row], name: str, case: Case) -> None:
    swept = [row for row in rows if row["policy"] == "latency, target swept"]
    for q, colour in (("50", "tab:cyan"), ("99", "tab:blue")):
        xs, ys = [r["p99.9_itl_ms"] for r in swept], [r[f"p{q}_ttft_ms"] for r in swept]
        ax.plot(xs, ys, "o-", ms=3.5, color=colour, label=f"p{q} TTFT")
    for row in swept:
        ax.annotate(f"{row['itl_target_ms']:g}", (row["p99.9_itl_ms"], row["p99_ttft_ms"]), fontsize=8)
    plain = next(r for r in rows if r["policy"] == "throughput" and r["rate"] == case.swept_rate)
    for q in ("50", "99"):
        ax.plot([plain["p99.9_itl_ms"]], [plain[f"p{q}_ttft_ms"]], "s", color="tab:green")
    ax.set(xlabel="p99.9 ITL (ms)", ylabel="TTFT (ms)", yscale="log")
    ax.set_title(f"{name}: ITL target of latency, {case.swept_rate:g} requests/s", fontsize=10)
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    keys = ("model", "policy", "rate", "itl_target_ms", "tokens_per_s", "goodput_tokens_per_s")
    keys += ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms", "p99.9_itl_ms")  # type: ignore[assignment]
    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|---" * len(keys) + "|"]
    for row in rows:
        cells = [f"{row[key]:.4g}" if isinstance(row[key], int | float) else str(row[key]) for key in keys]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m depthbatch.benchmarks.tradeoff", description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    args = parser.parse_args()
    total = sum(len(case.rates) * len(_COLOURS) + len(case.swept_itl_ms) for case in CASES.values())
    with tqdm(total=total, unit="run", file=sys.stderr, mininterval=1.0) as bar:
        rows = [row for name in CASES for row in run_case(name, args.requests, bar)]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "tradeoff.json").write_text(json.dumps(rows, indent=1) + "\n")
    (args.output_dir / "table.md").write_text(table(rows) + "\n")
    draw(rows, args.output_dir / "tradeoff.png")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
