"""Products and attention as other processors compute them: every kernel that this one can run, whichever it would choose."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.backend import CacheGeometry, DecodeRows, PrefillRows
from depthbatch.worker.layers import int8, linear, ops_torch
from fakes.attention_cases import Case, Projections, decode_rows, geometries, int32, make_case, prefill_rows, widen
from fakes.kernel_variants import VARIANTS, built

PACKED = tuple(name for name in VARIANTS if name != "AVX-VNNI")  # whose packed products and attention differ
ROWS = range(1, 30)
TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("variant", PACKED)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_packed_products(variant: str, dtype: torch.dtype, gated: bool) -> None:
    """Each number of rows that has a tile of its own: against fp64, and bit for bit against each row alone."""
    kernels = built(variant)
    for out, width in ((34, 30), (100, 512), (40, 1100)):
        weight = (torch.randn(out, width) / width**0.5).to(dtype)
        x = torch.randn(max(ROWS), width).to(dtype)
        product = linear.PackedProduct(weight, kernels, gated)
        exact = F.linear(x.double(), weight.double())
        exact = ops_torch.silu_mul(exact) if gated else exact
        tolerance = 2e-6 if dtype is torch.float32 else (2.0**-5 if gated else 2.0**-8)
        alone = torch.cat([product(row.unsqueeze(0)) for row in x])
        torch.testing.assert_close(alone.double(), exact, atol=4 * tolerance, rtol=tolerance)
        for n in ROWS:
            assert torch.equal(product(x[:n]), alone[:n])


@pytest.mark.parametrize("variant", PACKED)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_sum_is_one_chain_of_multiply_adds(variant: str, dtype: torch.dtype) -> None:
    """In the order of the inputs, rounded once a step; bf16 counts as the fp32 that it is. (fp64 rounds such a step nearly
    always alike: these numbers all.)"""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 100, generator=generator).to(dtype)
    x = torch.randn(6, 100, generator=generator).to(dtype)
    chain = torch.zeros(6, 64)
    for i in range(100):
        chain = (chain.double() + x[:, i : i + 1].double() * weight[:, i].double()).float()
    for n in (1, 6):
        assert torch.equal(linear.PackedProduct(weight, built(variant))(x[:n]), chain[:n].to(dtype))


@pytest.mark.parametrize("variant", ["AVX2", "AVX-VNNI"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_int8_products(variant: str, dtype: torch.dtype, gated: bool) -> None:
    """The integers of torch, with the largest bytes there are: a checkpoint may hold -128, which quantize never gives."""
    kernels = built(variant)
    for out, width in ((34, 30), (100, 512), (32, 1100)):
        values = torch.randint(-128, 128, (out, width), dtype=torch.int8)
        values[:8] = torch.tensor([[-128, 127] * 4]).t()
        weight = int8.Int8Weight(values, torch.rand(out, int8.groups(width)) / 100)
        x = torch.randn(max(ROWS), width).to(dtype)
        x[0], x[1] = 1.0, -1.0
        x[2, ::2] *= -1
        x[3, -5:], x[4] = 1e4, x[4] ** 5  # wide inputs beside each other, and in the last k step
        product, twin = linear.PackedInt8Product(weight, kernels, gated), int8.int8_product(x, weight)
        twin = ops_torch.silu_mul(twin) if gated else twin
        for n in ROWS:
            ours = product(x[:n])
            if gated:  # the last bits of silu are the kernels' own
                torch.testing.assert_close(ours, twin[:n])
            else:
                assert torch.equal(ours, twin[:n])


@pytest.mark.parametrize("variant", PACKED)
@given(geometry=geometries(), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_attention_equals_oracle(variant: str, geometry: CacheGeometry, seed: int) -> None:
    case = make_case(geometry, built(variant), seed)
    rows = decode_rows(case, 1, seed)
    real, inputs = rows.slots != 0, case.projections(len(rows.slots))
    ours, exact = case.tested.decode(1, *inputs, rows), case.exact.decode(1, *widen(inputs), rows)
    torch.testing.assert_close(ours[real].float(), exact[real], atol=case.tolerance, rtol=case.tolerance)
    chunks = prefill_rows(case, 1, seed)
    inputs = case.projections(len(chunks.positions))
    ours, exact = case.tested.prefill(1, *inputs, chunks), case.exact.prefill(1, *widen(inputs), chunks)
    torch.testing.assert_close(ours.float(), exact, atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("variant", PACKED)
@given(geometry=geometries(), seed=st.integers(0, 2**31), lengths=st.tuples(st.integers(1, 40), st.integers(0, 40)))
@settings(max_examples=40, deadline=None)
def test_a_prefilled_token_has_the_bits_of_a_decoded_one(
    variant: str, geometry: CacheGeometry, seed: int, lengths: tuple[int, int]
) -> None:
    """In either type, after any number of cached tokens: how many queries share a tile shows in none of their sums."""
    start = min(lengths[1], 4 * geometry.block_size - 1)
    end = min(start + lengths[0], 4 * geometry.block_size)
    together, alone = (make_case(geometry, built(variant), seed) for _ in range(2))
    inputs = together.projections(end - start)
    wanted = together.tested.prefill(1, *inputs, chunk(together, start, end))
    for i in range(end - start):
        row = DecodeRows(int32([5]), int32([start + i]), int32([0]), alone.block_tables)
        assert torch.equal(alone.tested.decode(1, *(x[i : i + 1] for x in inputs), row)[0], wanted[i])


@pytest.mark.parametrize("variant", PACKED)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kind", "head_dim"), [("auto", 24), ("int8", 24), ("int8", 32), ("fp8", 32)])
def test_a_token_does_not_see_later_ones(variant: str, dtype: torch.dtype, kind: str, head_dim: int) -> None:
    """Not even those of its own chunk, and if they are not a number."""
    device, stored = torch.device("cpu"), KVCacheDtype(kind)
    geometry = CacheGeometry(33, 16, 4, 2, head_dim, (1, 1), dtype, device, kv_cache_dtype=stored)
    case = make_case(geometry, built(variant), 0)
    inputs, rows = case.projections(30), chunk(case, 0, 30)
    wanted = case.tested.prefill(1, *inputs, rows)
    for later in range(17, 30):
        spoilt = Projections(*(x.clone() for x in inputs))
        spoilt.k[later], spoilt.v[later] = torch.nan, torch.nan
        ours = case.tested.prefill(1, *spoilt, rows)
        assert torch.equal(ours[:later], wanted[:later])
        assert ours[later:].isnan().all()


def chunk(case: Case, start: int, end: int) -> PrefillRows:
    """Tokens start .. end - 1 of slot 5, in plane 0."""
    length = end - start
    return PrefillRows(
        slots=int32([5]),
        starts=int32([start]),
        lengths=int32([length]),
        cu_lengths=int32([0, length]),
        token_slots=int32([5] * length),
        positions=torch.arange(start, end, dtype=torch.int32),
        plane=0,
        block_tables=case.block_tables,
        starts_host=(start,),
        lengths_host=(length,),
    )
