"""``depthbatch bench paper``: every sweep of ``benchmarks/paper/``, and a Markdown report of our figures against those
the paper states.

Sweeps whose results lie in the output directory already are not run again (``--fresh`` runs all). Everything is in
virtual time on the shipped profiles but Fig. 3, which runs the real processes on the simulated device. The profiles are
estimates, so agreement with the paper's ratios is a check of the scheduler, not a measurement of a GPU.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthbatch.benchmarks.figures import draw, draw_exits, draw_lengths, draw_step_latency
from depthbatch.benchmarks.sweep import SUMMARIES, read_sweep, run_settings
from depthbatch.benchmarks.tables import claims_table, sustained_table
from depthbatch.worker.simulated import find_profile

HERE = Path(__file__).resolve().parent
PROFILES = ("h100-ouro-1.4b", "h100-huginn-3.5b")


def add_paper_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results go, and which sweeps."""
    parser.add_argument("--output-dir", metavar="DIR", type=Path, default=HERE / "results" / "paper")
    parser.add_argument("--only", metavar="TEXT", default="", help="only sweeps whose file name holds this")
    parser.add_argument("--fresh", action="store_true", help="run all sweeps again")


def run_paper_report(args: argparse.Namespace) -> int:
    """Runs sweeps, draws, writes the report."""
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

Made by `depthbatch bench paper`. Virtual time on the shipped device profiles (estimates of an H100, see
`worker/profiles/`), generated workloads and exit distributions (estimates, see `benchmarks/synthetic.py`): ratios
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
    if "summary" in sweep:
        lines.append(SUMMARIES[sweep["summary"]](rows))
    if sweep.get("paper"):
        lines.append(claims_table(rows, sweep["paper"]))
    if "rate" in sweep["axes"]:
        lines += [
            "Rates at equal p99 normalized latency (last column: `auto` over the best fixed one):",
            sustained_table(rows),
        ]
    return "\n\n".join(lines)


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with figures rounded to what means anything."""
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


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
