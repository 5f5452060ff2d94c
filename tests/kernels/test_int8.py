"""Int8 products: C against torch bit for bit, a row against itself in other batches, the bytes against what they stand for."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.config import EngineConfig
from depthbatch.common.messages import RequestParams
from depthbatch.worker.layers import int8, linear, ops
from depthbatch.worker.layers.cpu.library import cpu_kernels
from fakes.attention_cases import kernels_for
from fakes.kernel_variants import TILES, int8_file
from fakes.lockstep import LockstepEngine
from reference.oracle import HUGINN, OURO, prompts_of

SHAPES = [(2, 2), (30, 30), (34, 64), (100, 512), (64, 1100), (32, 2085)]
TYPES = st.sampled_from([torch.float32, torch.bfloat16])


def example(n: int, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, int8.Int8Weight]:
    """Weights in groups, or with a scale an output as checkpoints have them; inputs with outliers, rows of ever heavier tails, and a row of zeros; an output of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator) / shape[1] ** 0.5
    weight[seed % shape[0]] = 0
    x = torch.randn(n, shape[1], generator=generator)
    x[:, seed % shape[1]] *= 30
    x *= x.abs() ** (torch.arange(n) % 4).unsqueeze(1)
    x[seed % n] *= seed % 2
    by_output = int8.Int8Weight(
        (weight * 200).round().clamp(-128, 127).to(torch.int8), torch.rand(shape[0], 1), shape[1]
    )
    return x.to(dtype), by_output if seed % 3 == 0 else int8.quantize(weight)


@pytest.mark.parametrize("mode", ["c", "portable"])
@given(
    dtype=TYPES, n=st.integers(1, 45), shape=st.sampled_from(SHAPES), gated=st.booleans(), seed=st.integers(0, 2**31)
)
@settings(max_examples=60, deadline=None)
def test_c_gives_the_bits_of_torch(
    mode: str, dtype: torch.dtype, n: int, shape: tuple[int, int], gated: bool, seed: int
) -> None:
    """Sums are integers, so every kernel has the same. Bug: 127 / tensor is a reciprocal and a product in torch, which rounds
    twice: one weight in thousands was another byte."""
    kernels = kernels_for(mode)
    ops.use_kernels(kernels)
    x, weight = example(n, shape, dtype, seed)
    ours, twin = linear.PackedInt8Product(weight, kernels, gated)(x), int8.int8_product(x, weight)
    assert torch.equal(ours, ops.silu_mul(twin) if gated else twin)
    row = seed % n
    assert torch.equal(linear.PackedInt8Product(weight, kernels, gated)(x[row : row + 1])[0], ours[row])
    ops.use_kernels(cpu_kernels())


