"""The small operators in plain torch: the oracle of the C kernels, and the path of every other device.

Norms take fp32 statistics, cast to the input type, then multiply the weight; rotary angles are fp32. Knows nothing of
models, slots or caches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., D] with weight [D]: fp32 mean square, cast to the type of x, then times weight."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x + y), the sum rounded to the type of x first; x, y [..., D]."""
    return rms_norm(x + y, weight, eps)


def rms_norm_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual + rms_norm(x); residual, x [..., D]."""
    return residual + rms_norm(x, weight, eps)


def norm_add_norm(
    residual: Tensor, x: Tensor, weight: Tensor, next_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """sum = residual + rms_norm(x, weight), and rms_norm(sum, next_weight): a branch's end and the next one's start."""
    total = rms_norm_add(residual, x, weight, eps)
    return total, rms_norm(total, next_weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [N, 2I], first half gate -> [N, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rope_split_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [N, H, Dh] pairing feature i with i + Dh/2 (Ouro); cos, sin fp32 [N, Dh/2]."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [N, H, Dh] pairing features 2i and 2i + 1 (Huginn); cos, sin fp32 [N, Dh/2]."""
    wide = x.float()
    even, odd = wide[..., 0::2], wide[..., 1::2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp(logits / temperature - the largest of these) of logits fp32 [N, V] at temperature fp32 [N]: proportional to the
    probabilities, the largest is 1."""
    scaled = logits / temperature.unsqueeze(1)
    return torch.exp(scaled - scaled.amax(-1, keepdim=True))
