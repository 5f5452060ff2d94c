"""``depthbatch bench paper``: every sweep of ``benchmarks/paper/``, and a Markdown report of our figures against those
the paper states.

Sweeps whose results lie in the output directory already are not run again (``--fresh`` runs all, ``--only TEXT`` with it
those whose name holds TEXT). Everything is in virtual time on the shipped profiles but Fig. 3, which runs the real
processes on the simulated device. The profiles are estimates, so agreement with the paper's ratios is a check of the
scheduler, not a measurement of a GPU.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthbatch.benchmarks.figures import draw
from depthbatch.benchmarks.paper_claims import claims_report
from depthbatch.benchmarks.paper_cpu import measure_cpu
from depthbatch.benchmarks.paper_judges import CPU_RESULTS, MODELS, MOST_LATENCY, Results
from depthbatch.benchmarks.paper_pictures import draw_exits, draw_idle, draw_k, draw_lengths, draw_step_latency
from depthbatch.benchmarks.sweep import AXES, SUMMARIES, read_sweep, run_settings
from depthbatch.benchmarks.tables import sustained_table, table
from depthbatch.common.arguments import output_directory, positive
from depthbatch.common.errors import ConfigError
from depthbatch.worker.simulated import find_profile

HERE = Path(__file__).resolve().parent
_COLUMNS = (
    "tokens_per_s",
    "relative_to_cb",
    "realized",
    "prefill_share",
    "idle_share",
    "mean_batch.core",
    "mean_batch.coda",
)
_NOT_KEPT = ("scheduler_us_per_stage", "stage_share", "acceptance", "draft_lanes_mean")  # of rows


def add_paper_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results go, and which sweeps."""
    parser.add_argument("--output-dir", metavar="DIR", type=output_directory, default=HERE / "results" / "paper")
    parser.add_argument("--only", metavar="TEXT", default="", help="run no sweep whose file name does not hold this")
    parser.add_argument("--fresh", action="store_true", help="run sweeps again whose results are there")
    parser.add_argument(
        "--jobs",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="processes that simulate (default: the cores)",
    )


