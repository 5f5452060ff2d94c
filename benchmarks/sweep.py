"""``depthbatch bench sweep FILE.toml``: the product of settings, one table, and figures.

A sweep file names a runner (``simulate``: virtual time; ``throughput``: the real processes), axes whose product is
run, and figures over the results::

    title = "Throughput against W"
    runner = "simulate"
    requests = 200                 # or a table by workload
    [axes]
    profile = ["h100-ouro-1.4b"]
    workload = ["alpaca", "sharegpt"]
    exits = ["q=0.2"]              # "q=..." of the model's table, "wide", "full" or a map of depth to weight
    policy = ["no-refill", "refill", "refill:16", "auto"]
    w = [8, 64]
    [[figures]]
    file = "w.png"
    x = "w"
    y = "relative_to_cb"
    lines = "policy"
    panels = "workload"

Each group of settings that differ in the policy alone gets one run of ``cb``, which is in the results too.
"""

import argparse
import itertools
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from depthbatch.benchmarks.arrivals import arrival_times
from depthbatch.benchmarks.simulate import Run, report, simulate
from depthbatch.benchmarks.sources import load_workload
from depthbatch.benchmarks.throughput import BASELINE, PolicyChoice
from depthbatch.benchmarks.trace import virtual_engine
from depthbatch.benchmarks.workload import Workload
from depthbatch.benchmarks.workloads import HUGINN_EXITS, HUGINN_WIDE, OURO_EXITS, parse_distribution
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.worker.device_profile import DeviceProfile, LinearCost
from depthbatch.worker.simulated import find_profile

RUNNERS = ("simulate", "throughput")
AXES: dict[str, Any] = {  # name -> value when the file does not give the axis
    "profile": None,
    "workload": "sharegpt",
    "exits": None,
    "policy": "refill",
    "w": 64,
    "k_share": None,  # K as a share of W
    "s": None,
    "m": 8192,
    "rate": None,  # requests a second; None = all at once
    "boundary_layers": None,  # layers on each side of the core; None = the profile's
    "async_scheduling": "off",
}
_KEYS = {"title", "runner", "requests", "seed", "axes", "figures", "paper", "w_by_workload"}
Row = dict[str, Any]


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """The file and where results go."""
    parser.add_argument("file", metavar="FILE.toml", type=Path)
    parser.add_argument("--output-dir", metavar="DIR", type=Path, default=Path("."), help="for results and figures")
    parser.add_argument("--requests", type=int, default=None, help="overrides the file's")


