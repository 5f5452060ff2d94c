"""Random attention problems for two backends with equal caches, and the C libraries under test."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from depthbatch.common.errors import ConfigError
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.backend import (
    CacheGeometry,
    DecodeRows,
    PrefillRows,
    Rotation,
)
from depthbatch.worker.attention.cpu import CpuAttention
from depthbatch.worker.attention.sdpa import SdpaAttention
from depthbatch.worker.layers.cpu.library import Kernels, load_kernels

CPU = torch.device("cpu")
MAX_BLOCKS = 4  # of a sequence


def kernels_for(mode: str) -> Kernels:
    """The C library of ``mode``; skips the test where no compiler can build it."""
    try:
        kernels = load_kernels(mode)
    except ConfigError as error:
        pytest.skip(str(error))
    assert kernels is not None
    return kernels


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    """Small caches of every shape class: grouped heads, tails of 8 features, blocks below and above a tile of 16."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 4]))
    return CacheGeometry(
        num_blocks=8 * MAX_BLOCKS + 1,
        block_size=draw(st.sampled_from([4, 16, 16, 32])),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 24, 40, 64, 96, 128])),
        planes=(1, draw(st.integers(1, 4))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        device=CPU,
        windows=draw(st.sampled_from([(), (0, 5), (17, 1), (33, 20)])),
        kv_cache_dtype=draw(st.sampled_from(KVCacheDtype)),
    )


class Projections(NamedTuple):
    """Inputs of one attention call."""

    q: torch.Tensor  # [N, H, Dh]
    k: torch.Tensor  # [N, Hkv, Dh]
    v: torch.Tensor  # [N, Hkv, Dh]


