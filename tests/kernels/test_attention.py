"""The C attention kernels against gather + SDPA, and against themselves in other batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.errors import ConfigError
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.backend import CacheGeometry, DecodeRows
from depthbatch.worker.attention.cpu import CpuAttention
from depthbatch.worker.attention.kv_quantization import dequantize, quantize
from depthbatch.worker.attention.sdpa import SdpaAttention
from depthbatch.worker.attention.select import select_backend
from fakes.attention_cases import (
    Case,
    awkward_rows,
    chain_rows,
    decode_rows,
    geometries,
    int32,
    kernels_for,
    make_case,
    prefill_rows,
    real_blocks,
    widen,
)

MODES = ("c", "portable")
NAN_CODE = 0x7F  # of e4m3
SEEDS = st.integers(0, 2**31)
LAYERS = st.integers(0, 1)


def assert_same_memory(case: Case) -> None:
    """Appends and copies move bits; they round nothing."""
    for layer, planes in enumerate(case.geometry.planes):
        for tested, oracle in zip(case.tested.memory(layer), case.oracle.memory(layer), strict=True):
            assert torch.equal(real_blocks(tested, planes), real_blocks(oracle, planes))


@pytest.mark.parametrize("mode", MODES)
@given(geometry=geometries(), layer=LAYERS, seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_decode_equals_oracle(mode: str, geometry: CacheGeometry, layer: int, seed: int) -> None:
    """One call with rows in different planes, at block borders, with dummy rows: outputs and memory.

    Every cache entry is random, so reading one wrong block, plane, head or position shows.
    """
    case = make_case(geometry, kernels_for(mode), seed)
    rows, inputs = decode_rows(case, layer, seed), case.projections(0)
    for _ in range(2):  # the second call sees what the first appended
        inputs = case.projections(len(rows.slots))
        tested = case.tested.decode(layer, *inputs, rows)
        case.oracle.decode(layer, *inputs, rows)
        exact = case.exact.decode(layer, *widen(inputs), rows)
        real = rows.slots != 0
        torch.testing.assert_close(tested[real].float(), exact[real], atol=case.tolerance, rtol=case.tolerance)
        assert_same_memory(case)


@pytest.mark.parametrize("mode", MODES)
@given(geometry=geometries(), layer=LAYERS, seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_prefill_equals_oracle(mode: str, geometry: CacheGeometry, layer: int, seed: int) -> None:
    """Packed chunks, some with a cached prefix. The oracle attends sequence by sequence, the kernel row by row."""
    case = make_case(geometry, kernels_for(mode), seed)
    rows = prefill_rows(case, layer, seed)
    inputs = case.projections(len(rows.positions))
    tested = case.tested.prefill(layer, *inputs, rows)
    case.oracle.prefill(layer, *inputs, rows)
    exact = case.exact.prefill(layer, *widen(inputs), rows)
    torch.testing.assert_close(tested.float(), exact, atol=case.tolerance, rtol=case.tolerance)
    assert_same_memory(case)


@given(geometry=geometries(), seed=SEEDS, cut=st.floats(0.1, 0.9))
@settings(max_examples=25, deadline=None)
def test_chunks_equal_one_prefill(geometry: CacheGeometry, seed: int, cut: float) -> None:
    """A prompt in two chunks gives the bits of the prompt in one, and in fp32 so does its last token as a decode step.

    The three paths share no bookkeeping (run length, cached prefix, rows_share_slots), so equal bits are not luck. In
    bf16 prefill may have a kernel of its own, which sums in another order than decode.
    """
    whole, chunked, decoded = (make_case(geometry, kernels_for("c"), seed) for _ in range(3))
    length = max(2, int(cut * 4 * geometry.block_size))
    split = max(1, int(cut * length))
    inputs = whole.projections(length)

    def prefill(case: Case, begin: int, end: int) -> torch.Tensor:
        rows = prefill_rows(case, 1, 0)._replace(
            slots=int32([5]),
            starts=int32([begin]),
            lengths=int32([end - begin]),
            token_slots=int32([5] * (end - begin)),
            positions=torch.arange(begin, end, dtype=torch.int32),
            plane=0,
            starts_host=(begin,),
            lengths_host=(end - begin,),
        )
        return case.tested.prefill(1, *(x[begin:end] for x in inputs), rows)

    wanted = prefill(whole, 0, length)
    assert torch.equal(torch.cat((prefill(chunked, 0, split), prefill(chunked, split, length))), wanted)
    prefill(decoded, 0, length - 1)
    row = DecodeRows(int32([5]), int32([length - 1]), int32([0]), decoded.block_tables)
    last = decoded.tested.decode(1, *(x[-1:] for x in inputs), row)
    exact = geometry.dtype is torch.float32
    tolerance = 0.0 if exact else whole.tolerance
    torch.testing.assert_close(last, wanted[-1:], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mode", MODES)
@given(geometry=geometries(), layer=LAYERS, seed=SEEDS, interleaved=st.booleans(), biased=st.booleans())
@settings(max_examples=30, deadline=None)
def test_fused_rotation_equals_separate(
    mode: str, geometry: CacheGeometry, layer: int, seed: int, interleaved: bool, biased: bool
) -> None:
    """Bias, rotation and append inside attention, against the plain operators before it: same memory, same result."""
    case = make_case(geometry, kernels_for(mode), seed)
    g, rows = case.geometry, decode_rows(case, layer, seed)
    n = len(rows.slots)
    qkv = case.randn(n, (g.num_heads + 2 * g.num_kv_heads) * g.head_dim)
    bias = case.randn((g.num_heads + g.num_kv_heads) * g.head_dim) if biased else None
    rotation = case.rotation(n, interleaved)
    tested = case.tested.decode_qkv(layer, qkv, rotation, rows, bias)
    oracle = case.oracle.decode_qkv(layer, qkv, rotation, rows, bias)
    real = rows.slots != 0
    tolerance = 4 * case.tolerance  # a bias makes larger scores
    torch.testing.assert_close(tested[real].float(), oracle[real].float(), atol=tolerance, rtol=tolerance)
    for i, planes in enumerate(g.planes):
        ours, theirs = (b.widened([real_blocks(m, planes) for m in b.memory(i)])[0] for b in (case.tested, case.oracle))
        quantized = g.kv_cache_dtype.is_quantized  # a neighbouring code, where roundings differ
        torch.testing.assert_close(
            ours, theirs, atol=0.05 if quantized else 1e-6, rtol=2.0**-3 if quantized else 2.0**-7
        )


@given(geometry=geometries(), seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_rows_do_not_see_each_other(geometry: CacheGeometry, seed: int) -> None:
    """A row alone gives the bits it gives in a batch; this is what makes continuous depth batching exact."""
    case = make_case(geometry, kernels_for("c"), seed)
    rows = decode_rows(case, 1, seed)
    inputs = case.projections(len(rows.slots))
    together = case.tested.decode(1, *inputs, rows)
    for i in range(len(rows.slots) - 2):
        one = slice(i, i + 1)
        alone = DecodeRows(rows.slots[one], rows.positions[one], rows.planes[one], rows.block_tables)
        assert torch.equal(case.tested.decode(1, *(x[one] for x in inputs), alone), together[one])


@pytest.mark.parametrize("mode", MODES)
@given(geometry=geometries(), seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_tokens_of_one_sequence_at_different_loops_do_not_see_each_other(
    mode: str, geometry: CacheGeometry, seed: int
) -> None:
    """Draft lanes: a call appends several successive tokens of a sequence, each to the plane of its loop. The bits are
    those of one token after the other, in whatever order, so no thread can be too early or too late."""
    geometry = geometry._replace(planes=(1, 4))
    together, *orders = (make_case(geometry, kernels_for(mode), seed) for _ in range(3))
    rows = chain_rows(together.block_tables, 4, geometry.block_size, seed)
    n = len(rows.slots)
    inputs = together.projections(n)
    wanted = together.tested.decode(1, *inputs, rows)
    for case, order in zip(orders, (range(n), reversed(range(n))), strict=True):
        for i in order:
            one = slice(i, i + 1)
            alone = DecodeRows(rows.slots[one], rows.positions[one], rows.planes[one], rows.block_tables)
            assert torch.equal(case.tested.decode(1, *(x[one] for x in inputs), alone), wanted[one])
        for mine, theirs in zip(case.tested.memory(1), together.tested.memory(1), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mode", MODES)
@given(geometry=geometries(), seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_stale_memory_is_not_read(mode: str, geometry: CacheGeometry, seed: int) -> None:
    """Freed blocks keep their old content, a NaN at worst; it must not leak into the sequence that owns them now."""
    case = make_case(geometry, kernels_for(mode), seed)
    rows = decode_rows(case, 1, seed)
    inputs = case.projections(len(rows.slots))
    clean = case.tested.decode(1, *inputs, rows)
    planes = geometry.planes[1]
    for slot, position, plane in zip(*(x.tolist() for x in rows[:3]), strict=True):
        for later in range(position + 1, 4 * geometry.block_size if slot else 0):
            block = int(case.block_tables[slot, later // geometry.block_size]) * planes + plane
            for memory in case.tested.memory(1):
                memory[block, :, later % geometry.block_size] = NAN_CODE if memory.dtype is torch.uint8 else torch.nan
    real = rows.slots != 0
    assert torch.equal(case.tested.decode(1, *inputs, rows)[real], clean[real])


@given(geometry=geometries(), seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_copy_planes_equals_oracle(geometry: CacheGeometry, seed: int) -> None:
    """Every (source, first, end), empty ranges too, in every looped layer and in no other."""
    case = make_case(geometry, kernels_for("c"), seed)
    rows, planes = decode_rows(case, 1, seed), geometry.planes[1]
    n = len(rows.slots)
    source, first, end = torch.randint(0, planes + 1, (3, n), generator=case.generator, dtype=torch.int32)
    source = source.clamp(max=planes - 1)
    for backend in (case.tested, case.oracle):
        backend.copy_planes(rows.slots, rows.positions, source, first, end, rows.block_tables)
    assert_same_memory(case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [KVCacheDtype.INT8, KVCacheDtype.FP8])
def test_codes_are_the_oracles(mode: str, kind: KVCacheDtype) -> None:
    """Codes and scales of every kind of vector. One with a NaN or an infinity reads as NaN as a whole, and no other does."""
    tables = torch.arange(40, dtype=torch.int32).view(5, 8)
    geometry = CacheGeometry(40, 16, 4, 4, 24, (2,), torch.float32, torch.device("cpu"), kv_cache_dtype=kind)
    tested, oracle = CpuAttention(geometry, kernels_for(mode)), SdpaAttention(geometry)
    rows, k, v = awkward_rows(kind, tables)
    for backend in (tested, oracle):
        backend.decode(0, torch.zeros_like(k), k, v, rows)
    for mine, theirs in zip(tested.memory(0), oracle.memory(0), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    read = dequantize(quantize(v, kind), kind)
    assert read.isnan().all(-1).nonzero().tolist() == [[34, 2], [35, 3]] and read.isnan().sum() == 2 * 24
    sizes = v.abs().amax(-1)
    usable = sizes.isfinite() & (sizes > 1e-35)
    worst = ((read - v).abs().amax(-1) / sizes)[usable].max()
    assert worst < (1 / 250 if kind is KVCacheDtype.INT8 else 1 / 27)  # half a step of codes near the largest


def test_selection() -> None:
    """The fastest backend that can serve the geometry; a named one that cannot is refused with the reason."""
    geometry = CacheGeometry(3, 16, 2, 2, 16, (1,), torch.float32, torch.device("cpu"))
    kernels_for("c")
    assert isinstance(select_backend(geometry), CpuAttention)
    assert isinstance(select_backend(geometry, "sdpa"), SdpaAttention)
    odd = geometry._replace(head_dim=20)
    assert isinstance(select_backend(odd), SdpaAttention)
    with pytest.raises(ConfigError, match="multiple of 8, not 20"):
        select_backend(odd, "cpu")
    with pytest.raises(ConfigError, match="unknown attention backend 'fast'"):
        select_backend(geometry, "fast")


def test_wrong_types_are_refused() -> None:
    """C would read int64 slots or fp32 queries as nonsense."""
    geometry = CacheGeometry(3, 16, 2, 2, 16, (1,), torch.bfloat16, torch.device("cpu"))
    backend = CpuAttention(geometry, kernels_for("c"))
    rows = DecodeRows(int32([1]), int32([0]), int32([0]), torch.ones(2, 1, dtype=torch.int32))
    heads = torch.zeros(1, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="int32"):
        backend.decode(0, heads, heads, heads, rows._replace(slots=torch.ones(1, dtype=torch.int64)))
    with pytest.raises(TypeError, match="the cache is torch"):
        backend.decode(0, heads.float(), heads.float(), heads.float(), rows)
