"""Seeded workloads with the paper's statistics (Appendix C): request lengths, an exit depth per decode token, arrivals.

Lengths are drawn from smooth laws (log-normal, gamma) whose parameters were fitted so that, after rounding and the
paper's filters (at least 4 prompt and 4 output tokens, at most 16,384 together), mean, median and p99 are those the
paper states. Where the paper states nothing (the spread of ShareGPT and Alpaca outputs) the shape is that of public
ShareGPT answers (coefficient of variation 0.81). Order and content of the real data are not reproduced.

Exit depths: the paper shows its distributions only as pictures, so the tables here are estimates: Ouro puts its mass on
depths 2, 3 and 4 with mean depths that give the stated speed-ups; Huginn spreads over four to seven depths from about
7 on. Neighbouring tokens of a sequence are alike: a token keeps its predecessor's depth with probability
``stickiness``, else it is drawn afresh, a Markov chain whose marginal is exactly the given distribution.

Arrivals are Poisson or Gamma. Burstiness is that of ``vllm bench serve``: intervals are Gamma with shape ``burstiness`` and
mean 1 / rate; 1 is Poisson, less is burstier, more is steadier.

Knows nothing of schedulers; ``sources`` reads data sets that a user has.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from depthbatch.common.errors import ConfigError

IntArray = npt.NDArray[np.int64]
Depths = npt.NDArray[np.uint8]
ExitDistribution = Mapping[int, float]  # depth -> weight, any scale

MIN_TOKENS = 4  # of prompt and of output
MAX_COMBINED_TOKENS = 16_384  # prompt + output
DEFAULT_STICKINESS = 0.3


class LogNormal(NamedTuple):
    """exp(normal) with the given median and log standard deviation."""

    median: float
    sigma: float

    def draw(self, n: int, rng: np.random.Generator) -> IntArray:
        values: IntArray = np.rint(self.median * np.exp(self.sigma * rng.standard_normal(n))).astype(np.int64)
        return values


class Gamma(NamedTuple):
    """Gamma with the given mean and shape."""

    mean: float
    shape: float

    def draw(self, n: int, rng: np.random.Generator) -> IntArray:
        values: IntArray = np.rint(rng.gamma(self.shape, self.mean / self.shape, n)).astype(np.int64)
        return values


class LengthLaw(NamedTuple):
    """How long the prompts and outputs of one workload are, in tokens."""

    prompt: LogNormal | Gamma
    output: LogNormal | Gamma


LENGTH_LAWS: dict[str, LengthLaw] = {
    "sharegpt": LengthLaw(LogNormal(67.33, 1.670), Gamma(311.0, 1.5)),  # means 267 / 311, prompt p99 3264
    "alpaca": LengthLaw(LogNormal(13.27, 0.741), Gamma(58.8, 1.5)),  # means 18 / 60, prompt p99 75
    "arxiv": LengthLaw(LogNormal(6660.0, 0.530), LogNormal(200.0, 1.125)),  # means 6989 / 370, medians 6436 / 199
}

# Exit distributions by gate threshold (Fig. 11; estimates, see the module docstring).
OURO_EXITS: dict[float, dict[int, float]] = {
    0.1: {2: 0.75, 3: 0.20, 4: 0.05},  # mean 2.30
    0.2: {2: 0.50, 3: 0.40, 4: 0.10},  # mean 2.60
    0.3: {2: 0.27, 3: 0.54, 4: 0.19},  # mean 2.92, the mix of the paper's trace (Table 2)
    0.5: {2: 0.12, 3: 0.48, 4: 0.40},  # mean 3.28
    0.7: {2: 0.04, 3: 0.26, 4: 0.70},  # mean 3.66
    1.0: {4: 1.0},
}
HUGINN_EXITS: dict[float, dict[int, float]] = {
    0.10: {12: 0.10, 13: 0.15, 14: 0.20, 15: 0.20, 16: 0.35},  # mean 14.55
    0.20: {9: 0.08, 10: 0.20, 11: 0.28, 12: 0.22, 13: 0.12, 14: 0.06, 16: 0.04},  # mean 11.46
    0.28: {8: 0.10, 9: 0.27, 10: 0.30, 11: 0.18, 12: 0.10, 13: 0.05},  # mean 10.06
    0.40: {7: 0.22, 8: 0.45, 9: 0.25, 10: 0.08},  # mean 8.19
    0.0: {16: 1.0},
}
HUGINN_WIDE: dict[int, float] = dict.fromkeys(range(7, 17), 0.1)  # "widely spread": depths 7 to 16, mean 11.5


def draw_lengths(name: str, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Prompt and output tokens of ``n`` requests of workload ``name``, each int64 [n].

    Draws that break the filters are dropped and drawn anew, as the paper drops such requests.
    Raises ConfigError for an unknown name.
    """
    if name not in LENGTH_LAWS:
        raise ConfigError(f"unknown workload {name!r}: not one of {', '.join(LENGTH_LAWS)}, nor a file")
    law = LENGTH_LAWS[name]
    prompts, outputs, have = [], [], 0
    while have < n:
        prompt, output = law.prompt.draw(n, rng), law.output.draw(n, rng)
        keep = within_limits(prompt, output)
        prompts.append(prompt[keep])
        outputs.append(output[keep])
        have += int(keep.sum())
    return np.concatenate(prompts)[:n], np.concatenate(outputs)[:n]


