"""How ``auto`` compares with every fixed setting: a grid of profiles, widths, workloads and exits, in virtual time.

``python -m depthbatch.benchmarks.policy_grid --output FILE.jsonl`` appends one line a cell and skips cells that the file
has already; ``--summary FILE.jsonl`` prints the tables. A cell runs ``refill`` with several K, ``no-refill`` and ``auto``
on the same requests.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from depthbatch.benchmarks.simulate import Run, simulate
from depthbatch.benchmarks.sources import load_workload
from depthbatch.benchmarks.trace import virtual_engine
from depthbatch.benchmarks.workload import Workload
from depthbatch.benchmarks.workloads import HUGINN_EXITS, HUGINN_WIDE, OURO_EXITS
from depthbatch.common.config import EngineConfig
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.worker.device_profile import CoreCost, DeviceProfile, LinearCost, StageFlops, read_profile

PROFILES = Path(__file__).resolve().parent.parent / "worker" / "profiles"
WIDTHS = (8, 16, 32, 64, 128, 256)
WORKLOADS = ("alpaca", "sharegpt", "arxiv")
SHARES_OF_W = (1 / 4, 1 / 2, 3 / 4, 7 / 8)  # K, besides 1; K = W differs from no-refill by its tail only
REQUESTS_PER_SLOT = 4  # and at least so many output tokens a cell, that start and end do not rule the result,
MIN_OUTPUT_TOKENS = 25_000
TOKENS_PER_SLOT = 1_250  # or this many for each slot where that is less
_MEAN_OUTPUT = {"alpaca": 60, "sharegpt": 311, "arxiv": 370}


class Cell(NamedTuple):
    """One comparison."""

    profile: str
    exits: str
    workload: str
    w: int


def random_profile(index: int) -> DeviceProfile:
    """A made-up device, a function of ``index`` alone: fixed and growing costs and the boundary's price vary
    independently over a factor of 30, r_max over 2..32."""
    rng = np.random.default_rng([20, index])

    def spread(middle: float) -> float:
        return float(middle * 30.0 ** rng.uniform(-0.5, 0.5))

    delta = spread(3.0)
    boundary = spread(0.4) * delta
    gamma = spread(0.01) * delta
    return DeviceProfile(
        name=f"random-{index}",
        r_max=int(rng.integers(2, 33)),
        bytes_per_kv_token=1,
        core=CoreCost(delta, gamma, spread(1e-5) * delta),
        prelude=LinearCost(0.4 * boundary, 0.4 * gamma),
        coda=LinearCost(0.6 * boundary, 0.6 * gamma),
        prefill=LinearCost(spread(3.0) * delta, spread(5e-3) * delta),
        flops=StageFlops(core=1.0, boundary=1.0),
        boundary_layers=4,
    )


def find_profiles(random_count: int) -> dict[str, DeviceProfile]:
    """The shipped profiles and ``random_count`` made-up ones, by name."""
    shipped = [read_profile(path) for path in sorted(PROFILES.glob("*.json"))]
    made_up = [random_profile(index) for index in range(random_count)]
    return {profile.name: profile for profile in (*shipped, *made_up)}


def exit_distributions(profile: DeviceProfile) -> dict[str, dict[int, float]]:
    """Four distributions of a profile: those of the paper's models, else by shares of r_max."""
    if "ouro" in profile.name:
        return {f"q={q}": OURO_EXITS[q] for q in (0.1, 0.2, 0.3, 0.5)}
    if "huginn" in profile.name:
        return {f"q={q}": HUGINN_EXITS[q] for q in (0.1, 0.28, 0.4)} | {"wide 7-16": HUGINN_WIDE}
    r_max = profile.r_max
    depths = np.arange(1, r_max + 1)
    return {
        "early": _bell(depths, 0.4 * r_max, 0.08 * r_max),
        "middle": _bell(depths, 0.65 * r_max, 0.12 * r_max),
        "wide": {int(d): 1.0 for d in depths if d > 0.4 * r_max},
        "two peaks": {max(1, round(0.3 * r_max)): 0.6, r_max: 0.4},
    }


def _bell(depths: np.ndarray, mean: float, sigma: float) -> dict[int, float]:
    weights = np.exp(-0.5 * ((depths - mean) / max(sigma, 0.5)) ** 2)
    return {int(d): float(w) for d, w in zip(depths, weights, strict=True) if w > 1e-3}


def run_setting(profile: DeviceProfile, workload: Workload, policy: str, w: int, k: int | None = None) -> Run:
    """One policy in virtual time, with KV memory that never binds."""
    options = EngineConfig(policy=policy, max_num_seqs=w, min_coda_batch=k, preemption="off", async_scheduling="off")
    info = virtual_engine(workload, w, profile.r_max, None, profile.boundary_layers)
    return simulate(workload, profile, SchedulerConfig.resolve(options, info), progress=False)


