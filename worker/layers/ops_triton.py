"""The small operators as one Triton kernel each, for GPUs: same meaning and same roundings as ops_torch.

A layer of plain torch operators is some thirty kernels that each read and write a few kilobytes; on a GPU a decode step
of small batches then costs their launches, not its bytes. Runs on a CPU under ``TRITON_INTERPRET=1``.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# (kernels are typed by Triton, at launch)

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm(x, y, residual, weight, out, eps,
          DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_Y: tl.constexpr, HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    element = out.dtype.element_ty
    lane = tl.arange(0, WIDTH)
    live = lane < DIM
    place = tl.program_id(0).to(tl.int64) * DIM + lane
    wide = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    if HAS_Y:
        wide = (wide + tl.load(y + place, mask=live, other=0.0).to(tl.float32)).to(element).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
    normed = (wide * scale).to(element).to(tl.float32)
    normed = (normed * tl.load(weight + lane, mask=live, other=0.0).to(tl.float32)).to(element)
    if HAS_RESIDUAL:
        kept = tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
        normed = (kept + normed.to(tl.float32)).to(element)
    tl.store(out + place, normed, mask=live)


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    element = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = lane < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + lane, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + lane, mask=live, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(out + row * WIDTH + lane, (activated * up).to(element), mask=live)


@triton.jit
def _rope(x, cos, sin, out, row_stride,
          HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    element = out.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, WIDTH)
    live = pair < HALF
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    source = x + row * row_stride + head * 2 * HALF
    target = out + (row * HEADS + head) * 2 * HALF
    a = tl.load(source + first, mask=live, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=live, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + pair, mask=live, other=0.0)
    s = tl.load(sin + row * HALF + pair, mask=live, other=0.0)
    tl.store(target + first, (a * c - b * s).to(element), mask=live)
    tl.store(target + second, (b * c + a * s).to(element), mask=live)


def _launch_norm(x: Tensor, y: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out, dim = torch.empty_like(x), x.shape[-1]
    if out.numel() == 0:
        return out
    y_or_x = x if y is None else y.contiguous()
    kept = x if residual is None else residual.contiguous()
    width = triton.next_power_of_2(dim)
    _norm[(out.numel() // dim,)](
        x, y_or_x, kept, weight, out, eps, DIM=dim, WIDTH=width, HAS_Y=y is not None,
        HAS_RESIDUAL=residual is not None, num_warps=8 if width > 2048 else 4,
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., D] with weight [D]: fp32 mean square, cast to the type of x, then times weight."""
    return _launch_norm(x, None, None, weight, eps)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x + y), the sum rounded to the type of x first; x, y [..., D]."""
    return _launch_norm(x, y, None, weight, eps)


def rms_norm_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual + rms_norm(x); residual, x [..., D]."""
    return _launch_norm(x, None, residual, weight, eps)


def norm_add_norm(
    residual: Tensor, x: Tensor, weight: Tensor, next_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """sum = residual + rms_norm(x, weight), and rms_norm(sum, next_weight): a branch's end and the next one's start."""
    total = rms_norm_add(residual, x, weight, eps)
    return total, rms_norm(total, next_weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [N, 2I], first half gate -> [N, I]."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel():
        _silu_mul[(out.numel() // width, triton.cdiv(width, 1024))](gate_up, out, WIDTH=width, BLOCK=1024)
    return out


def rope_split_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [N, H, Dh] pairing feature i with i + Dh/2 (Ouro); cos, sin fp32 [N, Dh/2]."""
    return _launch_rope(x, cos, sin, interleaved=False)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [N, H, Dh] pairing features 2i and 2i + 1 (Huginn); cos, sin fp32 [N, Dh/2]."""
    return _launch_rope(x, cos, sin, interleaved=True)


def _launch_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rows, heads, dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != dim:  # the heads of a row lie side by side, the rows need not
        x = x.contiguous()
    out = x.new_empty(x.shape)
    if out.numel():
        half = dim // 2
        _rope[(rows, heads)](
            x, cos.contiguous(), sin.contiguous(), out, x.stride(0), HEADS=heads, HALF=half,
            WIDTH=triton.next_power_of_2(half), INTERLEAVED=interleaved, num_warps=1,
        )  # fmt: skip
    return out
