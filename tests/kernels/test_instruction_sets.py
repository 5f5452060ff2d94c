"""Products as other processors compute them: every kernel that this one can run, whichever it would choose."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from depthbatch.worker.layers import int8, linear, ops_torch
from depthbatch.worker.layers.cpu import compile as building
from depthbatch.worker.layers.cpu.library import Kernels

AVX2 = "-march=x86-64-v3"
VARIANTS = {
    "AVX2": (AVX2,),
    "AVX-512 without bf16 products": (AVX2, "-DGEMM_LANES=16"),  # in halves, where registers are of 8 lanes
    "AVX-VNNI": (AVX2, "-include", str(Path(__file__).parent / "avx_vnni_emulation.h")),
}
ROWS = range(1, 30)
TYPES = [torch.float32, torch.bfloat16]


@cache
def built(name: str) -> Kernels:
    """The whole library as one variant."""
    compiler = shutil.which("gcc")
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if compiler is None or " avx2 " not in flags or " fma " not in flags:
        pytest.skip("needs gcc, and a processor with AVX2")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernels.so"
        sources = map(str, sorted(building.SOURCE_DIR.glob("*.c")))
        command = [compiler, *building.COMMON_FLAGS, *VARIANTS[name], "-fopenmp", *sources, "-o", str(target), "-lm"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return Kernels(ctypes.CDLL(str(target)))


@pytest.mark.parametrize("variant", ["AVX2", "AVX-512 without bf16 products"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_packed_products(variant: str, dtype: torch.dtype, gated: bool) -> None:
    """Each number of rows that has a tile of its own: against fp64, and bit for bit against each row alone."""
    kernels = built(variant)
    for out, width in ((34, 30), (100, 512)):
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


@pytest.mark.parametrize("variant", ["AVX2", "AVX-512 without bf16 products"])
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
        weight = int8.Int8Weight(values, torch.rand(out) / 100)
        x = torch.randn(max(ROWS), width).to(dtype)
        x[0], x[1] = 1.0, -1.0
        x[2, ::2] *= -1
        product, twin = linear.PackedInt8Product(weight, kernels, gated), int8.int8_product(x, weight)
        twin = ops_torch.silu_mul(twin) if gated else twin
        for n in ROWS:
            ours = product(x[:n])
            if gated:  # the last bits of silu are the kernels' own
                torch.testing.assert_close(ours, twin[:n])
            else:
                assert torch.equal(ours, twin[:n])