@pytest.mark.parametrize("mode", ["c", "portable", "torch"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_numbers_stay_so(mode: str, value: float) -> None:
    """A byte has no NaN: the row's scale says it, and its neighbours are as without it. Rows of tiny numbers are zeros."""
    x, weight = example(4, (34, 70), torch.float32, 1)
    product = (
        (lambda x: int8.int8_product(x, weight))
        if mode == "torch"
        else linear.PackedInt8Product(weight, kernels_for(mode))
    )
    before = product(x)
    x[2, 69], x[3] = value, 1e-38
    after = product(x)
    assert torch.equal(after[:2], before[:2]) and after[2].isnan().all() and not after[3].any()


def test_bytes_are_the_nearest() -> None:
    """Half a step is the most that a weight or an input is off, and the largest of each is exact."""
    x, weight = example(9, (30, 64), torch.float32, 3)
    whole = torch.randn(30, 300)
    weight = int8.quantize(whole)
    steps = weight.scales.repeat_interleave(int8.GROUP, 1)[:, :300]
    assert ((weight.whole() - whole).abs() <= steps * 0.5001).all() and weight.scales.shape == (30, 3)
    assert (
        all((part.abs().amax(1) == 127).all() for part in weight.values.split(int8.GROUP, 1))
        and weight.values.dtype is torch.int8
    )
    values, scales = int8.quantize_rows(x)
    assert ((values * scales - x).abs() <= scales * 0.5001).all()  # the wide ones, too
    parts = [int8.quantize(part) for part in whole.split(10)]
    joined = int8.join(parts)
    assert isinstance(joined, int8.Int8Weight) and torch.equal(joined.values, weight.values)
    assert torch.equal(joined.scales, weight.scales)
    by_output = int8.quantize(whole, 300)  # as a checkpoint has it
    mixed = int8.join([weight, by_output])
    assert isinstance(mixed, int8.Int8Weight)
    assert torch.equal(mixed.whole(), torch.cat([weight.whole(), by_output.whole()]))


@given(width=st.integers(1, 700), tail=st.integers(0, 6), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_few_inputs_are_wide_and_leave_the_others_a_byte(width: int, tail: int, seed: int) -> None:
    """No more than one in 64, of up to 15 bits; the scale is the finest for which that holds."""
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
    sizes = int8.quantize_rows(x * x.abs() ** tail)[0].abs()
    most = int8.wide_inputs(width)
    assert (sizes > 127).sum() <= most <= width / 64 + 1 and sizes.max() == (sizes.max() / 127).log2().exp2() * 127
    assert sizes.max() <= 127 * 128
    assert sizes.max() == 127 * 128 or (sizes > 63).sum() > most


def test_tiles_give_the_same_integers() -> None:
    """The kernel for AMX with its eight instructions in plain C, for processors without: same sums at all numbers of rows."""
    kernels = kernels_for("c")
    library = ctypes.CDLL(str(int8_file(emulation=TILES)))
    for n in (1, 4, 5, 15, 16, 17, 31, 32, 33, 130):
        for shape in ((34, 70), (32, 2085)):
            x, weight = example(n, shape, torch.float32, n)
            product = linear.PackedInt8Product(weight, kernels)
            out, scratch = torch.empty(n, shape[0]), torch.empty(n * product.row_bytes, dtype=torch.int8)
            pointer, count = ctypes.c_void_p, ctypes.c_int64
            library.db_int8_linear_f32(
                pointer(out.data_ptr()),
                pointer(x.data_ptr()),
                ctypes.byref(product.args),
                count(n),
                pointer(scratch.data_ptr()),
            )
            assert torch.equal(out, int8.int8_product(x, weight))
    assert ctypes.c_int64.in_dll(library, "emulated_products").value > 0  # else nothing of this has run


def test_the_kernel_for_tiles_builds() -> None:
    int8_file("-march=sapphirerapids")


@pytest.mark.parametrize("model", [OURO, HUGINN], ids=["ouro", "huginn"])
def test_an_engine_with_int8_layers_answers_alike_in_any_batch(model: Path) -> None:
    """All prompts at once against each alone: token for token, and bit for bit where the head, which is not int8, is a packed
    product. The layers are int8, and the answers not those of fp32 in every token, or nothing was quantised."""
    values = {"model": str(model), "max_num_seqs": 5, "min_free_slots": 1, "kv_blocks": 120, "quantization": "int8"}
    running = LockstepEngine(EngineConfig.from_values(values))
    whole = LockstepEngine(EngineConfig.from_values(values | {"quantization": None}))
    block = running._model.weights.core.blocks[0]
    assert isinstance(block.down.product, linear.PackedInt8Product) and running.built.info.quantization == "int8"
    packed = kernels_for("c").by_type[torch.float32].linear is not None
    requests = [(prompt, RequestParams(max_tokens=12, logprobs=True)) for prompt in prompts_of(model)]
    together = running.run(requests)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = running.run([request])
        assert (alone.tokens, alone.depths) == (answer.tokens, answer.depths)
        if packed:
            assert alone.scores == answer.scores
    assert [answer.scores for answer in whole.run(requests)] != [answer.scores for answer in together]
