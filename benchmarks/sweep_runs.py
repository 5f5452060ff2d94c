"""What a sweep runs: its settings turned into workloads, profiles and engine options, in virtual time or through the real
processes, and the figures of each run."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from depthbatch.benchmarks.made_up_profiles import is_made_up, profile_by_name, relative_exits
from depthbatch.benchmarks.simulate import Run, SimulatedRecord, record_run, run_policy
from depthbatch.benchmarks.sources import load_workload, with_arrivals
from depthbatch.benchmarks.synthetic import HUGINN_EXITS, HUGINN_WIDE, OURO_EXITS, parse_distribution
from depthbatch.benchmarks.throughput import BASELINE
from depthbatch.benchmarks.trace import BLOCK_SIZE, PolicyChoice
from depthbatch.benchmarks.virtual_drafts import parse_acceptance, with_known_depths
from depthbatch.benchmarks.workload import Window, Workload
from depthbatch.common.config import OBJECTIVES, EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.worker.device_profile import DeviceProfile, LinearCost

Row = dict[str, Any]
STEADY, WINDOW, SHORT_WINDOW = "steady", "window", "short window"
WINDOWS = (WINDOW, SHORT_WINDOW)
_MEAN_OUTPUT = {"alpaca": 60, "sharegpt": 311, "arxiv": 370}  # tokens
NO_DRAFTS = {"speculation": "off", "draft_depth": None, "draft_acceptance": None}  # of policies without
TARGETS = ("ttft_target_ms", "itl_target_ms")


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


def window_of(workload: str, w: int, short: bool = False) -> tuple[int, Window]:
    """A window in steady state, and requests enough to fill it. It begins after two mean outputs a slot and lasts four, or 64
    requests' worth where that is more. A ``short`` one begins after one and lasts two, for what takes real time."""
    if workload not in _MEAN_OUTPUT:
        kind = SHORT_WINDOW if short else WINDOW
        raise ConfigError(f"sweep: requests = {kind!r} needs a workload of {', '.join(_MEAN_OUTPUT)}, not {workload!r}")
    mean = _MEAN_OUTPUT[workload]
    window = Window(w * mean, 2 * w * mean) if short else Window(2 * w * mean, max(4 * w, 64) * mean)
    count = (window.skip + window.tokens) / mean + 2 * w  # those that are running or were admitted last yield less
    return round(count + 8 * count**0.5), window  # outputs vary: 1.6 times their mean (arXiv) over the root of count


def with_boundary_layers(profile: DeviceProfile, per_side: int, core_layers: int = 4) -> DeviceProfile:
    """The profile with another number of layers in prelude and coda, each as costly as a core layer. What prelude and
    coda cost beyond the layers they have (embedding, head) stays. Paper, figure 7 right: 2-4-2, 1-4-1, 0-4-0."""
    had, flops = profile.boundary_layers / 2, profile.flops

    def stage(cost: LinearCost) -> LinearCost:
        delta, gamma = profile.core.delta_ms / core_layers, profile.core.gamma_ms / core_layers
        fixed = max(0.0, cost.delta_ms - had * delta), max(0.0, cost.gamma_ms - had * gamma)
        return LinearCost(fixed[0] + per_side * delta, fixed[1] + per_side * gamma)

    boundary = max(0.0, flops.boundary + 2 * (per_side - had) * flops.core / core_layers)
    share = (profile.r_max * flops.core + boundary) / (profile.r_max * flops.core + flops.boundary)
    return msgspec.structs.replace(
        profile,
        prelude=stage(profile.prelude),
        coda=stage(profile.coda),
        prefill=msgspec.structs.replace(profile.prefill, gamma_ms=share * profile.prefill.gamma_ms),
        flops=msgspec.structs.replace(flops, boundary=boundary),
        boundary_layers=2 * per_side,
    )