def run_sweep(args: argparse.Namespace) -> int:
    """Runs the product; writes NAME.json and the figures, prints the table as Markdown."""
    from depthbatch.benchmarks.figures import draw

    sweep = read_sweep(args.file)
    if args.requests is not None:
        sweep["requests"] = args.requests
    rows = run_settings(sweep)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    result = {"title": sweep["title"], "rows": rows}
    (args.output_dir / f"{args.file.stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    for figure in sweep.get("figures", []):
        draw(rows, figure, sweep["title"], args.output_dir / figure["file"])
    print(table(rows, sweep["axes"]))
    return 0


def read_sweep(path: Path) -> dict[str, Any]:
    """A checked sweep file. Raises ConfigError naming file and key."""
    try:
        sweep = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"sweep {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"sweep {path}: not TOML ({error})") from None
    for key in sweep:
        if key not in _KEYS:
            raise ConfigError(f"sweep {path}: unknown key {key!r}; known are {', '.join(sorted(_KEYS))}")
    if not isinstance(sweep.get("axes"), dict) or "profile" not in sweep["axes"]:
        raise ConfigError(f"sweep {path}: no table [axes] with a profile")
    for name, values in sweep["axes"].items():
        if name not in AXES:
            raise ConfigError(f"sweep {path}: unknown axis {name!r}; known are {', '.join(AXES)}")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep {path}: axis {name!r} must be a list of values")
    if sweep.setdefault("runner", "simulate") not in RUNNERS:
        raise ConfigError(f"sweep {path}: runner {sweep['runner']!r} is not one of {', '.join(RUNNERS)}")
    sweep.setdefault("title", path.stem)
    return sweep


def settings(sweep: Mapping[str, Any]) -> Iterator[Row]:
    """Every combination of the axes, as one map each; ``w_by_workload`` replaces w for the workloads it names."""
    axes = sweep["axes"]
    special = sweep.get("w_by_workload", {})
    for values in itertools.product(*axes.values()):
        setting = AXES | dict(zip(axes, values, strict=True))
        if setting["workload"] in special and "w" not in axes:
            setting["w"] = special[setting["workload"]]
        yield setting


def run_settings(sweep: Mapping[str, Any]) -> list[Row]:
    """One row a setting, baselines first in each group."""
    runner = _Simulations(sweep) if sweep["runner"] == "simulate" else _Processes(sweep)
    rows: list[Row] = []
    seen: set[str] = set()
    for setting in tqdm(list(settings(sweep)), unit="setting", file=sys.stderr, mininterval=1.0):
        baseline = setting | {"policy": BASELINE, "k_share": None}
        for one in (baseline, setting):
            key = json.dumps(one, sort_keys=True)
            if key not in seen:
                seen.add(key)
                rows.append(_labels(one) | runner.run(one))
    return rows


def exit_weights(name: Any, profile: DeviceProfile) -> dict[int, float] | None:
    """Exits as a sweep file names them; None = the default of the model's depth, {} = full depth."""
    if name is None or isinstance(name, Mapping):
        return None if name is None else parse_distribution(name)
    if name == "full":
        return {}
    if name == "wide":
        return HUGINN_WIDE
    tables = OURO_EXITS if profile.r_max <= 4 else HUGINN_EXITS
    try:
        return tables[float(str(name).removeprefix("q="))]
    except (KeyError, ValueError):
        known = ", ".join(f"q={q}" for q in tables)
        raise ConfigError(f"exits {name!r} is not full, wide, a map, or one of {known}") from None


def with_boundary_layers(profile: DeviceProfile, per_side: int, core_layers: int = 4) -> DeviceProfile:
    """The profile with another number of layers in prelude and coda, each as costly as a core layer. What prelude and
    coda cost beyond the layers they have (embedding, head) stays. Paper, figure 7 right: 2-4-2, 1-4-1, 0-4-0."""
    had = profile.boundary_layers / 2

    def stage(cost: LinearCost) -> LinearCost:
        delta, gamma = profile.core.delta_ms / core_layers, profile.core.gamma_ms / core_layers
        fixed = max(0.0, cost.delta_ms - had * delta), max(0.0, cost.gamma_ms - had * gamma)
        return LinearCost(fixed[0] + per_side * delta, fixed[1] + per_side * gamma)

    return msgspec.structs.replace(
        profile, prelude=stage(profile.prelude), coda=stage(profile.coda), boundary_layers=2 * per_side
    )


class _Runner:
    """Workloads and profiles of settings."""

    def __init__(self, sweep: Mapping[str, Any]) -> None:
        self._requests = sweep.get("requests", 200)
        self._seed = sweep.get("seed", 0)

    def profile(self, setting: Row) -> DeviceProfile:
        profile = find_profile(setting["profile"])
        layers = setting["boundary_layers"]
        return profile if layers is None else with_boundary_layers(profile, layers)

    def workload(self, setting: Row, profile: DeviceProfile) -> Workload:
        name = setting["workload"]
        n = self._requests.get(name, 200) if isinstance(self._requests, Mapping) else self._requests
        exits = {} if setting["policy"] == BASELINE else exit_weights(setting["exits"], profile)
        workload = load_workload(name, n, exits, profile.r_max, self._seed)
        if setting["rate"] is None:
            return workload
        arrivals = arrival_times(len(workload.requests), setting["rate"], seed=self._seed).tolist()
        return Workload(tuple(replace(r, arrival_s=t) for r, t in zip(workload.requests, arrivals, strict=True)))

    def options(self, setting: Row, profile: DeviceProfile) -> EngineConfig:
        choice = PolicyChoice.parse(setting["policy"])
        k = choice.k
        if setting["k_share"] is not None and choice.policy == "refill":
            k = max(1, round(setting["k_share"] * setting["w"]))
        return EngineConfig(
            policy=choice.policy,
            max_num_seqs=setting["w"],
            max_num_batched_tokens=setting["m"],
            min_free_slots=setting["s"],
            min_coda_batch=k,
            async_scheduling=setting["async_scheduling"],
            preemption="off",
        )


class _Simulations(_Runner):
    """Virtual time. Settings that come to the same are run once: ``cb`` whatever the exits, K only for refill."""

    def __init__(self, sweep: Mapping[str, Any]) -> None:
        super().__init__(sweep)
        self._runs: dict[str, Run] = {}

    def run(self, setting: Row) -> Row:
        profile = self.profile(setting)
        baseline = self._simulate(setting | {"policy": BASELINE}, profile)
        return self._figures(self._simulate(setting, profile), baseline, setting, profile)

    def _simulate(self, setting: Row, profile: DeviceProfile) -> Run:
        if setting["policy"] != "refill":
            setting = setting | {"k_share": None}
        if setting["policy"] == BASELINE:
            setting = setting | {"exits": None}
        key = json.dumps(setting, sort_keys=True)
        if key not in self._runs:
            workload, options = self.workload(setting, profile), self.options(setting, profile)
            info = virtual_engine(workload, setting["w"], profile.r_max, None, profile.boundary_layers)
            self._runs[key] = simulate(workload, profile, SchedulerConfig.resolve(options, info), progress=False)
        return self._runs[key]

    def _figures(self, run: Run, baseline: Run, setting: Row, profile: DeviceProfile) -> Row:
        workload = self.workload(setting, profile)
        return report(run, baseline, profile, workload) | latency_figures(run, workload)


class _Processes(_Runner):
    """The real processes, each setting in an engine of its own, on the simulated device."""

    def __init__(self, sweep: Mapping[str, Any]) -> None:
        super().__init__(sweep)
        self._baseline: Any = None

    def run(self, setting: Row) -> Row:
        from depthbatch.benchmarks.throughput import measure

        if setting["rate"] is not None or setting["boundary_layers"] is not None:
            raise ConfigError("sweep: rate and boundary_layers need runner 'simulate'")
        profile = self.profile(setting)
        config = replace(self.options(setting, profile), device=f"simulated:{setting['profile']}")
        record = measure(config, self.workload(setting, profile), profile.flops)
        if setting["policy"] == BASELINE:
            self._baseline = record
        record.compare_with(self._baseline)
        return record.as_json()


def latency_figures(run: Run, workload: Workload) -> Row:
    """Mean and p99 of normalized latency (end to end over output tokens) and of TTFT, seconds of virtual time."""
    requests = workload.requests
    e2e = [(run.last_token_s[i] - requests[i].arrival_s) / requests[i].output_tokens for i in run.last_token_s]
    ttft = [run.first_token_s[i] - requests[i].arrival_s for i in run.first_token_s]
    return {
        "normalized_latency_s": float(np.mean(e2e)),
        "p99_normalized_latency_s": float(np.percentile(e2e, 99)),
        "mean_ttft_s": float(np.mean(ttft)),
        "p99_ttft_s": float(np.percentile(ttft, 99)),
    }


def _labels(setting: Row) -> Row:
    """The axes of a row, so that figures find them under their own names."""
    label = setting["exits"]
    return {f"axis_{name}": value for name, value in setting.items()} | {
        "axis_exits": label if isinstance(label, str) or label is None else json.dumps(label)
    }


def table(rows: Sequence[Row], axes: Mapping[str, Any]) -> str:
    """Markdown: the axes that vary, and the main figures."""
    varying = [name for name in axes if len({json.dumps(row[f"axis_{name}"]) for row in rows}) > 1]
    figures = ["tokens_per_s", "relative_to_cb", "s_e2e", "realized", "prefill_share", "idle_share", "mean_depth"]
    if any(row["axis_rate"] is not None for row in rows):
        figures += ["normalized_latency_s", "p99_normalized_latency_s"]
    lines = ["| " + " | ".join(varying + figures) + " |", "|---" * (len(varying) + len(figures)) + "|"]
    for row in rows:
        cells = [str(row[f"axis_{name}"]) for name in varying] + [f"{row[name]:.4g}" for name in figures]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
