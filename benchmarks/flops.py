"""FLOPs a token of each stage, for the bounds S_dec and S_e2e: from a device profile, or counted in a model's files.

Counted: two per weight of every matrix a token passes (attention scores are left out, as in the paper's estimate). An
embedding is a lookup and costs nothing unless it is the output head as well.
"""

from math import prod
from typing import TYPE_CHECKING

from depthbatch.common.config import EngineConfig
from depthbatch.worker.device_profile import StageFlops

if TYPE_CHECKING:
    from depthbatch.worker.models.family import TensorTable

SIMULATED = "simulated:"


def stage_flops(config: EngineConfig) -> StageFlops:
    """FLOPs of one core step and of prelude + coda. Raises ModelError or ConfigError for a bad model or profile."""
    if config.device.startswith(SIMULATED):
        from depthbatch.worker.simulated import find_profile

        return find_profile(config.device.removeprefix(SIMULATED)).flops
    from depthbatch.worker.models.loader import open_model_dir

    model_dir = open_model_dir(config.model, config.load_format)
    return count_flops(model_dir.family.tensors(model_dir.config))


def count_flops(table: "TensorTable") -> StageFlops:
    """FLOPs from the shapes of a checkpoint's tensors; which of them the core uses, its family says."""
    core = boundary = 0.0
    for name, shape in table.required.items():
        if len(shape) != 2 or name in table.looked_up:
            continue
        if name in table.core:
            core += 2.0 * prod(shape)
        else:
            boundary += 2.0 * prod(shape)
    return StageFlops(core=core, boundary=boundary)
