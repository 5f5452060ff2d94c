"""When requests arrive: Poisson and Gamma processes, seeded.

Burstiness is that of ``vllm bench serve``: intervals are Gamma with shape ``burstiness`` and mean 1 / rate; 1 is
Poisson, less is burstier, more is steadier.
"""

import math

import numpy as np
import numpy.typing as npt

from depthbatch.common.errors import ConfigError


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