def run_paper_report(args: argparse.Namespace) -> int:
    """Runs sweeps, draws, writes the report of all results that are there. Raises ConfigError."""
    out: Path = args.output_dir
    sweeps = {path.stem: read_sweep(path) for path in sorted((HERE / "paper").glob("*.toml"))}
    cpu = out / CPU_RESULTS
    if not any(args.only in name for name in (*sweeps, cpu.stem)):
        raise ConfigError(f"--only {args.only}: in the name of no sweep; there are {', '.join((*sweeps, cpu.stem))}")
    out.mkdir(parents=True, exist_ok=True)
    for name, sweep in sweeps.items():
        started_s, path = time.monotonic(), out / f"{name}.json"
        if args.only in name and (args.fresh or not path.exists()):
            lines = ",\n".join(json.dumps(_short(row)) for row in run_settings(sweep, jobs=args.jobs))
            path.write_text(f'{{"title": {json.dumps(sweep["title"])}, "rows": [\n{lines}\n]}}\n')
            print(f"{name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
    if args.only in cpu.stem and (args.fresh or not cpu.exists()):
        cpu.write_text(json.dumps(_rounded(measure_cpu())) + "\n")
    results = Results(out, HERE / "results")
    sections = [
        _HEAD,
        "## Claims",
        _VERDICTS,
        claims_report(results),
        _DIFFERENCES,
        _inputs(out, results),
        *_pictures(out, results),
    ]
    sections += [_section(sweep, results.rows(name), out) for name, sweep in sweeps.items() if results.has(name)]
    (out / "README.md").write_text("\n\n".join(sections) + "\n")
    return 0


_HEAD = """# Ours against the paper

Made by `depthbatch bench paper`. Virtual time on the shipped device profiles (estimates of an H100, see
`worker/profiles/`), generated workloads and exit distributions (estimates, see `benchmarks/synthetic.py`): ratios
can be compared, absolute times not. Default K: 1 for Ouro, W/4 for Huginn. `auto` is ours alone.

Throughput is that of a window in steady state, which begins after two mean outputs a slot and lasts four, or 64 requests' worth
where that is more. Serving replays what arrives in a fixed time: 40 s of Alpaca, 120 s of ShareGPT, 200 s of arXiv
(202 to 2,452, 149 to 992 and 20 to 165 requests a point)."""

_VERDICTS = f"""One row a claim of the paper's text. Figures are computed from the results in this directory, verdicts follow from
them. Ranges are over workloads, and over whatever else a claim covers; "in n of m" counts those cases. Best: within 0.5 % of it; near
the best: within 2 %; bounds are close within 10 %. Capacity: the rate at which mean normalized latency reaches {MOST_LATENCY:g} times
that of CB at the lowest rate."""

_DIFFERENCES = """Where we differ:

* **K on Huginn.** The profiles' prelude and coda cost 1.2 core steps together, as the paper says, and K = W/4 pays for them
  less than a quarter as full as they could be. From K = W/2 on rows that leave together also come back together, so core batches
  grow again (below, Fig. 7, left). The paper's exit depths, which are in a picture alone, may be spread more widely.
* **Full depth.** Virtual time has no cost between stages. What a launch must cost for the paper's shares is in the table. Real
  processes on a simulated device lose less than the paper's: two cores with nothing else to do at that time.
* **No overlap.** A scheduler that waits for each stage leaves the device idle for 16 to 22 % of the time there; exits win that back in
  three of four cells.
* **Prefill** costs what FLOPs at 500 TFLOP/s cost, so its share is lower than the paper's where prompts are short.
* **The CPU of this machine** is bound by arithmetic from about the third row on: a second row costs 4 to 6 %, but no batch is well below B*."""


def _section(sweep: Mapping[str, Any], rows: list[dict[str, Any]], out: Path) -> str:
    """Pictures and tables of a sweep's results."""
    lines = [f"## {sweep['title']}"]
    for figure in sweep.get("figures", []):
        draw(rows, figure, sweep["title"], out / figure["file"])
        lines.append(f"![{figure.get('title', sweep['title'])}]({figure['file']})")
    if "summary" in sweep:
        lines.append(SUMMARIES[sweep["summary"]](rows))
    elif not sweep.get("figures") and "rate" not in sweep["axes"]:
        lines.append(table(rows, sweep["axes"], _COLUMNS))
    if "rate" in sweep["axes"]:
        lines += [
            "Rates at equal p99 normalized latency, `auto` over the best fixed policy; then p99 and mean normalized latency of `auto` "
            "over the least of fixed policies at the same rate. Over seeds: mean (least to most).",
            sustained_table(rows),
        ]
    return "\n\n".join(lines)


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with figures rounded to what means anything, without those that tell of this machine and without axes at their
    default."""
    return {
        key: _rounded(value)
        for key, value in row.items()
        if key not in _NOT_KEPT and not (key.startswith("axis_") and value == AXES[key.removeprefix("axis_")])
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _inputs(out: Path, results: Results) -> str:
    measured = results.cpu()["steps"] if results.has(Path(CPU_RESULTS).stem) else []
    draw_step_latency([find_profile(name) for name in MODELS.values()], measured, out / "fig09_step_latency.png")
    draw_lengths(out / "fig10_lengths.png")
    draw_exits(out / "fig11_exits.png")
    return "\n\n".join(
        [
            "## Inputs, and step latency measured here",
            "Step latency against batch size (Fig. 4, 9), of the profiles and measured on the CPU of the machine that made this "
            "report, where points are measured and lines fitted (12 layers of width 512, and four of the 24 layers of Ouro-1.4B, "
            "bf16): delta dotted, B* marked.",
            "![step latency](fig09_step_latency.png)",
            "Prompt and output lengths of the generated workloads (Fig. 10).",
            "![lengths](fig10_lengths.png)",
            "Exit-depth distributions by threshold (Fig. 11).",
            "![exit depths](fig11_exits.png)",
        ]
    )


def _pictures(out: Path, results: Results) -> list[str]:
    """Those that more than one sweep is behind."""
    lines = []
    idle = {model: f"fig03_idle_{model}" for model in MODELS}
    if all(results.has(name) for name in idle.values()):
        draw_idle({model: results.rows(name) for model, name in idle.items()}, out / "fig03_idle.png")
        lines += ["## Idle time by scheduling mode (Fig. 3)", "![idle time](fig03_idle.png)"]
    effect = ("fig07_k_ouro", "fig07_k_huginn", "fig07_layers_huginn")
    if all(results.has(name) for name in effect):
        ouro, huginn, layers = (results.rows(name) for name in effect)
        draw_k(ouro, huginn, layers, out / "fig07_k.png")
        lines += ["## Effect of K, ShareGPT (Fig. 7)", "![effect of K](fig07_k.png)"]
    return lines
