"""A whole stack of blocks in one C call against its plain loop, bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry, DecodeRows, PrefillRows
from depthbatch.worker.attention.cpu import CpuAttention
from depthbatch.worker.layers import linear
from depthbatch.worker.layers.blocks import AttentionContext, Block, BlockStack
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
    qwen: bool = False,
    kind: Callable[[torch.Tensor], Weight] = as_it_is,
) -> BlockStack:
    """Random blocks: Ouro's norm placement, or Huginn's with its bias, or Llama's without norms on branches' results, or OLMo's
    with these alone and norms of q and k, or Qwen3's with norms of every head of q and k. ``kind`` is given each weight."""
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
            norm_out=None if llama or qwen else case.randn(hidden),
            norm_mlp_in=None if olmo else case.randn(hidden),
            gate_up=GatedLinear(matrix(2 * inner, hidden)),
            down=Linear(matrix(hidden, inner)),
            norm_mlp_out=None if llama or qwen else case.randn(hidden),
            q_norm=case.randn(g.head_dim * (1 if qwen else g.num_heads)) if olmo or qwen else None,
            k_norm=case.randn(g.head_dim * (1 if qwen else g.num_kv_heads)) if olmo or qwen else None,
        )

    return BlockStack(tuple(block() for _ in range(LAYERS)), 0, huginn, 1e-6, case.randn(hidden) if final else None)


@pytest.mark.parametrize("kind", ["own", "int8", "mixed", "int8 portable"])
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    group=st.sampled_from([1, 2]),
    hidden=st.sampled_from([32, 40, 64]),
    family=st.sampled_from(["ouro", "huginn", "llama", "olmo", "qwen"]),
    final=st.booleans(),
    prefill=st.booleans(),
    kv=st.sampled_from(KVCacheDtype),
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
    kv: KVCacheDtype,
    seed: int,
) -> None:
    """All norm placements, with and without bias, norms of q and k, and final norm, decode and prefill: outputs and K/V are equal bits, whether
    weights are in their own type, int8, or one of the four products int8 and the others not, and however K/V are stored.

    Two runs, the second with other rows: stale scratch or stale arguments of the first would show.
    """
    geometry = CacheGeometry(33, 16, 2 * group, 2, 16, (1, 3), dtype, torch.device("cpu"), kv_cache_dtype=kv)
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
        huginn, llama, olmo, qwen = (family == name for name in ("huginn", "llama", "olmo", "qwen"))
        stack = make_stack(fused, hidden, 48, huginn, final, llama, olmo, qwen, kind=choices.get(kind, quantize))
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
    for layer in range(2):
        for ours, theirs in zip(fused.tested.memory(layer), plain.tested.memory(layer), strict=True):
            assert torch.equal(ours, theirs)


def fused_case(seed: int = 0, **kind: bool) -> tuple[Case, BlockStack]:
    """A case of the C kernels, and blocks that they take as a whole on any processor."""
    case = make_case(
        CacheGeometry(33, 16, 4, 2, 16, (1, 3), torch.float32, torch.device("cpu")), kernels_for("portable"), seed
    )
    return case, make_stack(case, 32, 48, False, True, kind=quantize, **kind)


@pytest.mark.parametrize("missing", ["q_norm", "k_norm"])
@pytest.mark.parametrize("norms", ["olmo", "qwen"])
def test_norm_of_q_or_k_alone(norms: str, missing: str) -> None:
    """Bug: the plain loop took one of the two for none, and the C kernels read the other at address 0. Each is applied where it
    is there, in the same bits."""
    case, whole = fused_case(**{norms: True})
    other, _ = fused_case(**{norms: True})
    half, none = (
        replace(whole, blocks=tuple(replace(block, **dict.fromkeys(names)) for block in whole.blocks))
        for names in ((missing,), ("q_norm", "k_norm"))
    )
    rows = decode_rows(case, 0, 0)
    rows = DecodeRows(*(x[:-2] for x in rows[:3]), case.block_tables)
    x, rotation = case.randn(len(rows.positions), 32), case.rotation(len(rows.positions), False)
    result = Context(case.tested, rows).run_stack(half, x, rotation)
    assert result is not None
    assert torch.equal(result, half.plain(x, rotation, Context(other.tested, rows)))
    assert not torch.equal(result, none.plain(x, rotation, Context(other.tested, rows)))