@dataclass
class Case:
    """The C backend and the oracle, in the same type and in fp32, over the same random memory."""

    geometry: CacheGeometry
    tested: CpuAttention
    oracle: SdpaAttention
    exact: SdpaAttention  # fp32 whatever the type: what rounding is measured against
    block_tables: torch.Tensor  # [9, MAX_BLOCKS]; slot 0 is the dummy
    generator: torch.Generator

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.geometry.dtype)

    def projections(self, n: int) -> Projections:
        g = self.geometry
        return Projections(
            self.randn(n, g.num_heads, g.head_dim),
            self.randn(n, g.num_kv_heads, g.head_dim),
            self.randn(n, g.num_kv_heads, g.head_dim),
        )

    def rotation(self, n: int, interleaved: bool) -> Rotation:
        angles = torch.randn(n, self.geometry.head_dim // 2, generator=self.generator)
        return Rotation(interleaved, angles.cos(), angles.sin())

    @property
    def tolerance(self) -> float:
        """bf16: weights and output are rounded to 8 bits, values are within about 4."""
        return 2e-6 if self.geometry.dtype is torch.float32 else 4 * 2.0**-7


def make_case(geometry: CacheGeometry, kernels: Kernels, seed: int) -> Case:
    """Caches full of random numbers, tables full of distinct blocks."""
    generator = torch.Generator().manual_seed(seed)
    tested, oracle = CpuAttention(geometry, kernels), SdpaAttention(geometry)
    exact = SdpaAttention(geometry._replace(dtype=torch.float32))
    for layer in range(len(geometry.planes)):
        for memory in zip(*(backend.memory(layer) for backend in (tested, oracle, exact)), strict=True):
            fill_alike(memory, generator)
    tables = torch.zeros(9, MAX_BLOCKS, dtype=torch.int32)
    tables[1:] = 1 + torch.randperm(8 * MAX_BLOCKS, generator=generator).int().view(8, MAX_BLOCKS)
    return Case(geometry, tested, oracle, exact, tables, generator)


def fill_alike(memory: Sequence[torch.Tensor], generator: torch.Generator) -> None:
    """The same random numbers into each, within a few units as they are read: numbers, codes without a NaN, or scales."""
    shape = memory[0].shape
    if memory[0].dtype is torch.uint8:
        content = torch.randint(0, 120, shape, generator=generator) + 128 * torch.randint(
            0, 2, shape, generator=generator
        )
    elif memory[0].dim() == 3:
        content = torch.rand(shape, generator=generator) / 120
    else:
        content = torch.randn(shape, generator=generator).bfloat16()
    for tensor in memory:
        tensor.copy_(content)


def awkward_rows(kind: KVCacheDtype, tables: torch.Tensor) -> tuple[DecodeRows, torch.Tensor, torch.Tensor]:
    """60 rows of 4 slots and two planes with k and v fp32 [60, 4, 24] of every size a number has: whole and halved codes,
    where ties are decided, zeros of both signs, a NaN and an infinity."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 60, 4, 24, generator=generator) * torch.logspace(-44, 38, 60)[:, None, None]
    halves = torch.arange(-127.0, 65.0).view(2, 4, 24) / 2
    k[30:32] = halves * 2.0 ** torch.arange(2)[:, None, None]
    k[30:32, :, 0] = 127.0 if kind is KVCacheDtype.INT8 else 448.0
    v[30:32], v[32, 1], v[33, 0], v[34, 2, 5], v[35, 3, 6] = -halves, 0.0, -0.0, torch.nan, torch.inf
    row = torch.arange(60, dtype=torch.int32)
    return DecodeRows(row % 4 + 1, row // 4, row % 2, tables), k, v


def decode_rows(case: Case, layer: int, seed: int) -> DecodeRows:
    """Rows of distinct slots at positions on and beside block borders, in mixed planes, and two dummies."""
    rng, size = random.Random(seed), case.geometry.block_size
    slots = [*rng.sample(range(1, 9), rng.randint(1, 6)), 0, 0]
    borders = [0, 1, size - 1, size, size + 1, 2 * size - 1, 3 * size + 1, MAX_BLOCKS * size - 1]
    positions = [rng.choice([*borders, rng.randrange(MAX_BLOCKS * size)]) for _ in slots[:-2]] + [0, 0]
    planes = [rng.randrange(case.geometry.planes[layer]) for _ in slots[:-2]] + [0, 0]
    return DecodeRows(int32(slots), int32(positions), int32(planes), case.block_tables)


def chain_rows(block_tables: torch.Tensor, planes: int, block_size: int, seed: int) -> DecodeRows:
    """Successive tokens of sequences, each of a chain in the plane of another loop, later ones in lower ones, in any
    order of rows: as a core step with draft lanes has them. Chains begin on and beside block borders."""
    rng, rows = random.Random(seed), []
    for slot in rng.sample(range(1, block_tables.shape[0]), min(3, block_tables.shape[0] - 1)):
        length = rng.randint(1, planes)
        base = rng.choice([0, block_size - 1, block_size - 2, 2 * block_size - length]) % (2 * block_size)
        deepest_first = sorted(rng.sample(range(planes), length), reverse=True)
        rows += [(slot, base + i, plane) for i, plane in enumerate(deepest_first)]
    rng.shuffle(rows)
    return DecodeRows(*(int32(list(column)) for column in zip(*rows, strict=True)), block_tables)


def prefill_rows(case: Case, layer: int, seed: int) -> PrefillRows:
    """Chunks of several sequences: fresh ones, ones with a cached prefix, single tokens."""
    rng, capacity = random.Random(seed), MAX_BLOCKS * case.geometry.block_size
    slots = rng.sample(range(1, 9), rng.randint(1, 4))
    starts = [rng.choice([0, rng.randrange(capacity)]) for _ in slots]
    lengths = [rng.choice([1, rng.randint(1, capacity - start)]) for start in starts]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return PrefillRows(
        slots=int32(slots),
        starts=int32(starts),
        lengths=int32(lengths),
        cu_lengths=int32([0, *ends]),
        token_slots=int32([slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]),
        positions=int32([start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)]),
        plane=rng.randrange(case.geometry.planes[layer]),
        block_tables=case.block_tables,
        starts_host=tuple(starts),
        lengths_host=tuple(lengths),
    )


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def widen(projections: Projections) -> Projections:
    return Projections(*(x.float() for x in projections))


def real_blocks(cache: torch.Tensor, planes: int) -> torch.Tensor:
    """The cache without the dummy block, whose content nobody looks at."""
    return cache[planes:]
