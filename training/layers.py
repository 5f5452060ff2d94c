"""Pieces the two training forwards share: norm, rotary embedding, causal attention, initialisation.

These are written for gradients and whole sequences; the engine's own model code does not use them.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm: fp32 statistics, cast to the input type, then the weight.

    ``size``: features D of the last axis.
    ``eps``: added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., D]; the result has the type of ``x``."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        out: Tensor = (wide * scale).to(x.dtype) * self.weight
        return out


def rope_angles(length: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, each [length, head_dim / 2], fp32."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [B, H, T, d] pairing feature i with i + d/2 (Ouro)."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [B, H, T, d] pairing features 2i and 2i + 1 (Huginn)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, D] to [B, H, T, d]."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def causal_mask(length: int) -> Tensor:
    """What causal attention adds to the scores of whole rows: 0 or minus infinity, [length, length].

    Rows are padded on the right only, so this alone keeps padding out of real positions.
    """
    return torch.full((length, length), -torch.inf).triu_(1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of q [B, H, A, d] over k and v [B, H, T, d] with ``mask`` added to the scores; returns [B, A, H * d].

    Written out because the fused CPU kernel's bf16 backward is ten times slower at these lengths.
    """
    scores = ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).float() + mask
    mixed: Tensor = scores.softmax(-1).to(v.dtype) @ v
    return mixed.transpose(1, 2).flatten(-2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of whole rows [B, H, T, d]; returns [B, T, H * d]."""
    return attention(q, k, v, causal_mask(q.shape[-2]))


def init_weights(module: nn.Module, seed: int) -> None:
    """Draw every matrix from N(0, 1/fan_in) and the embedding from N(0, 1); norms keep 1, biases 0.

    The draws depend on ``seed`` and the parameter order only.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                fan_in = 1 if "embed_tokens" in name else parameter.shape[1]
                parameter.normal_(0.0, fan_in**-0.5, generator=generator)