def within_limits(prompt: IntArray, output: IntArray) -> npt.NDArray[np.bool_]:
    """Which requests pass the paper's filters."""
    keep: npt.NDArray[np.bool_] = (
        (prompt >= MIN_TOKENS) & (output >= MIN_TOKENS) & (prompt + output <= MAX_COMBINED_TOKENS)
    )
    return keep


def parse_distribution(text: Mapping[str, float] | Mapping[int, float]) -> dict[int, float]:
    """A distribution from its JSON form ``{"2": 0.15, "3": 0.6}``; ConfigError when it is not one."""
    try:
        weights = {int(depth): float(weight) for depth, weight in text.items()}
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"exit distribution {text!r}: wants a map of depth to weight") from None
    if not weights or min(weights) < 1 or max(weights) > 255 or min(weights.values()) < 0 or not sum(weights.values()):
        raise ConfigError(f"exit distribution {text!r}: depths are 1..255, weights at least 0 and not all 0")
    return weights


def draw_exit_depths(
    counts: IntArray, exits: ExitDistribution, rng: np.random.Generator, stickiness: float = DEFAULT_STICKINESS
) -> list[Depths]:
    """Exit depths of ``counts[i]`` decode tokens for each sequence i.

    Each sequence starts with a fresh draw from ``exits``; every further token repeats its predecessor's depth with
    probability ``stickiness`` and is drawn afresh otherwise. Raises ConfigError for a stickiness outside [0, 1).
    """
    if not 0.0 <= stickiness < 1.0:
        raise ConfigError(f"stickiness {stickiness} is not in [0, 1)")
    total = int(counts.sum())
    depths = np.array(sorted(exits), dtype=np.uint8)
    weights = np.array([exits[int(depth)] for depth in depths], dtype=np.float64)
    fresh = rng.choice(depths, size=total, p=weights / weights.sum())
    redraw = rng.random(total) >= stickiness
    ends = np.cumsum(counts)
    redraw[(ends - counts)[counts > 0]] = True
    source = np.maximum.accumulate(np.where(redraw, np.arange(total), 0))
    return np.split(fresh[source], ends[:-1])


def arrival_times(n: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> npt.NDArray[np.float64]:
    """Arrival of each of ``n`` requests in seconds, the first at 0; all at 0 for an infinite rate.

    Raises ConfigError for a rate or burstiness that is not above 0.
    """
    if not rate > 0:
        raise ConfigError(f"request-rate must be above 0 (or inf), not {rate}")
    if not 0 < burstiness < math.inf:
        raise ConfigError(f"burstiness must be above 0, not {burstiness}")
    if math.isinf(rate):
        return np.zeros(n)
    gaps = np.random.default_rng([seed, 2]).gamma(burstiness, 1.0 / (rate * burstiness), n)
    gaps[:1] = 0.0
    return np.cumsum(gaps)
