"""Calls of the small operators, to compare the Triton kernels with plain torch."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from depthbatch.worker.layers import ops_torch, ops_triton


class Case(NamedTuple):
    """One operator and its arguments."""

    name: str
    arguments: tuple[Tensor | float, ...]
    dtype: torch.dtype

    def check(self) -> None:
        """bf16: one unit in the last place at each of up to three roundings, of numbers up to 8; fp32: the order of sums,
        and exp. A wrong lane or pairing is off by the size of the numbers, about 1."""
        got, want = (getattr(module, self.name)(*self.arguments) for module in (ops_triton, ops_torch))
        relative, absolute = (2e-6, 4e-6) if self.dtype is torch.float32 else (2.0**-6, 2.0**-4)
        for mine, theirs in zip(_all(got), _all(want), strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            torch.testing.assert_close(mine, theirs, rtol=relative, atol=absolute)


def _all(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Rows and widths that are no powers of two, rows of heads that do not lie side by side, no rows at all."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, kind)

    for rows, dim in ((3, 96), (1, 2048), (2, 330), (0, 64)):
        x, y, weight, other = random(rows, dim), random(rows, dim), random(dim), random(dim)
        yield Case("rms_norm", (x, weight, 1e-6), dtype)
        yield Case("add_rms_norm", (x, y, weight, 1e-6), dtype)
        yield Case("rms_norm_add", (x, y, weight, 1e-6), dtype)
        if dtype is torch.float32:  # in bf16 the second norm makes a rounding of a small sum large
            yield Case("norm_add_norm", (x, y, weight, other, 1e-6), dtype)
        yield Case("silu_mul", (random(rows, 2 * dim) * 4,), dtype)
    for heads, dim in ((3, 24), (1, 128)):
        angles = random(5, dim // 2, kind=torch.float32)
        wide = random(5, (heads + 2) * dim).view(5, heads + 2, dim)
        for x in (wide, wide[:, :heads], random(5, dim, heads).transpose(1, 2)):
            yield Case("rope_split_half", (x, angles.cos(), angles.sin()), dtype)
            yield Case("rope_interleaved", (x, angles.cos(), angles.sin()), dtype)
