"""FLOPs a token of each stage, for the bounds S_dec and S_e2e: from a device profile, or counted in a model's files.

Counted: two per weight of every matrix a token passes (attention scores are left out, as in the paper's estimate). An
embedding is a lookup and costs nothing unless it is the output head as well.
"""

from math import prod

from depthbatch.common.config import EngineConfig
from depthbatch.worker.device_profile import StageFlops

SIMULATED = "simulated:"
_CORE_PREFIXES = ("model.layers.", "transformer.core_block.", "transformer.adapter.")
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")
_HEAD = "lm_head.weight"
_NOT_IN_A_PASS = ("model.early_exit_gate.",)


def stage_flops(config: EngineConfig) -> StageFlops:
    """FLOPs of one core step and of prelude + coda. Raises ModelError or ConfigError for a bad model or profile."""
    if config.device.startswith(SIMULATED):
        from depthbatch.worker.simulated import find_profile

        return find_profile(config.device.removeprefix(SIMULATED)).flops
    from depthbatch.worker.models.loader import open_model_dir

    model_dir = open_model_dir(config.model, config.load_format)
    return count_flops(model_dir.family.tensors(model_dir.config).required)


def count_flops(shapes: dict[str, tuple[int, ...]]) -> StageFlops:
    """FLOPs from tensor names and shapes; a checkpoint without a head of its own uses its embedding as one."""
    core = boundary = 0.0
    for name, shape in shapes.items():
        if len(shape) != 2 or name.startswith(_NOT_IN_A_PASS):
            continue
        if name.startswith(_CORE_PREFIXES):
            core += 2.0 * prod(shape)
        elif name not in _EMBEDDINGS or _HEAD not in shapes:
            boundary += 2.0 * prod(shape)
    return StageFlops(core=core, boundary=boundary)
