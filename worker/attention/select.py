"""Chooses the attention backend of a device. Knows which backends exist, nothing of how they work."""

from importlib.util import find_spec

import torch

from depthbatch.common.errors import ConfigError
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry
from depthbatch.worker.attention.cpu import CpuAttention, unsupported
from depthbatch.worker.attention.flash_library import find_flash_library
from depthbatch.worker.attention.paged import FlashAttention, TritonAttention
from depthbatch.worker.attention.sdpa import SdpaAttention
from depthbatch.worker.layers.cpu.library import cpu_kernels

BACKENDS = ("cpu", "flash", "triton", "sdpa")


def select_backend(geometry: CacheGeometry, name: str | None = None) -> AttentionBackend:
    """The backend called ``name``, or the fastest that can serve ``geometry``.

    Raises ConfigError for an unknown name and for a backend that cannot run here.
    """
    if name == "sdpa":
        return SdpaAttention(geometry)
    if name in ("flash", "triton"):
        return _gpu_backend(geometry, name)
    if name == "cpu":
        kernels = cpu_kernels()
        if kernels is None:
            raise ConfigError("attention backend 'cpu' needs the C kernels, which are switched off or cannot be built")
        return CpuAttention(geometry, kernels)
    if name is not None:
        raise ConfigError(f"unknown attention backend {name!r}; choose from {', '.join(BACKENDS)}")
    if geometry.device.type == "cuda":
        return _fastest_on_gpu(geometry)
    if unsupported(geometry) is None and (kernels := cpu_kernels()) is not None:
        return CpuAttention(geometry, kernels)
    return SdpaAttention(geometry)


def _fastest_on_gpu(geometry: CacheGeometry) -> AttentionBackend:
    """FlashAttention where it is installed and takes the dtypes and page size, then Triton, then gather and SDPA."""
    takes = geometry.dtype in (torch.bfloat16, torch.float16) and not geometry.kv_cache_dtype.is_quantized
    library = find_flash_library() if takes else None
    if library is not None and geometry.block_size % library.block_size == 0:
        return FlashAttention(geometry, library)
    return TritonAttention(geometry) if find_spec("triton") else SdpaAttention(geometry)


def _gpu_backend(geometry: CacheGeometry, name: str) -> AttentionBackend:
    if name == "triton":
        if not find_spec("triton"):
            raise ConfigError("attention backend 'triton' needs the package triton, which is not installed")
        return TritonAttention(geometry)
    if (kind := geometry.kv_cache_dtype).is_quantized:
        raise ConfigError(f"attention backend 'flash' reads no kv_cache_dtype {kind}: 'triton', 'sdpa' and 'cpu' do")
    library = find_flash_library() if geometry.device.type == "cuda" else None
    if library is None:
        raise ConfigError("attention backend 'flash' needs a GPU and flash-attn or FlashAttention 3, not found here")
    if geometry.block_size % library.block_size:
        raise ConfigError(f"block_size {geometry.block_size}: FlashAttention needs a multiple of {library.block_size}")
    return FlashAttention(geometry, library)


def default_block_size(device: torch.device, dtype: torch.dtype, kind: KVCacheDtype = KVCacheDtype.AUTO) -> int:
    """Tokens a KV block: 16 for the CPU kernels, Triton and FlashAttention 3; 256 for FlashAttention 2."""
    takes = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not kind.is_quantized
    return library.block_size if takes and (library := find_flash_library()) else 16
