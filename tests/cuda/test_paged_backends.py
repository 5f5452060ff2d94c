"""The GPU backends against the gather + SDPA oracle, on a CPU: twins stand in for FlashAttention, Triton interprets."""

from collections.abc import Callable

import pytest
import torch

from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry, DecodeRows
from depthbatch.worker.attention.flash_library import FlashAttention2, FlashAttention3
from depthbatch.worker.attention.paged import FlashAttention, TritonAttention
from depthbatch.worker.attention.sdpa import SdpaAttention
from fakes.attention_cases import awkward_rows, chain_rows, fill_alike
from fakes.flash_twin import flash2_varlen, flash2_with_kvcache, flash3_with_kvcache
from fakes.paged_rows import MAX_BLOCKS, SEQUENCES, heads, prefill_rows, shuffled_tables


def flash2(geometry: CacheGeometry) -> AttentionBackend:
    return FlashAttention(geometry, FlashAttention2(flash2_with_kvcache, flash2_varlen))


def flash3(geometry: CacheGeometry) -> AttentionBackend:
    return FlashAttention(geometry, FlashAttention3(flash3_with_kvcache))


BACKENDS = {"flash2": (flash2, 256), "flash3": (flash3, 16), "triton": (TritonAttention, 16)}
AUTO, INT8, FP8 = KVCacheDtype
STORED = [*((name, AUTO) for name in BACKENDS), ("triton", INT8), ("triton", FP8)]


def geometry_of(
    block_size: int,
    kv_heads: int,
    planes: tuple[int, ...],
    windows: tuple[int, ...] = (),
    kind: KVCacheDtype = AUTO,
) -> CacheGeometry:
    blocks = 1 + MAX_BLOCKS * SEQUENCES
    return CacheGeometry(
        blocks, block_size, 4, kv_heads, 24, planes, torch.bfloat16, torch.device("cpu"), windows, kind
    )


@pytest.mark.parametrize(("name", "kind"), STORED)
@pytest.mark.parametrize(
    ("kv_heads", "planes", "windows"), [(4, (1, 3), ()), (2, (2, 1), ()), (2, (1, 3), (6, 19)), (4, (1, 2), (0, 1))]
)
def test_backend_equals_oracle(
    name: str, kind: KVCacheDtype, kv_heads: int, planes: tuple[int, ...], windows: tuple[int, ...]
) -> None:
    """Two prefill chunks a sequence (the second behind a cached prefix, across block borders) into every plane, plane
    copies, then decode rows at different planes with a padding row: outputs equal the oracle's. Random K/V differ
    between planes and layers, so a wrong plane, block or alignment shows. At the end both hold the same memory."""
    torch.manual_seed(kv_heads)
    make: Callable[[CacheGeometry], AttentionBackend] = BACKENDS[name][0]
    geometry = geometry_of(BACKENDS[name][1], kv_heads, planes, windows, kind)
    tested, oracle = make(geometry), SdpaAttention(geometry)
    tables = shuffled_tables()
    size = geometry.block_size
    firsts, seconds = (size - 3, 5, 2 * size, 1), (7, 3, 1, size + 1)
    for layer, count in enumerate(planes):
        for plane in range(count):
            for starts, lengths in (((0,) * SEQUENCES, firsts), (firsts, seconds)):
                q, k, v = heads(sum(lengths), geometry)
                rows = prefill_rows(starts, lengths, plane, tables)
                got, want = (b.prefill(layer, q, k, v, rows) for b in (tested, oracle))
                torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
    lengths_now = torch.tensor([0, *(a + b for a, b in zip(firsts, seconds, strict=True))], dtype=torch.int32)
    slots = torch.tensor([3, 1, 4, 2, 0], dtype=torch.int32)
    last = (lengths_now[slots.long()] - 1).clamp(min=0)
    source, first = torch.zeros(5, dtype=torch.int32), torch.tensor([1, 2, 1, 1, 1], dtype=torch.int32)
    end = torch.tensor([2, 2, 1, 3, 1], dtype=torch.int32).clamp(max=max(planes))
    for backend in (tested, oracle):
        backend.copy_planes(slots, last, source, first, end, tables)
    for layer, count in enumerate(planes):
        plane_of = torch.randint(0, count, (5,)).int() if count > 1 else torch.tensor([0, 1, 0, 1, 0]).int()
        rows = DecodeRows(slots, lengths_now[slots.long()], plane_of, tables)
        q, k, v = heads(5, geometry)
        got, want = (b.decode(layer, q, k, v, rows) for b in (tested, oracle))
        torch.testing.assert_close(got[:4].float(), want[:4].float(), atol=2e-2, rtol=2e-2)
        for mine, theirs in zip(tested.memory(layer), oracle.memory(layer), strict=True):
            assert torch.equal(mine[count:], theirs.transpose(1, 2)[count:])  # but for the dummy block


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_triton_writes_the_oracles_bytes(kind: KVCacheDtype) -> None:
    """Codes and scales of every kind of vector."""
    geometry = geometry_of(16, 4, (2,), (), kind)._replace(dtype=torch.float32)
    tested, oracle = TritonAttention(geometry), SdpaAttention(geometry)
    rows, k, v = awkward_rows(kind, shuffled_tables())
    few = [0, 6, *range(30, 36), 59]  # interpreting takes its time
    rows, k, v = DecodeRows(*(x[few] for x in rows[:3]), rows.block_tables), k[few], v[few]
    for backend in (tested, oracle):
        backend.decode(0, torch.zeros_like(k), k, v, rows)
    for mine, theirs in zip(tested.memory(0), oracle.memory(0), strict=True):
        torch.testing.assert_close(mine, theirs.transpose(1, 2), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "kind"), [*STORED, *(("sdpa", kind) for kind in KVCacheDtype)])
def test_tokens_of_one_sequence_at_different_loops_do_not_see_each_other(
    name: str, kind: KVCacheDtype, seed: int
) -> None:
    """Draft lanes: one launch appends several successive tokens of a sequence, each to the plane of its loop, and gives
    the bits of one launch a token, first to last and last to first. Memory before is random, so what is read shows."""
    make, size = {**BACKENDS, "sdpa": (SdpaAttention, 16)}[name]
    geometry = geometry_of(size, 2, (1, 3), (), kind)
    torch.manual_seed(seed)
    tables = shuffled_tables()
    rows = chain_rows(tables, 3, size, seed)
    count = len(rows.slots)
    inputs = heads(count, geometry)
    together, forwards, backwards = (make(geometry) for _ in range(3))
    for memory in zip(*(backend.memory(1) for backend in (together, forwards, backwards)), strict=True):
        fill_alike(memory, torch.Generator().manual_seed(seed))
    wanted = together.decode(1, *inputs, rows)
    for backend, order in ((forwards, range(count)), (backwards, reversed(range(count)))):
        for i in order:
            one = slice(i, i + 1)
            alone = DecodeRows(rows.slots[one], rows.positions[one], rows.planes[one], tables)
            assert torch.equal(backend.decode(1, *(x[one] for x in inputs), alone), wanted[one])


def test_twin_refuses_small_pages() -> None:
    """FlashAttention 2 wants pages of 256 tokens: the twin says so, so that a wrong block size cannot pass here."""
    geometry = geometry_of(16, 4, (1,))
    q, k, v = heads(1, geometry)
    rows = DecodeRows(*(torch.tensor([1], dtype=torch.int32),) * 2, torch.zeros(1).int(), shuffled_tables())
    with pytest.raises(AssertionError, match="divisible by 256"):
        flash2(geometry).decode(0, q, k, v, rows)