class Runner:
    """Workloads, profiles and engine options of settings."""

    def __init__(self, sweep: Mapping[str, Any]) -> None:
        self._requests = sweep.get("requests", 200)
        self._seconds = sweep.get("seconds")
        self._seed = sweep.get("seed", 0)

    def run(self, setting: Row) -> Row:
        """The figures of one setting."""
        raise NotImplementedError

    def profile(self, setting: Row) -> DeviceProfile:
        profile = profile_by_name(setting["profile"])
        layers = setting["boundary_layers"]
        return profile if layers is None else with_boundary_layers(profile, layers)

    def workload(self, setting: Row, profile: DeviceProfile) -> Workload:
        name, rate = setting["workload"], setting["rate"]
        seed = self._seed if setting["seed"] is None else setting["seed"]
        exits = {} if setting["policy"] == BASELINE else exit_weights(setting["exits"], profile)
        workload = load_workload(name, self._count(setting), exits, profile.r_max, seed)
        if setting["draft_acceptance"] is not None:
            shares = parse_acceptance(setting["draft_acceptance"])
            workload = with_known_depths(workload, shares, profile.r_max, seed)
        if rate is None:
            return workload
        workload = with_arrivals(workload, rate, seed)
        seconds = self._of_workload(self._seconds, name)
        if seconds is None:
            return workload
        return Workload(tuple(request for request in workload.requests if request.arrival_s < seconds))

    def window(self, setting: Row) -> Window | None:
        kind = self._requests
        return window_of(setting["workload"], setting["w"], kind == SHORT_WINDOW)[1] if kind in WINDOWS else None

    def _count(self, setting: Row) -> int:
        """Requests to draw."""
        name, rate = setting["workload"], setting["rate"]
        seconds = self._of_workload(self._seconds, name)
        if seconds is not None:
            if rate is None:
                raise ConfigError("sweep: seconds needs the axis rate")
            mean: float = rate * seconds
            return round(mean + 8 * math.sqrt(mean) + 8)  # of which those that arrive in time are kept
        if self._requests == STEADY:
            return steady_requests(name, setting["w"])
        if self._requests in WINDOWS:
            if rate is not None:
                raise ConfigError(f"sweep: requests = {self._requests!r} has no rate")
            return window_of(name, setting["w"], self._requests == SHORT_WINDOW)[0]
        return int(self._of_workload(self._requests, name, 200))

    @staticmethod
    def _of_workload(value: Any, name: str, default: Any = None) -> Any:
        """A value that may be a table by workload."""
        return value.get(name, default) if isinstance(value, Mapping) else value

    def options(self, setting: Row) -> dict[str, Any]:
        """Of the engine, W apart."""
        choice = Policy.parse(setting["policy"], setting["w"])
        k = choice.k
        lanes, _, depth = str(setting["speculation"]).partition(":")
        if depth and not depth.isdecimal():
            raise ConfigError(f"sweep: speculation {setting['speculation']!r} is not N:D with numbers N and D")
        if setting["k_share"] is not None and choice.policy == "refill":
            k = max(1, round(setting["k_share"] * setting["w"]))
        targets = {name: setting[name] for name in TARGETS} if choice.objective != "throughput" else {}
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

    def check(self, setting: Row) -> None:
        """What would fail in the middle of a long run fails before it. Raises ConfigError."""
        exit_weights(setting["exits"], self.profile(setting))
        if setting["draft_acceptance"] is not None:
            parse_acceptance(setting["draft_acceptance"])
        self._count(setting)
        EngineConfig(**self.options(setting) | {"max_num_seqs": setting["w"]})