def num_requests(cell: Cell) -> int:
    """How many requests make a cell's result."""
    tokens = min(MIN_OUTPUT_TOKENS, TOKENS_PER_SLOT * cell.w)
    return max(tokens // _MEAN_OUTPUT[cell.workload], REQUESTS_PER_SLOT * cell.w)


def run_cell(cell: Cell, profile: DeviceProfile, exits: dict[int, float]) -> dict[str, Any]:
    """All settings of a cell; throughputs in tokens/s."""
    workload = load_workload(cell.workload, num_requests(cell), exits, profile.r_max)
    fixed = {}
    for k in sorted({1, *(max(1, round(share * cell.w)) for share in SHARES_OF_W)}):
        fixed[f"refill K={k}"] = run_setting(profile, workload, "refill", cell.w, k).tokens_per_s
    fixed["no-refill"] = run_setting(profile, workload, "no-refill", cell.w).tokens_per_s
    rounded = {name: round(value, 2) for name, value in fixed.items()}
    line = cell._asdict() | {"requests": len(workload.requests), "fixed": rounded}
    return line | run_auto(cell, profile, workload, rounded)


def run_auto(cell: Cell, profile: DeviceProfile, workload: Workload, fixed: dict[str, float]) -> dict[str, Any]:
    """What ``auto`` comes to beside the fixed settings of its cell."""
    auto = run_setting(profile, workload, "auto", cell.w)
    best = max(fixed, key=lambda name: fixed[name])
    plain = max(fixed[f"refill K={max(1, round(cell.w / 4))}"], fixed["no-refill"])
    return {
        "auto": round(auto.tokens_per_s, 2),
        "best": best,
        "auto_vs_best": round(auto.tokens_per_s / fixed[best], 4),
        "auto_vs_plain": round(auto.tokens_per_s / plain, 4),
        "prefill_share": round(auto.busy_s["prefill"] / auto.duration_s, 3),
        "auto_us": [round(float(us), 1) for us in np.percentile(auto.scheduler_us, (50, 99))],
    }


def run_auto_again(source: Path, target: Path, profiles: dict[str, DeviceProfile]) -> None:
    """Cells of a file with ``auto`` as it is now; fixed settings do not depend on it and are kept."""
    for line in map(json.loads, source.read_text().splitlines()):
        cell = Cell(*(line[key] for key in Cell._fields))
        profile = profiles[cell.profile]
        exits = exit_distributions(profile)[cell.exits]
        workload = load_workload(cell.workload, line["requests"], exits, profile.r_max)
        again = run_auto(cell, profile, workload, line["fixed"])
        print(*cell, line["auto_vs_best"], "->", again["auto_vs_best"], file=sys.stderr, flush=True)
        with target.open("a") as file:
            file.write(json.dumps(line | again) + "\n")


def cells(profiles: dict[str, DeviceProfile], widths: Sequence[int], workloads: Sequence[str]) -> Iterator[Cell]:
    """The grid, small widths first."""
    for w in widths:
        for name, profile in profiles.items():
            for exits in exit_distributions(profile):
                for workload in workloads:
                    yield Cell(name, exits, workload, w)


def run_grid(path: Path, profiles: dict[str, DeviceProfile], widths: Sequence[int], workloads: Sequence[str]) -> None:
    """Appends what is missing in ``path``."""
    lines = path.read_text().splitlines() if path.exists() else []
    have = {Cell(*(json.loads(line)[key] for key in Cell._fields)) for line in lines}
    todo = [cell for cell in cells(profiles, widths, workloads) if cell not in have]
    for number, cell in enumerate(todo, start=1):
        profile = profiles[cell.profile]
        line = run_cell(cell, profile, exit_distributions(profile)[cell.exits])
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{number}/{len(todo)}", *cell, line["auto_vs_best"], line["auto_vs_plain"], file=sys.stderr, flush=True)


def summary(path: Path) -> str:
    """Markdown: per profile and exits, the least ratio over workloads for each width."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    widths = sorted({row["w"] for row in rows})
    out = [
        f"{len(rows)} cells. Each entry: auto / best fixed setting (auto / better of no-refill and K = W/4), least over workloads.",
        "",
    ]
    out += ["| profile | exits | " + " | ".join(f"W = {w}" for w in widths) + " |", "|---" * (2 + len(widths)) + "|"]
    for name, exits in dict.fromkeys((row["profile"], row["exits"]) for row in rows):
        entries = []
        for w in widths:
            found = [r for r in rows if (r["profile"], r["exits"], r["w"]) == (name, exits, w)]
            least = [min((r[key] for r in found), default=float("nan")) for key in ("auto_vs_best", "auto_vs_plain")]
            entries.append(f"{least[0]:.3f} ({least[1]:.3f})" if found else "-")
        out.append(f"| {name} | {exits} | " + " | ".join(entries) + " |")
    ratios = np.array([row["auto_vs_best"] for row in rows])
    plain = np.array([row["auto_vs_plain"] for row in rows])
    out += [
        "",
        f"auto / best fixed: least {ratios.min():.4f}, median {np.median(ratios):.4f}, most {ratios.max():.4f}; "
        f"{np.mean(ratios >= 0.99):.1%} of cells at 0.99 or more.",
        f"auto / better of no-refill and K = W/4: least {plain.min():.4f}, median {np.median(plain):.4f}, most {plain.max():.4f}; "
        f"{np.mean(plain >= 1.0):.1%} of cells at 1 or more.",
    ]
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m depthbatch.benchmarks.policy_grid", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("policy_grid.jsonl"), metavar="FILE.jsonl")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--random-profiles", type=int, default=10)
    parser.add_argument("--profile", default=None, help="only profiles whose name holds this")
    parser.add_argument(
        "--summary", type=Path, default=None, metavar="FILE.jsonl", help="only print the tables of a file"
    )
    parser.add_argument(
        "--again", type=Path, default=None, metavar="FILE.jsonl", help="run only auto, in that file's cells"
    )
    args = parser.parse_args()
    if args.again is not None:
        run_auto_again(args.again, args.output, find_profiles(args.random_profiles))
    elif args.summary is None:
        profiles = find_profiles(args.random_profiles)
        chosen = {name: p for name, p in profiles.items() if args.profile is None or args.profile in name}
        run_grid(args.output, chosen, args.widths, args.workloads)
    print(summary(args.summary or args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
