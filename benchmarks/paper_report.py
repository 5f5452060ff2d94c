"""``python -m depthbatch.benchmarks.paper_report``: every sweep of ``benchmarks/paper/``, and a Markdown report of our figures
against those the paper states.

Sweeps whose results lie in the output directory already are not run again (``--fresh`` runs all). Everything is in
virtual time on the shipped profiles but Fig. 3, which runs the real processes on the simulated device. The profiles are
estimates, so agreement with the paper's ratios is a check of the scheduler, not a measurement of a GPU.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthbatch.benchmarks import sustained
from depthbatch.benchmarks.figures import draw, import_pyplot
from depthbatch.benchmarks.sources import load_workload
from depthbatch.benchmarks.sweep import read_sweep, run_settings
from depthbatch.benchmarks.workloads import HUGINN_EXITS, HUGINN_WIDE, LENGTH_LAWS, OURO_EXITS
from depthbatch.common.frames import Stage
from depthbatch.worker.device_profile import DeviceProfile
from depthbatch.worker.simulated import find_profile

HERE = Path(__file__).resolve().parent
PROFILES = ("h100-ouro-1.4b", "h100-huginn-3.5b")
_PICTURE_REQUESTS = 20_000
_TOLERANCE = 0.005  # of a ratio, beyond the range that the paper states


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m depthbatch.benchmarks.paper_report", description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=HERE / "results" / "paper")
    parser.add_argument("--only", default="", help="only sweeps whose file name holds this")
    parser.add_argument("--fresh", action="store_true", help="run all sweeps again")
    args = parser.parse_args()
    out: Path = args.output_dir
    out.mkdir(parents=True, exist_ok=True)
    sections = [_inputs(out)]
    for path in sorted((HERE / "paper").glob("*.toml")):
        if args.only in path.name:
            print(path.name, file=sys.stderr, flush=True)
            sections.append(_sweep(path, out, args.fresh))
    (out / "README.md").write_text("\n\n".join([_HEAD, *sections]) + "\n")
    return 0


_HEAD = """# Ours against the paper's figures

Made by `python -m depthbatch.benchmarks.paper_report`. Virtual time on the shipped device profiles (estimates of an H100, see
`worker/profiles/`), generated workloads and exit distributions (estimates, see `benchmarks/workloads.py`): ratios
can be compared, absolute times not. Default K: 1 for Ouro, W/4 for Huginn. `auto` is ours alone.

Known differences: at full depth virtual time has no message costs, so CDB equals CB where the paper has 0.95 to 0.99; the
share of prefill follows from prefill at 500 TFLOP/s and is lower than the paper's for Ouro; serving replays 60 to 500 requests,
not ten minutes, so latencies beyond saturation are lower than a longer run's."""


def _sweep(path: Path, out: Path, fresh: bool) -> str:
    """Runs a sweep or reads its results; returns its section."""
    sweep = read_sweep(path)
    results = out / f"{path.stem}.json"
    if results.exists() and not fresh:
        rows = json.loads(results.read_text())["rows"]
    else:
        rows = run_settings(sweep)
        results.write_text(json.dumps({"title": sweep["title"], "rows": [_short(row) for row in rows]}) + "\n")
    lines = [f"## {sweep['title']}"]
    for figure in sweep.get("figures", []):
        draw(rows, figure, sweep["title"], out / figure["file"])
        lines.append(f"![{sweep['title']}]({figure['file']})")
    if sweep.get("paper"):
        lines.append(claims_table(rows, sweep["paper"]))
    if "rate" in sweep["axes"]:
        lines += [
            "Rates at equal p99 normalized latency (last column: `auto` over the best fixed one):",
            sustained.table(rows),
        ]
    return "\n\n".join(lines)


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with figures rounded to what means anything."""
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


def claims_table(rows: Sequence[Mapping[str, Any]], claims: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: what the paper states, what the rows that it concerns come to."""
    lines = ["| claim | paper | ours | |", "|---|---|---|---|"]
    for claim in claims:
        found = [row[claim["y"]] for row in rows if all(row[f"axis_{k}"] == v for k, v in claim["where"].items())]
        low, high = min(found), max(found)
        if low >= claim["low"] - _TOLERANCE and high <= claim["high"] + _TOLERANCE:
            verdict = "within"
        elif low >= claim["low"] - _TOLERANCE:
            verdict = "reaches above"
        else:
            verdict = "reaches below" if high <= claim["high"] + _TOLERANCE else "wider"
        paper = f"{claim['low']:.3g} to {claim['high']:.3g}"
        lines.append(f"| {claim['claim']} | {paper} | {low:.3g} to {high:.3g} | {verdict} |")
    return "\n".join(lines)