class Simulations(Runner):
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
            setting = setting | NO_DRAFTS | {"exits": None}
        key = json.dumps(setting, sort_keys=True)
        if key not in self._runs:
            workload = self.workload(setting, profile)
            options = self.options(setting)
            blocks = self._blocks(setting, workload, profile, options)
            how = {"window": self.window(setting), "launch_us": setting["launch_us"]}
            run = run_policy(profile, workload, setting["w"], blocks, **how, **options)
            latencies = latency_figures(run, workload)
            if blocks is not None:
                latencies |= memory_figures(run, blocks)
            if setting["itl_target_ms"] is not None:
                latencies |= target_figures(run, workload, *(setting[name] for name in TARGETS))
            self._runs[key] = record_run(run, profile, workload), latencies
        return self._runs[key]

    def _blocks(
        self, setting: Row, workload: Workload, profile: DeviceProfile, options: Mapping[str, Any]
    ) -> int | None:
        """KV blocks, the dummy included, of a share of what the setting would use with enough of them; at least those of
        its longest request."""
        if setting["kv_blocks"] is not None:
            return 1 + int(setting["kv_blocks"])
        if setting["kv_capacity"] is None:
            return None
        memory = {"preemption": None, "kv_capacity": 1.0, "swap_space": None}
        key = json.dumps(setting | memory, sort_keys=True)
        if key not in self._needs:
            free = dict(options) | {"preemption": "recompute", "kv_headroom": 0.0, "swap_space": None}
            window = self.window(setting)
            self._needs[key] = run_policy(profile, workload, setting["w"], None, window, **free).peak_blocks
        least = -(-workload.longest // BLOCK_SIZE)
        blocks: int = 1 + max(least, round(setting["kv_capacity"] * self._needs[key]))
        return blocks


class Processes(Runner):
    """The real processes, each setting in an engine of its own, on the simulated device."""

    def __init__(self, sweep: Mapping[str, Any]) -> None:
        super().__init__(sweep)
        self._baseline: Any = None

    def check(self, setting: Row) -> None:
        for name in ("rate", "boundary_layers", "kv_capacity", "kv_blocks"):
            if setting[name] is not None:
                raise ConfigError(f"sweep: {name} needs runner 'simulate'")
        if setting["launch_us"]:
            raise ConfigError("sweep: launch_us needs runner 'simulate'")
        if isinstance(setting["draft_acceptance"], Mapping):
            raise ConfigError("sweep: draft_acceptance by depth needs runner 'simulate'")
        super().check(setting)

    def options(self, setting: Row) -> dict[str, Any]:
        """The device draws which drafts are right."""
        options = super().options(setting) | {"device": f"simulated:{setting['profile']}"}
        if options["speculation"] != "off":
            options["draft_acceptance"] = setting["draft_acceptance"]
        return options

    def run(self, setting: Row) -> Row:
        from depthbatch.benchmarks.throughput import measure

        profile = self.profile(setting)
        config = EngineConfig(max_num_seqs=setting["w"], **self.options(setting))
        record = measure(config, self.workload(setting, profile), profile.flops, self.window(setting))
        if setting["policy"] == BASELINE:
            self._baseline = record
        record.compare_with(self._baseline)
        return record.as_json()


def _preemption(setting: Row) -> dict[str, Any]:
    """The engine's options of the axes ``preemption`` and ``swap_space``."""
    if setting["kv_capacity"] is None and setting["kv_blocks"] is None:
        return {"preemption": "off"}
    name, _, headroom = (setting["preemption"] or "recompute").partition(":")
    try:
        share = float(headroom or 0.0)
    except ValueError:
        raise ConfigError(f"sweep: preemption {setting['preemption']!r}: {headroom!r} is not a number") from None
    return {
        "preemption": name,
        "kv_headroom": share,
        "swap_space": setting["swap_space"] if name == "offload" else None,
    }


def memory_figures(run: Run, blocks: int) -> Row:
    """What scarce KV memory has cost: bytes copied each way, tokens computed a second time, and the gap before the next
    token of a sequence that was preempted in it, seconds of virtual time (None without any)."""
    gaps, then, now = run.victim_gaps_s, run.before, run.stats
    return {
        "kv_blocks": blocks - 1,
        "moved_gib": (now.offloaded_bytes + now.restored_bytes - then.offloaded_bytes - then.restored_bytes)
        / (1 << 30),
        "moved_share": run.moved_s / run.duration_s,
        "recomputed_tokens": now.recomputed_tokens - then.recomputed_tokens,
        "mean_next_token_s": float(np.mean(gaps)) if gaps else None,
        "p99_next_token_s": float(np.percentile(gaps, 99)) if gaps else None,
    }


def latency_figures(run: Run, workload: Workload) -> Row:
    """Mean and p99 of normalized latency (end to end over output tokens) and of TTFT, and p99 of ITL, seconds of virtual
    time."""
    requests = workload.requests
    e2e = [(run.last_token_s[i] - requests[i].arrival_s) / requests[i].output_tokens for i in run.last_token_s]
    ttft = [run.first_token_s[i] - requests[i].arrival_s for i in run.first_token_s]
    return {
        "normalized_latency_s": float(np.mean(e2e)),
        "p99_normalized_latency_s": float(np.percentile(e2e, 99)),
        "mean_ttft_s": float(np.mean(ttft)),
        "p99_ttft_s": float(np.percentile(ttft, 99)),
        "p99_itl_s": float(np.percentile(run.gaps_s, 99)),
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
