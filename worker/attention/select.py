"""Chooses the attention backend of a device. Knows which backends exist, nothing of how they work."""

import torch
from depthbatch.common.errors import ConfigError
from depthbatch.worker.attention.cpu import CpuAttention, unsupported
from depthbatch.worker.attention.interface import AttentionBackend, CacheGeometry
from depthbatch.worker.attention.sdpa import SdpaAttention
from depthbatch.worker.kernels.library import cpu_kernels

BACKENDS = ("cpu", "sdpa")


def select_backend(geometry: CacheGeometry, name: str | None = None) -> AttentionBackend:
    """The backend called ``name``, or the fastest that can serve ``geometry``.

    Raises ConfigError for an unknown name and for a backend that cannot run here.
    """
    if name == "sdpa":
        return SdpaAttention(geometry)
    if name == "cpu":
        kernels = cpu_kernels()
        if kernels is None:
            raise ConfigError("attention backend 'cpu' needs the C kernels, which are switched off or cannot be built")
        return CpuAttention(geometry, kernels)
    if name is not None:
        raise ConfigError(f"unknown attention backend {name!r}; choose from {', '.join(BACKENDS)}")
    if unsupported(geometry) is None and (kernels := cpu_kernels()) is not None:
        return CpuAttention(geometry, kernels)
    return SdpaAttention(geometry)


def default_block_size(device: torch.device) -> int:
    """Tokens a KV block: 16 for the CPU kernels, for Triton and for FlashAttention 3."""
    return 16