@dataclass(frozen=True, eq=False)
class Doubled(BlockStack):
    """A subclass that changes what a block's attention starts from."""

    def qkv(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().qkv(block, x)


@dataclass(frozen=True, eq=False)
class Reversed(BlockStack):
    """A subclass that goes through its blocks the other way."""

    def plain(self, x: torch.Tensor, rotation: Rotation, attend: AttentionContext) -> torch.Tensor:
        for layer, block in reversed(list(enumerate(self.blocks, self.first_layer))):
            x = self.after_attention(block, x, attend.from_qkv(layer, self.qkv(block, x), rotation, block.qk_bias))
        return self.ended(x)


@pytest.mark.parametrize("kind", [Doubled, Reversed])
def test_a_subclass_is_not_run_as_what_it_derives_from(kind: type[BlockStack]) -> None:
    """Bug: the C kernels ran a subclass of BlockStack as BlockStack, past its methods: wrong tokens without an error. No backend
    is given it as a whole, and the kernels decline it."""
    case, stack = fused_case()
    derived = kind(stack.blocks, stack.first_layer, stack.norm_on_sum, stack.eps, stack.final_norm)
    rows = decode_rows(case, 0, 0)
    rows = DecodeRows(*(x[:-2] for x in rows[:3]), case.block_tables)
    x, rotation = case.randn(len(rows.positions), 32), case.rotation(len(rows.positions), False)
    context = Context(case.tested, rows)
    assert context.run_stack(derived, x, rotation) is None
    assert torch.equal(derived(x, rotation, context), derived.plain(x, rotation, context))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "run_stack", lambda *_: pytest.fail("a backend was given the subclass"))
        derived(x, rotation, context)


class DoubledLinear(Linear):
    """A subclass that changes what a layer gives."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)


@pytest.mark.parametrize(
    ("field", "length"),
    [
        ("q_norm", 8),
        ("q_norm", 32),
        ("k_norm", 64),
        ("norm_in", 31),
        ("norm_mlp_out", 64),
        ("qk_bias", 64),
        ("final_norm", 16),
    ],
)
def test_vectors_of_other_lengths_are_not_fused(field: str, length: int) -> None:
    """Bug: a [Dh] norm where the kernels read [H Dh] was read past its end. Whatever vector is not as long as what is read of it
    leaves the stack to the plain loop, which tells."""
    case, stack = fused_case(olmo=True)
    vector = torch.ones(length)
    if field == "final_norm":
        stack = replace(stack, final_norm=vector)
    else:
        stack = replace(stack, blocks=(stack.blocks[0], replace(stack.blocks[1], **{field: vector})))
    rows = decode_rows(case, 0, 0)
    x, rotation = case.randn(len(rows.positions), 32), case.rotation(len(rows.positions), False)
    assert Context(case.tested, rows).run_stack(stack, x, rotation) is None


@pytest.mark.parametrize(
    ("layer", "shape"), [("qkv", (128, 40)), ("qkv", (96, 32)), ("down", (32, 40)), ("out", (40, 64))]
)
def test_layers_of_other_sizes_are_not_fused(layer: str, shape: tuple[int, int]) -> None:
    """Bug: sizes were taken from the first block and the cache, whatever those of the layers were."""
    case, stack = fused_case()
    odd = replace(stack.blocks[1], **{layer: Linear(quantize(case.randn(*shape)))})
    rows = decode_rows(case, 0, 0)
    x, rotation = case.randn(len(rows.positions), 32), case.rotation(len(rows.positions), False)
    stack = replace(stack, blocks=(stack.blocks[0], odd))
    assert Context(case.tested, rows).run_stack(stack, x, rotation) is None


def test_a_layer_of_its_own_kind_is_not_fused() -> None:
    """Bug: as with stacks, a subclass of Linear would run as Linear."""
    case, stack = fused_case()
    odd = replace(stack.blocks[0], down=DoubledLinear(quantize(case.randn(32, 48))))
    rows = decode_rows(case, 0, 0)
    x, rotation = case.randn(len(rows.positions), 32), case.rotation(len(rows.positions), False)
    assert Context(case.tested, rows).run_stack(replace(stack, blocks=(odd,)), x, rotation) is None


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
