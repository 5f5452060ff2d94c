"""A whole stack of blocks in one C call against its plain loop, bit for bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry, DecodeRows, PrefillRows
from depthbatch.worker.attention.cpu import CpuAttention
from depthbatch.worker.layers import linear
from depthbatch.worker.layers.blocks import Block, BlockStack
from depthbatch.worker.layers.int8 import Weight, quantize
from depthbatch.worker.layers.linear import GatedLinear, Linear
from depthbatch.worker.layers.rotary import Rotation
from fakes.attention_cases import Case, decode_rows, kernels_for, make_case, prefill_rows

LAYERS = 2


class Context:
    """AttentionContext of decode or prefill rows on one backend."""

    def __init__(self, backend: AttentionBackend, rows: DecodeRows | PrefillRows) -> None:
        self.backend, self.rows = backend, rows

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("blocks hand over projections")

    def from_qkv(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(self.rows, DecodeRows):
            return self.backend.decode_qkv(layer, qkv, rotation, self.rows, qk_bias)
        return self.backend.prefill_qkv(layer, qkv, rotation, self.rows, qk_bias)

    def run_stack(self, stack: BlockStack, x: torch.Tensor, rotation: Rotation) -> torch.Tensor | None:
        if isinstance(self.rows, DecodeRows):
            return self.backend.decode_stack(stack, x, rotation, self.rows)
        return self.backend.prefill_stack(stack, x, rotation, self.rows)


def as_it_is(weight: torch.Tensor) -> Weight:
    return weight


def make_stack(
    case: Case,
    hidden: int,
    inner: int,
    huginn: bool,
    final: bool,
    llama: bool = False,
    olmo: bool = False,
    kind: Callable[[torch.Tensor], Weight] = as_it_is,
) -> BlockStack:
    """Random blocks: Ouro's norm placement, or Huginn's with its bias, or Llama's without norms on branches' results, or OLMo's
    with these alone and norms of q and k. ``kind`` is given each weight."""
    g = case.geometry
    qkv_width, qk_width = (g.num_heads + 2 * g.num_kv_heads) * g.head_dim, (g.num_heads + g.num_kv_heads) * g.head_dim

    def matrix(rows: int, columns: int) -> Weight:
        return kind(case.randn(rows, columns) * columns**-0.5)

    def block() -> Block:
        return Block(
            norm_in=None if olmo else case.randn(hidden),
            qkv=Linear(matrix(qkv_width, hidden)),
            qk_bias=case.randn(qk_width) if huginn else None,
            out=Linear(matrix(hidden, g.num_heads * g.head_dim)),
            norm_out=None if llama else case.randn(hidden),
            norm_mlp_in=None if olmo else case.randn(hidden),
            gate_up=GatedLinear(matrix(2 * inner, hidden)),
            down=Linear(matrix(hidden, inner)),
            norm_mlp_out=None if llama else case.randn(hidden),
            q_norm=case.randn(g.num_heads * g.head_dim) if olmo else None,
            k_norm=case.randn(g.num_kv_heads * g.head_dim) if olmo else None,
        )

    return BlockStack(tuple(block() for _ in range(LAYERS)), 0, huginn, 1e-6, case.randn(hidden) if final else None)


@pytest.mark.parametrize("kind", ["own", "int8", "mixed", "int8 portable"])
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    group=st.sampled_from([1, 2]),
    hidden=st.sampled_from([32, 40, 64]),
    family=st.sampled_from(["ouro", "huginn", "llama", "olmo"]),
    final=st.booleans(),
    prefill=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_stack_equals_its_plain_loop(
    kind: str,
    dtype: torch.dtype,
    group: int,
    hidden: int,
    family: str,
    final: bool,
    prefill: bool,
    seed: int,
) -> None:
    """All norm placements, with and without bias, norms of q and k, and final norm, decode and prefill: outputs and K/V are equal bits, whether
    weights are in their own type, int8, or one of the four products int8 and the others not.

    Two runs, the second with other rows: stale scratch or stale arguments of the first would show.
    """
    geometry = CacheGeometry(33, 16, 2 * group, 2, 16, (1, 3), dtype, torch.device("cpu"))
    kernels = kernels_for("portable" if kind == "int8 portable" else "c")
    fused, plain = make_case(geometry, kernels, seed), make_case(geometry, kernels, seed)
    if kernels.by_type[dtype].linear is None and kind in ("own", "mixed"):
        pytest.skip("this processor has no packed products")
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # where bf16 goes by tiles the stack is not fused, and can be all the same
        patch.setattr(linear, "_has_amx", lambda: False)
        patch.setattr(linear, "cpu_kernels", lambda: kernels)
        choices = {"own": as_it_is, "mixed": lambda w: quantize(w) if w.shape[1] == 48 else w}
        huginn, llama, olmo = (family == name for name in ("huginn", "llama", "olmo"))
        stack = make_stack(fused, hidden, 48, huginn, final, llama, olmo, kind=choices.get(kind, quantize))
    for run in range(2):
        rows = (prefill_rows if prefill else decode_rows)(fused, 0, seed + run)
        n = len(rows.positions)
        if not prefill:  # the dummies of the two runs would race in block 0
            n -= 2
            rows = DecodeRows(*(x[:n] for x in rows[:3]), fused.block_tables)
        x, rotation = fused.randn(n, hidden), fused.rotation(n, huginn)
        before = x.clone()
        result = Context(fused.tested, rows).run_stack(stack, x, rotation)
        assert result is not None
        assert torch.equal(result, stack.plain(x, rotation, Context(plain.tested, rows)))
        assert torch.equal(x, before)
    for ours, theirs in zip(fused.tested.k_cache, plain.tested.k_cache, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("missing", ["q_norm", "k_norm"])
def test_norm_of_q_or_k_alone_is_not_fused(missing: str) -> None:
    """Bug: the plain loop takes one of the two for none; with that of q alone the C kernels read the other at address 0."""
    geometry = CacheGeometry(33, 16, 2, 2, 16, (1, 3), torch.float32, torch.device("cpu"))
    case = make_case(geometry, kernels_for("portable"), 0)
    whole = make_stack(case, 32, 48, False, False, olmo=True, kind=quantize)
    half = replace(whole, blocks=(replace(whole.blocks[0], **{missing: None}), *whole.blocks[1:]))
    rows = decode_rows(case, 0, 0)
    x, rotation = case.randn(len(rows.positions), 32), case.rotation(len(rows.positions), False)
    assert Context(case.tested, rows).run_stack(whole, x, rotation) is not None
    assert Context(case.tested, rows).run_stack(half, x, rotation) is None


def test_unpacked_stack_runs_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without packed products the backend declines and the stack still gives the right result."""
    from depthbatch.worker.layers import linear

    geometry = CacheGeometry(33, 16, 2, 2, 16, (1, 3), torch.float32, torch.device("cpu"))
    case, other = (make_case(geometry, kernels_for("c"), 7) for _ in range(2))
    packed = make_stack(case, 32, 48, False, True)
    monkeypatch.setattr(linear, "cpu_kernels", lambda: None)
    unpacked = make_stack(other, 32, 48, False, True)
    rows = decode_rows(case, 0, 3)
    n = len(rows.slots)
    x, rotation = case.randn(n, 32), case.rotation(n, False)
    assert isinstance(case.tested, CpuAttention)
    assert other.tested.decode_stack(unpacked, x, rotation, rows) is None
    ours, theirs = packed(x, rotation, Context(case.tested, rows)), unpacked(x, rotation, Context(other.oracle, rows))
    real = rows.slots != 0
    torch.testing.assert_close(ours[real], theirs[real], atol=1e-4, rtol=1e-4)
