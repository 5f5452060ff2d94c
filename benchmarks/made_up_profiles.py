"""Made-up devices, for what must hold on any device: ``random-N`` is a profile, a function of N alone."""

import re

import numpy as np

from depthbatch.worker.device_profile import CoreCost, DeviceProfile, LinearCost, StageFlops
from depthbatch.worker.simulated import find_profile

_NAME = re.compile(r"random-(\d+)")


def profile_by_name(name: str) -> DeviceProfile:
    """``random-N``, or what ``find_profile`` finds. Raises ConfigError."""
    made_up = _NAME.fullmatch(name)
    return find_profile(name) if made_up is None else random_profile(int(made_up[1]))


def is_made_up(profile: DeviceProfile) -> bool:
    return _NAME.fullmatch(profile.name) is not None


def random_profile(index: int) -> DeviceProfile:
    """Fixed and growing costs and the boundary's price vary independently over a factor of 30, r_max over 2..32."""
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


def relative_exits(r_max: int) -> dict[str, dict[int, float]]:
    """Four distributions of exit depths by shares of r_max; weights in any scale."""
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
