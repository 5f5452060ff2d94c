"""``depthbatch bench latency``: what stages cost on a device, as a device profile (paper, appendix B).

B requests of L prompt tokens decode together, every token at depth r (``no-refill`` with fixed depths: plain steps).
Stage times come from the worker's own clock. Fitted are

    tau(r) = tau_0 + tau_r r                 a decode step, for each (B, L): equation 3
    core = delta + gamma rows + alpha context, prelude, coda = delta + gamma rows, prefill = delta + gamma tokens

over sums of stages, steps and rows, so that a run need not consist of equal batches. Medians of several rounds keep out
what else the machine does.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from depthbatch.benchmarks.flops import stage_flops
from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.common.arguments import loops, output_file, positive, width
from depthbatch.common.config import FIELD_NAMES, EngineConfig, add_config_arguments, config_from_sources
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import EngineInfo
from depthbatch.worker.device_profile import CoreCost, DeviceProfile, LinearCost

if TYPE_CHECKING:
    from depthbatch.frontend.llm import LLM

FloatArray = npt.NDArray[np.float64]
Stats = Mapping[str, float]
_SET_HERE = {"model", "policy", "max_num_seqs", "max_model_len", "min_coda_batch", "min_free_slots", "prefix_caching"}
_STAGES = ("prefill", "prelude", "core", "coda")


class Point(NamedTuple):
    """One measurement: B sequences, L prompt tokens, depth r."""

    batch: int
    context: int
    loops: int


@dataclass
class Sample:
    """What a point's run added to the scheduler's counters. Seconds are of the worker's clock."""

    point: Point
    seconds: dict[str, float]
    steps: dict[str, float]
    rows: dict[str, float]
    context_tokens: float  # read by its core steps
    prompt_tokens: float

    @property
    def step_s(self) -> float:
        """tau: prelude, r core steps and coda."""
        return (self.seconds["prelude"] + self.seconds["core"] + self.seconds["coda"]) / self.steps["coda"]


class Fit(NamedTuple):
    """Coefficients, all at least 0, and the share of the variance explained."""

    coefficients: tuple[float, ...]
    r_squared: float


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, grid, engine options."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    parser.add_argument("--batch", type=width, nargs="+", default=[1, 8, 32, 64], help="B: sequences")
    parser.add_argument("--context", type=positive, nargs="+", default=[32, 128, 512], help="L: prompt tokens")
    parser.add_argument("--loops", type=loops, nargs="+", default=None, help="r (default: 1, r_max / 2, r_max)")
    parser.add_argument("--tokens", type=positive, default=16, help="decode tokens a sequence")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each point; the median counts")
    parser.add_argument("--name", default=None, help="name of the profile (default: the model's)")
    parser.add_argument("--profile-output", type=output_file, metavar="FILE.json", help="where the device profile goes")
    add_output_argument(parser)
    add_config_arguments(parser, [name for name in FIELD_NAMES if name not in _SET_HERE])


