"""Which attention backend a device gets, and the one line a user reads when the one asked for is not there."""

import pytest
import torch

from depthbatch.common.errors import ConfigError
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention import select as selection
from depthbatch.worker.attention.backend import CacheGeometry
from depthbatch.worker.attention.flash_library import FlashAttention2, FlashAttention3, FlashLibrary
from depthbatch.worker.attention.paged import FlashAttention, TritonAttention
from depthbatch.worker.attention.sdpa import SdpaAttention
from fakes.flash_twin import flash2_varlen, flash2_with_kvcache, flash3_with_kvcache

FLASH2 = FlashAttention2(flash2_with_kvcache, flash2_varlen)
FLASH3 = FlashAttention3(flash3_with_kvcache)


def geometry(block_size: int, dtype: torch.dtype, device: str = "cpu") -> CacheGeometry:
    return CacheGeometry(4, block_size, 2, 2, 16, (2,), dtype, torch.device(device))


@pytest.mark.parametrize(
    ("library", "block_size", "dtype", "triton", "backend"),
    [
        (FLASH3, 16, torch.bfloat16, True, FlashAttention),
        (FLASH2, 256, torch.bfloat16, True, FlashAttention),
        (FLASH2, 16, torch.bfloat16, True, TritonAttention),  # its pages are too small for FlashAttention 2
        (FLASH3, 16, torch.float32, True, TritonAttention),  # FlashAttention takes half precision only
        (None, 16, torch.bfloat16, True, TritonAttention),
        (None, 16, torch.bfloat16, False, SdpaAttention),
    ],
)
def test_gpu_takes_the_fastest_that_fits(
    monkeypatch: pytest.MonkeyPatch,
    library: FlashLibrary | None,
    block_size: int,
    dtype: torch.dtype,
    triton: bool,
    backend: type,
) -> None:
    """A backend that cannot take the dtype or page size must not be chosen: it would fail at the first request."""
    monkeypatch.setattr(selection, "find_flash_library", lambda: library)
    monkeypatch.setattr(selection, "find_spec", lambda name: object() if triton else None)
    assert type(selection._fastest_on_gpu(geometry(block_size, dtype))) is backend


def test_block_size_follows_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 2 needs pages of 256: with the default of 16 it could never be chosen."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(selection, "find_flash_library", lambda: FLASH2)
    assert selection.default_block_size(cuda, torch.bfloat16) == 256
    assert selection.default_block_size(cuda, torch.float32) == 16
    assert selection.default_block_size(torch.device("cpu"), torch.bfloat16) == 16
    monkeypatch.setattr(selection, "find_flash_library", lambda: FLASH3)
    assert selection.default_block_size(cuda, torch.bfloat16) == 16


def test_missing_backends_are_named() -> None:
    """Asking for what is not there is a ConfigError that names it, not an ImportError from inside."""
    with pytest.raises(ConfigError, match="'flash' needs a GPU"):
        selection.select_backend(geometry(16, torch.bfloat16), "flash")
    with pytest.raises(ConfigError, match="unknown attention backend 'fast'"):
        selection.select_backend(geometry(16, torch.bfloat16), "fast")


@pytest.mark.parametrize("kind", [KVCacheDtype.INT8, KVCacheDtype.FP8])
def test_flash_attention_is_not_given_bytes(monkeypatch: pytest.MonkeyPatch, kind: KVCacheDtype) -> None:
    """It reads K and V in the model's type: Triton serves quantised ones, in its own block size; by name it is refused."""
    monkeypatch.setattr(selection, "find_flash_library", lambda: FLASH2)
    monkeypatch.setattr(selection, "find_spec", lambda name: object())
    quantized = geometry(256, torch.bfloat16)._replace(kv_cache_dtype=kind)
    assert type(selection._fastest_on_gpu(quantized)) is TritonAttention
    assert selection.default_block_size(torch.device("cuda"), torch.bfloat16, kind) == 16
    with pytest.raises(ConfigError, match=f"attention backend 'flash' reads no kv_cache_dtype {kind}"):
        selection.select_backend(quantized, "flash")
