"""The small operators every model is built from: C kernels for contiguous CPU tensors, Triton on GPUs, else torch.

The kernels round where the torch operators round. In fp32 they differ by the order of the sum and the last bit of
exp: within 1e-6 relative of the row's largest value; in bf16 by at most one unit in the last place of each rounding.
A row's result does not depend on the rows beside it. Knows nothing of models, slots or caches.
"""

import torch
from torch import Tensor

from depthbatch.worker.layers.cpu.library import Kernels, TypedKernels, cpu_kernels
from depthbatch.worker.layers.linear import GatedLinear, Linear
from depthbatch.worker.layers.ops_choice import small_ops

__all__ = [
    "GatedLinear",
    "Linear",
    "add_rms_norm",
    "norm_add_norm",
    "rms_norm",
    "rms_norm_add",
    "rope_interleaved",
    "rope_split_half",
    "silu_mul",
    "use_kernels",
]

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