def run_latency(args: argparse.Namespace) -> int:
    """Measures, fits, prints the fits, writes the profile."""
    from depthbatch.frontend.llm import LLM

    config = config_from_sources(args, model=args.model)
    longest = max(args.context) + args.tokens + 1
    config = msgspec.structs.replace(
        config,
        policy="no-refill",
        max_num_seqs=max(args.batch),
        min_free_slots=1,
        max_model_len=longest,
        prefix_caching="off",  # a round's prompts are those of the last one
    )
    with LLM.from_config(config) as llm:
        loops = args.loops or sorted({1, max(1, llm.info.r_max // 2), llm.info.r_max})
        points = [Point(b, c, r) for b in args.batch for c in args.context for r in loops]
        samples = measure(llm, points, args.tokens, args.rounds)
        info = llm.info
    fits, steps = fit_stages(samples), fit_steps(samples)
    profile = msgspec.to_builtins(build_profile(args.name or Path(config.model).name, info, fits, config))
    stages = {stage: fit._asdict() for stage, fit in fits.items()}
    report = {"tau": steps, "stages": stages, "samples": [asdict(sample) for sample in samples], "profile": profile}
    write_json(report, args.output)
    if args.profile_output:
        Path(args.profile_output).write_text(json.dumps(profile, indent=2) + "\n")
    _print_fits(fits, steps)
    return 0


def measure(llm: "LLM", points: Sequence[Point], tokens: int, rounds: int) -> list[Sample]:
    """One sample a point and round, rounds outermost so that slow drifts hit all points alike."""
    run_point(llm, points[-1], tokens)  # warm-up
    samples = []
    for _ in range(rounds):
        for point in tqdm(points, unit="point", file=sys.stderr, mininterval=1.0):
            samples.append(run_point(llm, point, tokens))
    return samples


def run_point(llm: "LLM", point: Point, tokens: int) -> Sample:
    """Runs B requests to their end."""
    from depthbatch.frontend.params import SamplingParams

    rng = np.random.default_rng(point.batch)
    prompts = rng.integers(0, llm.info.vocab_size, (point.batch, point.context)).tolist()
    params = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True, num_loops=point.loops)
    before = llm.scheduler_stats()
    llm.generate(prompts, params)
    after = llm.scheduler_stats()

    assert before.core is not None and after.core is not None
    then, now = before.core.stages, after.core.stages
    positions = point.context + 1 + np.arange(tokens)  # context of decode token j, itself included
    return Sample(
        point,
        seconds={stage: now[stage].seconds - then[stage].seconds for stage in _STAGES},
        steps={stage: now[stage].steps - then[stage].steps for stage in _STAGES},
        rows={stage: now[stage].rows.sum - then[stage].rows.sum for stage in _STAGES},
        context_tokens=float(point.batch * point.loops * positions.sum()),
        prompt_tokens=float(point.batch * point.context),
    )


def fit_linear(x: FloatArray, y: FloatArray) -> Fit:
    """y = x . c with c >= 0, least squares of relative errors; R^2 of y over its weighted mean.

    ``x`` [n, k]; a column of steps stands for the constant.
    """
    weight = 1.0 / np.maximum(y, 1e-12)
    keep = list(range(x.shape[1]))
    while True:
        solution = np.linalg.lstsq(x[:, keep] * weight[:, None], y * weight, rcond=None)[0]
        if solution.min() >= 0 or len(keep) == 1:
            break
        del keep[int(np.argmin(solution))]
    coefficients = np.zeros(x.shape[1])
    coefficients[keep] = np.maximum(solution, 0.0)
    per_step = x[:, 0] if x[:, 0].all() else np.ones(len(y))
    measured, fitted = y / per_step, x @ coefficients / per_step
    spread = float(((measured - measured.mean()) ** 2).sum())
    residual = float(((measured - fitted) ** 2).sum())
    return Fit(tuple(coefficients.tolist()), 1.0 - residual / spread if spread > 0 else 1.0)


def fit_stages(samples: Sequence[Sample]) -> dict[str, Fit]:
    """Fits of all stages, from the median round of each point. Coefficients in seconds."""
    medians = [
        _median_round([s for s in samples if s.point == point]) for point in dict.fromkeys(s.point for s in samples)
    ]

    def fit(stage: str, *work: FloatArray) -> Fit:
        steps = np.array([s.steps[stage] for s in medians])
        return fit_linear(np.column_stack([steps, *work]), np.array([s.seconds[stage] for s in medians]))

    def rows(stage: str) -> FloatArray:
        return np.array([s.rows[stage] for s in medians])

    return {
        "core": fit("core", rows("core"), np.array([s.context_tokens for s in medians])),
        "prelude": fit("prelude", rows("prelude")),
        "coda": fit("coda", rows("coda")),
        "prefill": fit("prefill", np.array([s.prompt_tokens for s in medians])),
    }


def _median_round(rounds: Sequence[Sample]) -> Sample:
    """The round whose core steps took the median time."""
    return sorted(rounds, key=lambda s: s.seconds["core"] / s.steps["core"])[len(rounds) // 2]


def fit_steps(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """tau_0, tau_r (ms) and R^2 for each (B, L) that was run at two depths or more (equation 3)."""
    out = []
    for batch, context in dict.fromkeys((s.point.batch, s.point.context) for s in samples):
        found = [s for s in samples if (s.point.batch, s.point.context) == (batch, context)]
        loops = sorted({s.point.loops for s in found})
        if len(loops) < 2:
            continue
        tau = np.array([np.median([s.step_s for s in found if s.point.loops == r]) for r in loops])
        slope, start = np.polyfit(loops, tau, 1)
        residual = tau - (start + slope * np.array(loops))
        spread = float(((tau - tau.mean()) ** 2).sum())
        r_squared = 1.0 - float((residual**2).sum()) / spread if spread > 0 else 1.0
        figures = {"tau_0_ms": 1e3 * float(start), "tau_r_ms": 1e3 * float(slope), "r_squared": r_squared}
        out.append({"batch": batch, "context": context} | figures)
    return out


def build_profile(name: str, info: EngineInfo, fits: Mapping[str, Fit], config: EngineConfig) -> DeviceProfile:
    """The fits as a device profile."""
    ms = {stage: [1e3 * c for c in fit.coefficients] for stage, fit in fits.items()}
    worst = min(fit.r_squared for fit in fits.values())
    return DeviceProfile(
        name=name,
        r_max=info.r_max,
        bytes_per_kv_token=max(1, info.kv_bytes_per_token // KVLayout(info.kv_layout).num_planes(info.r_max)),
        core=CoreCost(*ms["core"]),
        prelude=LinearCost(*ms["prelude"]),
        coda=LinearCost(*ms["coda"]),
        prefill=LinearCost(*ms["prefill"]),
        flops=stage_flops(config),
        boundary_layers=info.boundary_layers,
        r_min=info.r_min,
        vocab_size=info.vocab_size,
        note=f"bench latency on {info.device}, {info.dtype}, layout {info.kv_layout}; least R^2 of the fits {worst:.4f}",
    )


def _print_fits(fits: Mapping[str, Fit], steps: Sequence[Mapping[str, float]]) -> None:
    for stage, fit in fits.items():
        values = "  ".join(f"{1e3 * c:.6f}" for c in fit.coefficients)
        print(f"{stage:<8} delta, slopes (ms): {values}   R^2 {fit.r_squared:.4f}", file=sys.stderr)
    for line in steps:
        print(
            f"B {line['batch']:>4} L {line['context']:>6}: tau_0 {line['tau_0_ms']:8.3f} ms, tau_r {line['tau_r_ms']:8.3f} ms, "
            f"R^2 {line['r_squared']:.4f}",
            file=sys.stderr,
        )
