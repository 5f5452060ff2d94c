"""Which small operators a tensor gets where the C kernels do not apply: Triton on a GPU that has it, else torch."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

from torch import Tensor

from depthbatch.common.errors import ConfigError
from depthbatch.worker.layers import ops_torch

MODE_VARIABLE = "DEPTHBATCH_GPU_KERNELS"
MODES = ("auto", "torch")  # torch: its own operators, to compare with


class SmallOps(Protocol):
    """The operators of ops_torch, which says what they mean."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def rms_norm_add(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def norm_add_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, next_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def rope_split_half(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...
    def rope_interleaved(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


def small_ops(x: Tensor) -> SmallOps:
    """Those for ``x``. Fake and other subclassed tensors get torch's."""
    return _on_gpu() if type(x) is Tensor and x.is_cuda else ops_torch


@cache
def _on_gpu() -> SmallOps:
    """Decided once. Raises ConfigError for an unknown mode."""
    mode = os.environ.get(MODE_VARIABLE, "auto")
    if mode not in MODES:
        raise ConfigError(f"{MODE_VARIABLE} must be one of {', '.join(MODES)}, not {mode!r}")
    if mode == "torch" or find_spec("triton") is None:
        return ops_torch
    return cast(SmallOps, import_module("depthbatch.worker.layers.ops_triton"))
