"""The C row operators and products against their torch twins, and against themselves in other batches."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.worker.layers import linear, ops, ops_torch
from depthbatch.worker.layers.cpu.library import cpu_kernels
from fakes.attention_cases import kernels_for

MODES = ("c", "portable")
SEEDS = st.integers(0, 2**31)
TYPES = st.sampled_from([torch.float32, torch.bfloat16])
WIDTHS = st.sampled_from([8, 16, 40, 64, 510])  # multiples of the 16 lanes, tails, and neither
EPS = 1e-6


@pytest.fixture(autouse=True)
def restore_kernels() -> Iterator[None]:
    yield
    ops.use_kernels(cpu_kernels())


def assert_twins(ours: torch.Tensor, twin: torch.Tensor, largest: float) -> None:
    """fp32: the order of a sum. bf16: both round at the same places, so they differ where a sum falls between."""
    tolerance = 1e-6 if ours.dtype is torch.float32 else 2.0**-7
    torch.testing.assert_close(ours, twin, atol=tolerance * largest, rtol=tolerance)


def operators(randn: Callable[..., torch.Tensor], n: int, d: int) -> dict[str, tuple[Any, ...]]:
    """Arguments for every operator."""
    weight, head_dim = randn(d), d // 2 * 2
    qkv = randn(n, 6 * head_dim).view(n, 6, head_dim)[:, 1:5]  # rows apart, heads together, as cut from a projection
    angles = torch.linspace(0, 20, n * head_dim // 2).view(n, -1)
    return {
        "rms_norm": (randn(n, d), weight, EPS),
        "add_rms_norm": (randn(n, d), randn(n, d), weight, EPS),
        "rms_norm_add": (randn(n, d), randn(n, d), weight, EPS),
        "norm_add_norm": (randn(n, d), randn(n, d), weight, randn(d), EPS),
        "silu_mul": (30 * randn(n, 2 * d),),  # far into both tails of the sigmoid
        "rope_split_half": (qkv, angles.cos(), angles.sin()),
        "rope_interleaved": (qkv, angles.cos(), angles.sin()),
    }


@pytest.mark.parametrize("mode", MODES)
@given(dtype=TYPES, n=st.integers(1, 9), d=WIDTHS, seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_operators_equal_their_twins(mode: str, dtype: torch.dtype, n: int, d: int, seed: int) -> None:
    """Every operator of ops.py; the kernels are in use (the counter below), so this does not compare torch to torch."""
    kernels = kernels_for(mode)
    ops.use_kernels(kernels)
    generator = torch.Generator().manual_seed(seed)
    cases = operators(lambda *shape: torch.randn(*shape, generator=generator).to(dtype), n, d)
    assert ops._kernels_for(cases["rms_norm"][0]) is kernels.by_type[dtype]
    for name, arguments in cases.items():
        ours, twin = getattr(ops, name)(*arguments), getattr(ops_torch, name)(*arguments)
        largest = max(float(x.abs().max()) for x in arguments if isinstance(x, torch.Tensor)) ** 2
        pairs = zip(ours, twin, strict=True) if isinstance(ours, tuple) else [(ours, twin)]
        for one, other in pairs:
            assert_twins(one, other, max(1.0, largest))


def test_torch_is_used_where_c_does_not_apply() -> None:
    """Other types, strided inputs and tensors with gradients go to torch and come out right."""
    ops.use_kernels(kernels_for("c"))
    x, weight = torch.randn(4, 64), torch.randn(64)
    assert torch.equal(
        ops.rms_norm(x.double(), weight.double(), EPS), ops_torch.rms_norm(x.double(), weight.double(), EPS)
    )
    strided = torch.randn(64, 4).t()
    assert torch.equal(ops.silu_mul(strided), ops_torch.silu_mul(strided))
    learned = weight.clone().requires_grad_()
    ops.rms_norm(x, learned, EPS).sum().backward()
    assert learned.grad is not None


@pytest.mark.parametrize("gated", [False, True])
@given(
    dtype=TYPES,
    n=st.integers(1, 45),  # up to four tiles of 14 rows
    out=st.sampled_from([2, 16, 30, 32, 34, 64, 100]),  # whole and partial pairs of panels
    width=st.sampled_from([2, 30, 64, 512]),
    seed=SEEDS,
)
@settings(max_examples=60, deadline=None)
def test_packed_product(gated: bool, dtype: torch.dtype, n: int, out: int, width: int, seed: int) -> None:
    """Against a product in fp64, and bit for bit against each row alone.

    bf16 error: one rounding of the result (the gated product rounds four times).
    """
    kernels = kernels_for("c")
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(out, width, generator=generator) / width**0.5).to(dtype)
    x = torch.randn(n, width, generator=generator).to(dtype)
    if not kernels.can_multiply(weight):
        pytest.skip("this processor has no packed products")
    product = linear.PackedProduct(weight, kernels, gated)
    ours = product(x)
    exact = F.linear(x.double(), weight.double())
    exact = ops_torch.silu_mul(exact) if gated else exact
    tolerance = 2e-6 if dtype is torch.float32 else (2.0**-5 if gated else 2.0**-8)
    torch.testing.assert_close(ours.double(), exact, atol=4 * tolerance, rtol=tolerance)
    row = seed % n
    assert torch.equal(product(x[row : row + 1])[0], ours[row])


@given(dtype=TYPES, n=st.integers(1, 20), seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_gated_equals_separate(dtype: torch.dtype, n: int, seed: int) -> None:
    """GatedLinear is silu_mul of Linear, bit for bit where the products are packed."""
    kernels = kernels_for("c")
    ops.use_kernels(kernels)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(n, 64, generator=generator).to(dtype)
    gated, separate = linear.GatedLinear(weight)(x), ops.silu_mul(linear.Linear(weight)(x))
    if kernels.can_multiply(weight):
        assert torch.equal(gated, separate)
    else:
        torch.testing.assert_close(gated, separate)


def test_every_way_to_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """F.linear, oneDNN's blocked weights and packed weights give the same layer; the choice follows the processor."""
    weight, x = torch.randn(64, 32).bfloat16(), torch.randn(5, 32).bfloat16()
    plain = F.linear(x, weight)
    monkeypatch.setattr(linear, "_has_amx", lambda: False)
    monkeypatch.setattr(linear, "cpu_kernels", lambda: None)
    assert torch.equal(linear.Linear(weight)(x), plain)
    assert torch.equal(linear.GatedLinear(weight)(x), ops_torch.silu_mul(plain))
    monkeypatch.setattr(linear, "_has_amx", lambda: True)
    if linear.blocks_bf16():
        assert isinstance(linear.Linear(weight).product, linear.BlockedProduct)
        assert torch.equal(linear.Linear(weight)(x), plain)
    if (kernels := kernels_for("c")).can_multiply(weight):
        with pytest.raises(TypeError, match="not torch"):
            linear.PackedProduct(weight, kernels)(x.float())
