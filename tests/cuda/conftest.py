"""Triton kernels run in interpreter mode here; the variable must be set before Triton is imported.

Tests marked ``gpu`` need a device and compiled kernels: ``TRITON_INTERPRET=0 pytest -m gpu``.
"""

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def torch_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, with what a tape can hold: no C kernels, torch's sort, the Triton backend (with its twin: interpreting
    takes minutes)."""
    from depthbatch.worker.attention import triton_decode
    from depthbatch.worker.layers import ops
    from depthbatch.worker.layers.cpu.library import MODE_VARIABLE, cpu_kernels
    from depthbatch.worker.sampling import sampler
    from fakes import triton_twin

    monkeypatch.setattr(triton_decode, "append_kv", triton_twin.append_kv)
    monkeypatch.setattr(triton_decode, "decode_attention", triton_twin.decode_attention)
    monkeypatch.setenv(MODE_VARIABLE, "torch")
    monkeypatch.setattr(sampler, "_descending", lambda weights: torch.sort(weights, descending=True).values)
    ops.use_kernels(None)
    yield
    monkeypatch.undo()
    ops.use_kernels(cpu_kernels())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "no CUDA device is available"
    elif os.environ["TRITON_INTERPRET"] == "1":
        reason = "needs compiled Triton kernels: set TRITON_INTERPRET=0"
    for item in items:
        if reason is not None and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