# --- figures of inputs: step latency (4, 9), lengths (10), exit depths (11)


def _inputs(out: Path) -> str:
    profiles = [find_profile(name) for name in PROFILES]
    draw_step_latency(profiles, out / "fig09_step_latency.png")
    draw_lengths(out / "fig10_lengths.png")
    draw_exits(out / "fig11_exits.png")
    return "\n\n".join(
        [
            "## Inputs",
            "Step latency of the profiles against batch size (Fig. 4, 9): delta dotted, B* marked.",
            "![step latency](fig09_step_latency.png)",
            "Prompt and output lengths of the generated workloads (Fig. 10).",
            "![lengths](fig10_lengths.png)",
            "Exit-depth distributions by threshold (Fig. 11).",
            "![exit depths](fig11_exits.png)",
        ]
    )


def draw_step_latency(profiles: Sequence[DeviceProfile], path: Path) -> None:
    """t(B) of a core step at several context lengths."""
    plt = import_pyplot()
    canvas, axes = plt.subplots(
        1, len(profiles), figsize=(4.6 * len(profiles), 3.6), squeeze=False, layout="constrained"
    )
    batches = np.unique(np.logspace(0, 9, 60, base=2).astype(int))
    for ax, profile in zip(axes[0], profiles, strict=True):
        for number, context in enumerate((128, 512, 2048, 8192)):
            times = [1e3 * profile.stage_seconds(Stage.CORE, int(b), int(b) * context) for b in batches]
            saturation = profile.core.delta_ms / (profile.core.gamma_ms + profile.core.alpha_ms * context)
            ax.plot(batches, times, color=f"C{number}", label=f"L = {context}, B* = {saturation:.0f}")
            ax.plot([saturation], [2 * profile.core.delta_ms], "|", color=f"C{number}", markersize=12)
        ax.axhline(profile.core.delta_ms, linestyle=":", color="0.4")
        ax.set(xscale="log", yscale="log", xlabel="batch size", title=profile.name)
        ax.legend(fontsize=8)
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("core step (ms)")
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def draw_lengths(path: Path) -> None:
    """Empirical CDFs of prompt and output tokens."""
    plt = import_pyplot()
    canvas, axes = plt.subplots(1, 2, figsize=(9.2, 3.4), layout="constrained")
    for name in LENGTH_LAWS:
        requests = load_workload(name, _PICTURE_REQUESTS, {}, 4).requests
        for ax, values in zip(
            axes, ([r.prompt_tokens for r in requests], [r.output_tokens for r in requests]), strict=True
        ):
            ax.plot(np.sort(values), np.linspace(0, 1, len(values)), label=f"{name}, mean {np.mean(values):.0f}")
    for ax, label in zip(axes, ("prompt tokens", "output tokens"), strict=True):
        ax.set(xscale="log", xlabel=label, ylabel="share of requests")
        ax.legend(fontsize=8)
        ax.grid(alpha=0.3)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def draw_exits(path: Path) -> None:
    """Share of tokens by depth and threshold."""
    plt = import_pyplot()
    canvas, axes = plt.subplots(1, 2, figsize=(10.0, 3.4), layout="constrained", width_ratios=(1, 2.6))
    tables = {
        "Ouro": {f"q={q}": weights for q, weights in OURO_EXITS.items()},
        "Huginn": {f"q={q}": w for q, w in HUGINN_EXITS.items()} | {"wide": HUGINN_WIDE},
    }
    for ax, (model, table), r_max in zip(axes, tables.items(), (4, 16), strict=True):
        grid = np.array([[weights.get(d, 0.0) for d in range(1, r_max + 1)] for weights in table.values()])
        ax.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            if value:
                ax.text(
                    column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color="k" if value < 0.6 else "w"
                )
        ax.set(title=model, xlabel="exit depth", xticks=range(r_max), yticks=range(len(table)))
        ax.set_xticklabels(range(1, r_max + 1))
        ax.set_yticklabels(list(table))
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


if __name__ == "__main__":
    sys.exit(main())
