"""Small stand-ins for the worker's tests: a model spec with plain numbers, a device profile."""

import torch

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.models.interface import ModelSpec

PROFILE = """{"name":"test","r_max":4,"bytes_per_kv_token":1024,
 "core":{"delta_ms":5.0,"gamma_ms":0.5,"alpha_ms":0.01},
 "prelude":{"delta_ms":0.05,"gamma_ms":0.001},"coda":{"delta_ms":0.35,"gamma_ms":0.002},
 "prefill":{"delta_ms":6.0,"gamma_ms":0.02},"flops":{"core":1e9,"boundary":1e8}}"""


def tiny_spec(r_max: int = 4, dtype: torch.dtype = torch.float32) -> ModelSpec:
    """Two core layers of two heads with 4 features, vocabulary 50."""
    return ModelSpec(
        architecture="fake",
        vocab_size=50,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        prelude_layers=0,
        core_layers=2,
        coda_layers=0,
        work_item=("h",),
        r_max=r_max,
        r_limit=r_max,
        r_min=1,
        layouts=tuple(KVLayout),
        default_layout=KVLayout.LAST_EXITED,
        gates=(Gate.NONE, Gate.FIXED, Gate.REPLAY, Gate.OWN, Gate.DELAYED),
        default_gate=Gate.DELAYED,
        default_threshold=1.0,
        max_positions=64,
        eos_token_ids=(0,),
        dtype=dtype,
    )
