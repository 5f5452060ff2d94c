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

Policies: those of the engine, ``refill:K`` with a number or a share of W (``refill:3W/4``), ``auto:OBJECTIVE``. Targets
(``ttft_target_ms``, ``itl_target_ms``) are the objectives' and add percentiles and goodput to all rows. Each group of
settings that differ in the policy alone gets one run of ``cb``, which is in the results too.
"""

import argparse
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tqdm import tqdm

from depthbatch.benchmarks.figures import draw
from depthbatch.benchmarks.made_up_profiles import is_made_up, profile_by_name, relative_exits
from depthbatch.benchmarks.simulate import Run, SimulatedRecord, record_run, run_policy
from depthbatch.benchmarks.sources import load_workload, with_arrivals
from depthbatch.benchmarks.synthetic import HUGINN_EXITS, HUGINN_WIDE, OURO_EXITS, parse_distribution
from depthbatch.benchmarks.tables import auto_table, draft_table, memory_table, table
from depthbatch.benchmarks.throughput import BASELINE
from depthbatch.benchmarks.trace import BLOCK_SIZE, PolicyChoice
from depthbatch.benchmarks.virtual_drafts import parse_acceptance, with_known_depths
from depthbatch.benchmarks.workload import Workload
from depthbatch.common.config import OBJECTIVES, EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.text_files import read_text
from depthbatch.worker.device_profile import DeviceProfile, LinearCost

Row = dict[str, Any]
RUNNERS = ("simulate", "throughput")
SUMMARIES: dict[str, Callable[[Sequence[Row]], str]] = {
    "auto": auto_table,
    "drafts": draft_table,
    "memory": memory_table,
}
STEADY = "steady"
_MEAN_OUTPUT = {"alpaca": 60, "sharegpt": 311, "arxiv": 370}  # tokens
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
    "speculation": "off",  # of refill and auto; "N:D" = N draft lanes at draft depth D
    "draft_depth": None,
    "draft_acceptance": None,  # a share, or a map of draft depth to share
    "ttft_target_ms": None,
    "itl_target_ms": None,
    "kv_layout": "last_exited",
    "kv_capacity": None,  # KV blocks as a share of the most that the setting would use; None = never binding
    "preemption": None,  # with kv_capacity; "recompute:H" = with headroom H. None = recompute where memory may bind
    "swap_space": None,  # GiB, with preemption offload
}
_SPECULATION = {"speculation": "off", "draft_depth": None, "draft_acceptance": None}  # of policies without
_TARGETS = ("ttft_target_ms", "itl_target_ms")
_KEYS = {"title", "runner", "requests", "seed", "axes", "figures", "paper", "w_by_workload", "summary"}


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """The file and where results go."""
    parser.add_argument("file", metavar="FILE.toml", type=Path)
    parser.add_argument("--output-dir", metavar="DIR", type=Path, default=Path("."), help="for results and figures")
    parser.add_argument("--requests", type=int, default=None, help="overrides the file's")
    parser.add_argument("--resume", action="store_true", help="keep rows in DIR/NAME.jsonl, and go on where it ends")
    parser.add_argument("--again", metavar="POLICY", help="with --resume: run this policy's rows anew")


def run_sweep(args: argparse.Namespace) -> int:
    """Runs the product; writes NAME.json and the figures, prints the table or the file's summary as Markdown."""
    sweep = read_sweep(args.file)
    if args.again is not None and not args.resume:
        raise ConfigError("--again needs --resume")
    if args.requests is not None:
        sweep["requests"] = args.requests
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if args.resume:
        rows = _resumed(sweep, args.output_dir / f"{args.file.stem}.jsonl", args.again)
    else:
        rows = run_settings(sweep)
    result = {"title": sweep["title"], "rows": rows}
    (args.output_dir / f"{args.file.stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    for figure in sweep.get("figures", []):
        draw(rows, figure, sweep["title"], args.output_dir / figure["file"])
    print(SUMMARIES[sweep["summary"]](rows) if "summary" in sweep else table(rows, sweep["axes"]))
    return 0


def _resumed(sweep: Mapping[str, Any], path: Path, again: str | None) -> list[Row]:
    """Rows of an earlier run in ``path``, those of the policy ``again`` apart, and what is missing, added as it comes."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [row for row in map(json.loads, lines) if row["axis_policy"] != again]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    with path.open("a") as file:
        return run_settings(sweep, kept, lambda row: print(json.dumps(row), file=file, flush=True))


def read_sweep(path: Path) -> dict[str, Any]:
    """A checked sweep file. Raises ConfigError naming file and key."""
    try:
        sweep = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"sweep {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
    if sweep.get("summary", "auto") not in SUMMARIES:
        raise ConfigError(f"sweep {path}: summary {sweep['summary']!r} is not one of {', '.join(SUMMARIES)}")
    if len(sweep["axes"].keys() & set(_TARGETS)) == 1:
        raise ConfigError(f"sweep {path}: {' and '.join(_TARGETS)} are given together")
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


def run_settings(
    sweep: Mapping[str, Any], have: Sequence[Row] = (), note: Callable[[Row], object] = lambda row: None
) -> list[Row]:
    """One row a setting, baselines first in each group. Those in ``have`` are not run again; ``note`` is told of others."""
    runner = _Simulations(sweep) if sweep["runner"] == "simulate" else _Processes(sweep)
    rows = list(have)
    seen = {json.dumps({key: row[key] for key in row if key.startswith("axis_")}, sort_keys=True) for row in rows}
    for setting in tqdm(list(settings(sweep)), unit="setting", file=sys.stderr, mininterval=1.0):
        baseline = setting | _SPECULATION | {"policy": BASELINE, "k_share": None}
        for one in (baseline, setting):
            labels = _labels(one)
            key = json.dumps(labels, sort_keys=True)
            if key not in seen:
                seen.add(key)
                rows.append(labels | runner.run(one))
                note(rows[-1])
    return rows


def exit_weights(name: Any, profile: DeviceProfile) -> dict[int, float] | None:
    """Exits as a sweep file names them; None = the default of the model's depth, {} = full depth."""
    if name is None or isinstance(name, Mapping):
        return None if name is None else parse_distribution(name)
    if name == "full":
        return {}
    if is_made_up(profile):
        by_name = relative_exits(profile.r_max)
    else:
        by_name = {f"q={q}": weights for q, weights in (OURO_EXITS if profile.r_max <= 4 else HUGINN_EXITS).items()}
        by_name["wide"] = HUGINN_WIDE
    if name not in by_name:
        raise ConfigError(f"exits {name!r} is not full, a map, or one of {', '.join(by_name)}")
    return by_name[name]


class Policy(NamedTuple):
    """A policy with what a sweep file says with it."""

    policy: str
    k: int | None = None
    objective: str = "throughput"

    @classmethod
    def parse(cls, text: str, w: int) -> "Policy":
        """``auto:OBJECTIVE``, ``refill:3W/4`` for K = 3W/4, or what ``bench throughput`` takes. Raises ConfigError."""
        name, _, detail = text.partition(":")
        if name == "auto" and detail in OBJECTIVES:
            return cls(name, objective=detail)
        share = re.fullmatch(r"(\d*)W/([1-9]\d*)", detail)
        if name == "refill" and share is not None:
            return cls(name, max(1, round(int(share[1] or 1) * w / int(share[2]))))
        return cls(*PolicyChoice.parse(text))


def steady_requests(workload: str, w: int) -> int:
    """So many that start and end do not rule the result: 1,250 output tokens a slot or 25,000, and 4 requests a slot."""
    if workload not in _MEAN_OUTPUT:
        raise ConfigError(
            f"sweep: requests = {STEADY!r} needs a workload of {', '.join(_MEAN_OUTPUT)}, not {workload!r}"
        )
    return max(min(25_000, 1_250 * w) // _MEAN_OUTPUT[workload], 4 * w)


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
    """Workloads, profiles and engine options of settings."""

    def __init__(self, sweep: Mapping[str, Any]) -> None:
        self._requests = sweep.get("requests", 200)
        self._seed = sweep.get("seed", 0)

    def profile(self, setting: Row) -> DeviceProfile:
        profile = profile_by_name(setting["profile"])
        layers = setting["boundary_layers"]
        return profile if layers is None else with_boundary_layers(profile, layers)

    def workload(self, setting: Row, profile: DeviceProfile) -> Workload:
        name, n = setting["workload"], self._requests
        if n == STEADY:
            n = steady_requests(name, setting["w"])
        elif isinstance(n, Mapping):
            n = n.get(name, 200)
        exits = {} if setting["policy"] == BASELINE else exit_weights(setting["exits"], profile)
        workload = load_workload(name, n, exits, profile.r_max, self._seed)
        if setting["draft_acceptance"] is not None:
            shares = parse_acceptance(setting["draft_acceptance"])
            workload = with_known_depths(workload, shares, profile.r_max, self._seed)
        return workload if setting["rate"] is None else with_arrivals(workload, setting["rate"], self._seed)

    def options(self, setting: Row) -> dict[str, Any]:
        """Of the engine, W apart."""
        choice = Policy.parse(setting["policy"], setting["w"])
        k = choice.k
        lanes, _, depth = str(setting["speculation"]).partition(":")
        if setting["k_share"] is not None and choice.policy == "refill":
            k = max(1, round(setting["k_share"] * setting["w"]))
        targets = {name: setting[name] for name in _TARGETS} if choice.objective != "throughput" else {}
        return targets | {
            "policy": choice.policy,
            "objective": choice.objective,
            "max_num_batched_tokens": setting["m"],
            "min_free_slots": setting["s"],
            "min_coda_batch": k,
            "speculation": lanes,
            "draft_depth": int(depth) if depth else setting["draft_depth"],
            "async_scheduling": setting["async_scheduling"],
            "kv_layout": setting["kv_layout"],
            "prefix_caching": "off",
            **_preemption(setting),
        }


class _Simulations(_Runner):
    """Virtual time. Settings that come to the same are run once: ``cb`` whatever the exits, K only for refill."""

    def __init__(self, sweep: Mapping[str, Any]) -> None:
        super().__init__(sweep)
        self._runs: dict[str, tuple[SimulatedRecord, Row]] = {}
        self._needs: dict[str, int] = {}  # KV blocks that settings use where memory never binds

    def run(self, setting: Row) -> Row:
        profile = self.profile(setting)
        baseline, _ = self._simulate(setting | {"policy": BASELINE}, profile)
        record, latencies = self._simulate(setting, profile)
        record.compare_with(baseline)
        return record.as_json() | latencies

    def _simulate(self, setting: Row, profile: DeviceProfile) -> tuple[SimulatedRecord, Row]:
        if setting["policy"] != "refill":
            setting = setting | {"k_share": None}
        if setting["policy"] == BASELINE:
            setting = setting | _SPECULATION | {"exits": None}
        key = json.dumps(setting, sort_keys=True)
        if key not in self._runs:
            workload = self.workload(setting, profile)
            options = self.options(setting)
            blocks = self._blocks(setting, workload, profile, options)
            run = run_policy(profile, workload, setting["w"], kv_blocks=blocks, **options)
            latencies = latency_figures(run, workload)
            if blocks is not None:
                latencies |= memory_figures(run, blocks)
            if setting["itl_target_ms"] is not None:
                latencies |= target_figures(run, workload, *(setting[name] for name in _TARGETS))
            self._runs[key] = record_run(run, profile, workload), latencies
        return self._runs[key]

    def _blocks(
        self, setting: Row, workload: Workload, profile: DeviceProfile, options: Mapping[str, Any]
    ) -> int | None:
        """KV blocks, the dummy included, of a share of what the setting would use with enough of them; at least those of
        its longest request."""
        if setting["kv_capacity"] is None:
            return None
        memory = {"preemption": None, "kv_capacity": 1.0, "swap_space": None}
        key = json.dumps(setting | memory, sort_keys=True)
        if key not in self._needs:
            free = dict(options) | {"preemption": "recompute", "kv_headroom": 0.0, "swap_space": None}
            self._needs[key] = run_policy(profile, workload, setting["w"], **free).peak_blocks
        least = -(-workload.longest // BLOCK_SIZE)
        blocks: int = 1 + max(least, round(setting["kv_capacity"] * self._needs[key]))
        return blocks


class _Processes(_Runner):
    """The real processes, each setting in an engine of its own, on the simulated device."""

    def __init__(self, sweep: Mapping[str, Any]) -> None:
        super().__init__(sweep)
        self._baseline: Any = None

    def run(self, setting: Row) -> Row:
        from depthbatch.benchmarks.throughput import measure

        for name in ("rate", "boundary_layers", "kv_capacity"):
            if setting[name] is not None:
                raise ConfigError(f"sweep: {name} needs runner 'simulate'")
        drafts: dict[str, Any] = {}
        if drafts and setting["draft_acceptance"] is not None:
            drafts["draft_acceptance"] = setting["draft_acceptance"]
        profile = self.profile(setting)
        config = EngineConfig(
            device=f"simulated:{setting['profile']}",
            max_num_seqs=setting["w"],
            **drafts,
            **self.options(setting),
        )
        record = measure(config, self.workload(setting, profile), profile.flops)
        if setting["policy"] == BASELINE:
            self._baseline = record
        record.compare_with(self._baseline)
        return record.as_json()


def _preemption(setting: Row) -> dict[str, Any]:
    """The engine's options of the axes ``preemption`` and ``swap_space``."""
    if setting["kv_capacity"] is None:
        return {"preemption": "off"}
    name, _, headroom = (setting["preemption"] or "recompute").partition(":")
    space = setting["swap_space"] if name == "offload" else None
    return {"preemption": name, "kv_headroom": float(headroom or 0.0), "swap_space": space}


def memory_figures(run: Run, blocks: int) -> Row:
    """What scarce KV memory has cost: bytes copied each way, tokens computed a second time, and the gap before the next
    token of a sequence that was preempted in it, seconds of virtual time (None without any)."""
    gaps = run.victim_gaps_s
    return {
        "kv_blocks": blocks - 1,
        "moved_gib": (run.stats.offloaded_bytes + run.stats.restored_bytes) / (1 << 30),
        "moved_share": run.moved_s / run.duration_s,
        "recomputed_tokens": run.stats.recomputed_tokens,
        "mean_next_token_s": float(np.mean(gaps)) if gaps else None,
        "p99_next_token_s": float(np.percentile(gaps, 99)) if gaps else None,
        "p99_itl_s": float(np.percentile(run.gaps_s, 99)),
    }


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


def target_figures(run: Run, workload: Workload, ttft_ms: float, itl_ms: float) -> Row:
    """Tokens a second of requests within both targets, their share, and percentiles in ms. TTFT counts from arrival, ITL
    between successive tokens of a request, a request's own ITL is its mean; all of the whole run."""
    requests = workload.requests
    ttft = 1e3 * np.array([run.first_token_s[i] - r.arrival_s for i, r in enumerate(requests)])
    decode = 1e3 * np.array([run.last_token_s[i] - run.first_token_s[i] for i in range(len(requests))])
    output = np.array([r.output_tokens for r in requests])
    good = (ttft <= ttft_ms) & (decode <= itl_ms * (output - 1))
    row: Row = {
        "goodput_tokens_per_s": float(output[good].sum()) / run.duration_s,
        "good_requests": float(good.mean()),
    }
    for name, values in (("ttft", ttft), ("itl", 1e3 * np.array(run.gaps_s))):
        row |= {f"p{q:g}_{name}_ms": float(np.percentile(values, q)) for q in (50, 99, 99.9)}
    return row


def _labels(setting: Row) -> Row:
    """The axes of a row, so that figures find them under their own names."""
    return {f"axis_{name}": value for name, value in setting.items()} | {
        f"axis_{name}": _label(setting[name]) for name in ("exits", "draft_acceptance")
    }


def _label(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, Mapping) else value
