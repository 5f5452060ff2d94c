"""Stages on fake ``cuda`` tensors, with every attention backend: what tests/cuda runs where nothing is computed.

FlashAttention 2 and 3 and the Triton decode are twins that check their call contracts.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.bias

from depthbatch.common.frames import split_prefill_frame
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry
from depthbatch.worker.attention.flash_library import FlashAttention2, FlashAttention3
from depthbatch.worker.attention.paged import FlashAttention, TritonAttention
from depthbatch.worker.attention.sdpa import SdpaAttention
from depthbatch.worker.layers.linear import BlockedProduct, PackedProduct
from depthbatch.worker.models.loader import load_model
from depthbatch.worker.models.tensor_parallel import ONE_RANK, TensorParallel
from depthbatch.worker.runner.stages import Stages
from depthbatch.worker.slots import SlotState
from fakes import triton_twin
from fakes.flash_twin import flash2_varlen, flash2_with_kvcache, flash3_with_kvcache

CUDA = torch.device("cuda")
FIDELITY = Path(__file__).parent.parent / "data" / "fidelity"
BUCKET = 8
# Two sequences: a chunk behind a cached prefix, and a whole prompt; both end their prompts.
FRAME = np.array([1, 2, 16, 0, 3, 2, 1, 1, *range(5), 1, 0, 3, 2, 1, 4], np.int32)
HOST = split_prefill_frame(FRAME, 2, 5, 2)
LAYERS = (
    "num_hidden_layers",
    "n_layers_in_prelude",
    "n_layers_in_recurrent_block",
    "n_layers_in_coda",
)


def triton_with_twin(geometry: CacheGeometry) -> AttentionBackend:
    """Its prefill mask is a tensor subclass that fake mode cannot make; test_paged_backends.py runs the real one."""
    backend = TritonAttention(geometry)
    backend._kernels = triton_twin
    return backend


def _quantized(kind: KVCacheDtype) -> Callable[[CacheGeometry], AttentionBackend]:
    return lambda geometry: triton_with_twin(geometry._replace(kv_cache_dtype=kind))


BACKENDS: dict[str, tuple[Callable[[CacheGeometry], AttentionBackend], int]] = {
    "flash2": (lambda g: FlashAttention(g, FlashAttention2(flash2_with_kvcache, flash2_varlen)), 256),
    "flash3": (lambda g: FlashAttention(g, FlashAttention3(flash3_with_kvcache)), 16),
    "triton": (triton_with_twin, 16),
    "triton-int8": (_quantized(KVCacheDtype.INT8), 16),
    "triton-fp8": (_quantized(KVCacheDtype.FP8), 16),
    "sdpa": (SdpaAttention, 16),
}


def one_layer_each(name: str, into: Path) -> Path:
    """A fidelity model's configuration with one layer where there are more: every layer runs the same operators."""
    config = json.loads((FIDELITY / name / "config.json").read_text())
    if "hybrid_layer_pattern" not in config:  # there a layer of each kind is needed
        config.update({key: 1 for key in LAYERS if key in config})
    (into / "config.json").write_text(json.dumps(config))
    return into


def fake_stages(
    model: Path,
    layout: KVLayout,
    backend: str,
    parallel: TensorParallel = ONE_RANK,
    make_stages: type[Stages] = Stages,
) -> Stages:
    """Everything the worker keeps on the device, as fake tensors; called inside the fake mode."""
    loaded = load_model(
        str(model),
        dtype="bfloat16",
        device=CUDA,
        load_format="dummy",
        r_max=2,
        state_init="seeded",
        parallel=parallel,
    )
    spec = loaded.spec
    make, block_size = BACKENDS[backend]
    shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.planes_per_layer(layout))
    geometry = CacheGeometry(20, block_size, *shape, spec.dtype, CUDA, spec.windows)
    return make_stages(loaded, make(geometry), SlotState(8, 4, spec, CUDA), layout)


def lower_right(length: int, context: int) -> torch.Tensor:
    return torch.ones(length, context, dtype=torch.bool, device=CUDA).tril(context - length)


@contextmanager
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products over weights reordered for a CPU fail to be made; the mask that fake mode cannot make is another."""

    def refuse(*args: Any) -> None:
        raise AssertionError("a CPU product on a cuda model")

    with monkeypatch.context() as patch:
        patch.setattr(PackedProduct, "__init__", refuse)
        patch.setattr(BlockedProduct, "__init__", refuse)
        patch.setattr(torch.nn.attention.bias, "causal_lower_right", lower_right)
        yield


def on_cuda(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cuda" for tensor in tensors)
