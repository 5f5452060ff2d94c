"""The small operators every model is built from: C kernels for contiguous CPU tensors, Triton on GPUs, else torch.

The kernels round where the torch operators round. In fp32 they differ by the order of the sum and the last bit of
exp: within 1e-6 relative of the row's largest value; in bf16 by at most one unit in the last place of each rounding.
A row's result does not depend on the rows beside it. Knows nothing of models, slots or caches.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from depthbatch.common.errors import ConfigError
from depthbatch.worker.layers import ops_torch
from depthbatch.worker.layers.cpu.library import Kernels, TypedKernels, cpu_kernels

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
    """Those for ``x`` where the C kernels do not apply. Fake and other subclassed tensors get torch's."""
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


_by_type: dict[torch.dtype, TypedKernels] | None = None  # None until the first operator on the CPU


def use_kernels(kernels: Kernels | None) -> None:
    """Makes the operators use ``kernels`` from now on; None: torch operators."""
    global _by_type
    _by_type = {} if kernels is None else kernels.by_type


def _kernels_for(*tensors: Tensor) -> TypedKernels | None:
    """Kernels that can take all of ``tensors``: plain contiguous CPU tensors of one type that need no gradient."""
    if _by_type is None:
        use_kernels(cpu_kernels())
    assert _by_type is not None
    dtype = tensors[0].dtype
    for t in tensors:
        if type(t) is not Tensor or not t.is_cpu or t.dtype is not dtype or not t.is_contiguous() or t.requires_grad:
            return None
    return _by_type.get(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., D] with weight [D]: fp32 mean square, cast to the type of x, then times weight."""
    if (kernels := _kernels_for(x, weight)) is None:
        return small_ops(x).rms_norm(x, weight, eps)
    out, d = torch.empty_like(x), x.shape[-1]
    kernels.norm(out.data_ptr(), x.data_ptr(), None, None, weight.data_ptr(), x.numel() // d, d, eps)
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x + y), the sum rounded to the type of x first; x, y [..., D]."""
    if x.shape != y.shape or (kernels := _kernels_for(x, y, weight)) is None:
        return small_ops(x).add_rms_norm(x, y, weight, eps)
    out, d = torch.empty_like(x), x.shape[-1]
    kernels.norm(out.data_ptr(), x.data_ptr(), y.data_ptr(), None, weight.data_ptr(), x.numel() // d, d, eps)
    return out


def rms_norm_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual + rms_norm(x); residual, x [..., D]."""
    if x.shape != residual.shape or (kernels := _kernels_for(x, residual, weight)) is None:
        return small_ops(x).rms_norm_add(residual, x, weight, eps)
    out, d = torch.empty_like(x), x.shape[-1]
    kernels.norm(out.data_ptr(), x.data_ptr(), None, residual.data_ptr(), weight.data_ptr(), x.numel() // d, d, eps)
    return out


def norm_add_norm(
    residual: Tensor, x: Tensor, weight: Tensor, next_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """sum = residual + rms_norm(x, weight), and rms_norm(sum, next_weight): a branch's end and the next one's start."""
    if x.shape != residual.shape or (kernels := _kernels_for(x, residual, weight, next_weight)) is None:
        return small_ops(x).norm_add_norm(residual, x, weight, next_weight, eps)
    total, normed, d = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    kernels.norm_add_norm(
        total.data_ptr(),
        normed.data_ptr(),
        residual.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        next_weight.data_ptr(),
        x.numel() // d,
        d,
        eps,
    )
    return total, normed


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [N, 2I], first half gate -> [N, I]."""
    if (kernels := _kernels_for(gate_up)) is None:
        return small_ops(gate_up).silu_mul(gate_up)
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    kernels.silu_mul(out.data_ptr(), gate_up.data_ptr(), out.numel() // width, width)
    return out


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp(logits / temperature - the largest of these) of logits fp32 [N, V] at temperature fp32 [N]: proportional to the
    probabilities, the largest is 1."""
    logits = logits.contiguous()  # or where a row lies would decide its last bits
    kernels = _kernels_for(logits, temperature)
    if kernels is None or kernels.temper is None:
        return ops_torch.temper(logits, temperature)
    weights = torch.empty_like(logits)
    kernels.temper(weights.data_ptr(), logits.data_ptr(), temperature.data_ptr(), *logits.shape)
    return weights


def rope_split_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [N, H, Dh] pairing feature i with i + Dh/2 (Ouro); cos, sin fp32 [N, Dh/2]."""
    out = _rope(x, cos, sin, interleaved=False)
    return small_ops(x).rope_split_half(x, cos, sin) if out is None else out


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [N, H, Dh] pairing features 2i and 2i + 1 (Huginn); cos, sin fp32 [N, Dh/2]."""
    out = _rope(x, cos, sin, interleaved=True)
    return small_ops(x).rope_interleaved(x, cos, sin) if out is None else out


def _rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor | None:
    """None where the kernel does not apply. The heads of a row must be contiguous, the rows need not be."""
    n, heads, head_dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != head_dim or _kernels_for(cos, sin) is None or cos.dtype is not torch.float32:
        return None
    if (kernels := _kernels_for(x[:0])) is None:
        return None
    out = x.new_empty((n, heads, head_dim))
    kernels.rope(
        out.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), n, heads, head_dim, x.stride(0), interleaved
    )
    return out
