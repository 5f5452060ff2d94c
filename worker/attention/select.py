"""Chooses the attention backend of a device. Knows which backends exist, nothing of how they work."""

from importlib.util import find_spec

import torch

from depthbatch.common.errors import ConfigError
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
    """FlashAttention where it is installed and takes the dtype and page size, then Triton, then gather and SDPA."""
    half = geometry.dtype in (torch.bfloat16, torch.float16)
    library = find_flash_library() if half else None
    if library is not None and geometry.block_size % library.block_size == 0:
        return FlashAttention(geometry, library)
    return TritonAttention(geometry) if find_spec("triton") else SdpaAttention(geometry)


def _gpu_backend(geometry: CacheGeometry, name: str) -> AttentionBackend:
    if name == "triton":
        if not find_spec("triton"):
            raise ConfigError("attention backend 'triton' needs the package triton, which is not installed")
        return TritonAttention(geometry)
    library = find_flash_library() if geometry.device.type == "cuda" else None
    if library is None:
        raise ConfigError("attention backend 'flash' needs a GPU and flash-attn or FlashAttention 3, not found here")
    if geometry.block_size % library.block_size:
        raise ConfigError(f"block_size {geometry.block_size}: FlashAttention needs a multiple of {library.block_size}")
    return FlashAttention(geometry, library)


def default_block_size(device: torch.device, dtype: torch.dtype) -> int:
    """Tokens a KV block: 16 for the CPU kernels, Triton and FlashAttention 3; 256 for FlashAttention 2."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and (library := find_flash_library()):
        return library.block_size
    return 16
