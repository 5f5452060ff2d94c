"""``depthbatch bench fleet-sweep DIR``: the runs behind docs/scale.md, a row of DIR/fleet.jsonl each as they come, and its figures.

Goes on where the file ends. Rows that are there are not run again, so taking a row out runs it anew.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from depthbatch.benchmarks.figures import import_pyplot
from depthbatch.benchmarks.fleet import Fleet, Run, fewest_replicas, line, report
from depthbatch.benchmarks.fleet_traffic import TrafficOptions, make_traffic
from depthbatch.common.errors import ConfigError
from depthbatch.worker.simulated import find_profile

PROFILE = "h100-ouro-1.4b"
MIXED = "0.1,1.0"  # half of the requests leave early, half never
GOAL_TTFT_MS, GOAL_TPOT_MS = 500.0, 40.0  # p99
ROWS_FILE = "fleet.jsonl"
QUESTIONS = ("process", "router", "death", "prefix", "goal", "scale")
BEGINNINGS = 200


class Case(NamedTuple):
    """One row. ``question``: which part of the page it belongs to."""

    question: str
    fleet: Fleet
    traffic: TrafficOptions
    requests: int
    goal: bool = False  # find the fewest replicas, at most those of the fleet

    @property
    def key(self) -> str:
        return json.dumps([self.question, *map(str, self[1:])])


def cases() -> Iterator[Case]:
    """All of them, the cheap ones first."""
    for width in (64, 128, 256, 512):
        rate = 36.0 * (width / 64) ** 0.8
        yield Case("process", Fleet(1, width=width), TrafficOptions(rate=rate, exits=MIXED), int(rate * 60))
    for rate in (370.0, 340.0, 310.0, 280.0):
        for router in ("round-robin", "requests", "loops"):
            yield Case("router", Fleet(10, router), TrafficOptions(rate=rate, exits=MIXED), 8_000)
    for rate in (300.0, 250.0, 340.0):
        yield Case("death", Fleet(10), TrafficOptions(rate=rate), 8_000)
        for resume in (True, False):
            fleet = Fleet(10, failures=1, fail_at_s=2_500 / rate, restart_s=12.0, resume=resume)
            yield Case("death", fleet, TrafficOptions(rate=rate), 8_000)
    for router in ("round-robin", "loops", "prefix"):
        traffic = TrafficOptions(rate=200.0, prefixes=BEGINNINGS)
        yield Case("prefix", Fleet(10, router, prefix_caching=True, kv_blocks=4000), traffic, 6_000)
    for rate in (100.0, 1000.0, 300.0, 30.0):
        for router in ("loops", "round-robin"):
            requests = int(min(12_000, max(4_000, 20 * rate)))
            most = max(2, int(rate / 24))
            yield Case("goal", Fleet(most, router), TrafficOptions(rate=rate, exits=MIXED), requests, goal=True)
    for replicas in (10, 100, 1000):
        traffic = TrafficOptions(rate=34.0 * replicas, exits=MIXED)
        yield Case("scale", Fleet(replicas), traffic, 100_000)


def run_case(case: Case) -> dict[str, Any]:
    profile = find_profile(PROFILE)
    traffic = make_traffic(case.traffic, case.requests, profile.r_max)

    def probe(replicas: int) -> dict[str, Any]:
        fleet = case.fleet.with_replicas(replicas)
        return report(fleet, traffic, Run(fleet, traffic, profile).run())

    most = case.fleet.replicas
    if not case.goal:
        row = probe(most)
    else:
        row = fewest_replicas(probe, (GOAL_TTFT_MS, GOAL_TPOT_MS), max(1, int(0.6 * most)), most)
    return {"question": case.question, "case": case.key, **row}


def sweep(directory: Path, todo: Iterable[Case], say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Runs what the directory's rows lack; all rows."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror}") from None
    path = directory / ROWS_FILE
    rows = read_rows(directory)
    done = {row["case"] for row in rows}
    for case in todo:
        if case.key in done:
            continue
        row = run_case(case)
        say(f"{case.question}: {line(row)}")
        rows.append(row)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return rows


def read_rows(directory: Path) -> list[dict[str, Any]]:
    path = directory / ROWS_FILE
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def tables(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as the page has them, a table a question."""
    lines: list[str] = []
    rows = list(rows)
    for question in dict.fromkeys(row["question"] for row in rows):
        head = ("replicas", "W", "router", "requests/s", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "device", "")
        lines += [f"\n{question}\n", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in (row for row in rows if row["question"] == question):
            ttft, tpot = row["ttft_ms"], row["tpot_ms"]
            cells = [
                str(row["replicas"]),
                str(row["width"]),
                row["router"],
                f"{row['rate']:.0f}",
                f"{row['tokens_per_s']:.0f}",
            ]
            cells += [f"{ttft['p50']:.0f}", f"{ttft['p99']:.0f}", f"{tpot['p50']:.1f}", f"{tpot['p99']:.1f}"]
            lines.append("| " + " | ".join([*cells, f"{row['device_load']:.0%}", _more(row)]) + " |")
    return "\n".join(lines) + "\n"


def _more(row: Mapping[str, Any]) -> str:
    """What only some rows have."""
    if row["question"] == "death":
        if not row["failures"]:
            return "nobody dies"
        gap, end = row["victims_longest_gap_ms"], row["victims_e2el_s"]
        how = "goes on" if row["resume"] else "begins anew"
        return f"{how}: {row['victims']} lost it, longest gap p50 {gap['p50']:.0f} ms, last token p50 {end['p50']:.2f} s, p99 {end['p99']:.2f} s"
    if "prefix_hit_rate" in row:
        return f"hits {row['prefix_hit_rate']:.0%}"
    if row["question"] == "goal":
        return f"{1e3 * row['replicas'] / row['rate']:.1f} device-seconds per 1,000 requests"
    return f"{row['requests']} requests in {row['wall_s']:.0f} s, scheduler core {row['scheduler_load']:.1%} of a CPU"


def draw(rows: Iterable[Mapping[str, Any]], directory: Path) -> None:
    """Figures of the page: p99 by router and load; what a death costs; replicas for a load."""
    plt = import_pyplot()
    rows = list(rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for router, colour in (("round-robin", "0.35"), ("requests", "tab:orange"), ("loops", "tab:blue")):
        of_router = sorted(
            (row["rate"], row) for row in rows if row["question"] == "router" and row["router"] == router
        )
        for axes, name in ((left, "ttft_ms"), (right, "tpot_ms")):
            axes.plot(
                [rate for rate, _ in of_router],
                [row[name]["p99"] for _, row in of_router],
                "o-",
                c=colour,
                label=router,
            )
    for axes, name in ((left, "TTFT p99 (ms)"), (right, "TPOT p99 (ms)")):
        axes.set(xlabel="requests/s at 10 replicas", ylabel=name)
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    left.legend()
    figure.savefig(directory / "routers.png", dpi=110)
    plt.close(figure)
    figure, axes = plt.subplots(figsize=(5, 3.6), constrained_layout=True)
    for router, colour in (("round-robin", "0.35"), ("loops", "tab:blue")):
        found = sorted(
            (row["rate"], row["replicas"]) for row in rows if row["question"] == "goal" and row["router"] == router
        )
        axes.plot(*zip(*found, strict=True), "o-", c=colour, label=router) if found else None
    axes.set(xlabel="requests/s", ylabel="replicas that meet the goal", xscale="log", yscale="log")
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend()
    figure.savefig(directory / "goal.png", dpi=110)
    plt.close(figure)


def add_fleet_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench fleet-sweep``."""
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--only", choices=QUESTIONS, help="one question")


def run_fleet_sweep(args: argparse.Namespace) -> int:
    """Raises ConfigError; where the figures cannot be drawn, before anything runs."""
    import_pyplot()
    rows = sweep(args.directory, (case for case in cases() if args.only in (None, case.question)))
    (args.directory / "tables.txt").write_text(tables(rows), encoding="utf-8")
    draw(rows, args.directory)
    return 0
