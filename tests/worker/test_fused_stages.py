"""Decode stages in one C call each against their own operators: tokens, the slots' state and every K and V, bit for bit in
fp32 and in bf16."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import SLOT_PARAMS, Stage, lane_of, slot_param_words
from depthbatch.common.gates import Gate
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import PLAIN, RequestParams, Variant
from depthbatch.worker.attention.backend import CacheGeometry
from depthbatch.worker.attention.cpu import CpuAttention
from depthbatch.worker.layers import ops
from depthbatch.worker.layers.blocks import Block, BlockStack
from depthbatch.worker.layers.cpu.library import Kernels, cpu_kernels
from depthbatch.worker.layers.linear import GatedLinear, Linear, PackedProduct
from depthbatch.worker.layers.rotary import Rope, RotaryTable
from depthbatch.worker.models.exit_heads import ExitHeads, ScalarHead
from depthbatch.worker.models.llama_like import Parts, StackedModel, Weights
from depthbatch.worker.models.ouro import Ouro
from depthbatch.worker.runner.fused_stages import FusedStages
from depthbatch.worker.runner.stage_tensors import DecodeBuffers
from depthbatch.worker.runner.stages import Stages
from depthbatch.worker.slots import SlotState
from fakes.attention_cases import fill_alike, kernels_for
from fakes.kernel_variants import built
from fakes.lockstep import LockstepEngine
from fakes.worker import tiny_spec
from reference.oracle import DORY, HUGINN, OURO, R_MAX, prompts_of

CPU = torch.device("cpu")
SLOTS, BLOCKS, BLOCK_SIZE = 6, 3, 4
KERNELS = ("c", "AVX2", "AVX-512 without bf16 products")


@pytest.fixture(autouse=True)
def restore_kernels() -> Iterator[None]:
    yield
    ops.use_kernels(cpu_kernels())


class Problem(NamedTuple):
    """What a model and its K/V are like."""

    dtype: torch.dtype = torch.float32
    lanes: int = 1
    r_max: int = 4
    columns: int = 300
    hidden: int = 64
    layout: KVLayout = KVLayout.LAST_EXITED
    kind: KVCacheDtype = KVCacheDtype.AUTO
    scale: float = 1.0
    norm: bool = False
    injected: bool = False  # Huginn's adapter and norms
    interleaved: bool = False


PROBLEMS = st.builds(
    Problem,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    lanes=st.sampled_from([1, 3]),
    r_max=st.integers(1, 5),
    columns=st.sampled_from([8, 50, 255, 256, 257, 300, 528, 1000]),  # 256 are looked at together
    hidden=st.sampled_from([8, 30, 64]),
    layout=st.sampled_from(KVLayout),
    kind=st.sampled_from(KVCacheDtype),
    scale=st.sampled_from([0.1, 1.0]),
    norm=st.booleans(),
    injected=st.booleans(),
    interleaved=st.booleans(),
)


def make_stages(kernels: Kernels, problem: Problem, seed: int) -> Stages:
    """A model without layers before and behind the loop, over random K/V, work items, parameters and gates."""
    generator, dtype, hidden = torch.Generator().manual_seed(seed), problem.dtype, problem.hidden
    spec = replace(
        tiny_spec(problem.r_max, dtype),
        vocab_size=problem.columns,
        hidden_size=hidden,
        head_dim=8,
        work_item=("state", "injection") if problem.injected else ("h",),
    )
    geometry = CacheGeometry(
        num_blocks=SLOTS * BLOCKS + 1,
        block_size=BLOCK_SIZE,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        planes=spec.planes_per_layer(problem.layout),
        dtype=dtype,
        device=CPU,
        kv_cache_dtype=problem.kind,
    )
    backend, slots = CpuAttention(geometry, kernels), SlotState(SLOTS, BLOCKS, spec, CPU, problem.lanes)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def product(rows: int, columns: int, kind: type[Linear | GatedLinear] = Linear) -> Any:
        weight = randn(rows, columns) * columns**-0.5
        layer = kind(weight)
        layer.product = PackedProduct(weight, kernels, kind is GatedLinear)
        return layer

    def block() -> Block:
        q = spec.num_heads * spec.head_dim
        norms = {name: randn(hidden) for name in ("norm_in", "norm_mlp_in", "norm_out", "norm_mlp_out")}
        gate_up, down = product(2 * 24, hidden, GatedLinear), product(hidden, 24)
        return Block(product(3 * q, hidden), product(hidden, q), gate_up, down, **norms)

    for layer in range(spec.core_layers):
        for memory in backend.memory(layer):
            fill_alike([memory], generator)
    for item in slots.item:
        item.copy_(randn(*item.shape) * 2)
    slots.token.copy_(torch.randint(0, spec.vocab_size, slots.token.shape, generator=generator))
    slots.survival.uniform_(generator=generator)
    slots.cumulated.uniform_(generator=generator)
    slots.block_table[1:] = 1 + torch.randperm(SLOTS * BLOCKS, generator=generator).int().view(SLOTS, BLOCKS)
    rng, params = np.random.default_rng(seed), np.zeros(SLOTS, SLOT_PARAMS)
    params["slot"], params["temperature"] = np.arange(1, SLOTS + 1), rng.choice([0, 0.3, 1, 1.7], SLOTS)
    params["seed_low"], params["seed_high"] = rng.integers(-(2**31), 2**31, (2, SLOTS))
    params["gate"], params["exit_threshold"] = Gate.OWN, rng.uniform(0, 1, SLOTS)
    slots.set_params(torch.from_numpy(slot_param_words(params)))
    head = product(spec.vocab_size, hidden)
    weight, half = randn(spec.vocab_size, hidden) * problem.scale, spec.vocab_size // 2
    weight[half:] = weight[:-half].clone()  # most logits are there twice: the first one is taken
    head.product = PackedProduct(weight, kernels)
    none = BlockStack((), 0, False, 1e-6)
    core = BlockStack((block(), block()), 0, problem.injected, 1e-6, randn(hidden) if problem.norm else None)
    norm = randn(hidden) if problem.norm else None
    weights = Weights(randn(spec.vocab_size, hidden), none, core, replace(none, final_norm=norm), head, randn(hidden))
    rotary = RotaryTable(spec.max_positions, spec.head_dim, Rope(1e4, problem.interleaved), CPU)
    model = Ouro(
        Parts(spec, weights, rotary, ExitHeads()), ScalarHead(torch.randn(hidden, generator=generator), torch.zeros(1))
    )
    model.adapter = product(hidden, 2 * hidden) if problem.injected else None
    return Stages(model, backend, slots, problem.layout)


def frame_of(draw: Any, stages: Stages, stage: Stage) -> torch.Tensor:
    """Rows of distinct lanes, drafts among them, and maybe a padding row."""
    slots, r_max = stages.slots, stages.r_max
    where = draw(st.lists(st.tuples(st.integers(1, SLOTS), st.integers(0, BLOCKS * BLOCK_SIZE - 2)), min_size=1))
    where = where if stage is Stage.CODA else list(dict(where).items())  # else a token of each slot
    places = {lane_of(slot, at, SLOTS, slots.lanes): (slot, at) for slot, at in where}
    rows = []
    for lane, (slot, at) in places.items():
        aux = draw(st.integers(1, r_max))
        if stage is Stage.PRELUDE:
            aux = draw(st.sampled_from([0, 5, 9]))
        elif stage is Stage.CODA and slots.lanes > 1 and draw(st.booleans()):
            aux = -aux  # a draft is read
        rows.append((slot, at, aux, lane))
    rows += [(0, 0, 0, 0)] * draw(st.integers(0, 1))
    return torch.tensor(rows, dtype=torch.int32).t().contiguous()


def outcome(stages: Stages, stage: Stage, frame: torch.Tensor, variant: Variant, fused: bool) -> list[torch.Tensor]:
    """What a stage gives and changes, after which everything is as it was."""
    slots, calls = stages.slots, stages.fused
    of_lanes = [slots.token, *slots.item, slots.survival, slots.cumulated]
    memory = [x for layer in range(stages.model.spec.core_layers) for x in stages.backend.memory(layer)]
    state = [*of_lanes, *memory, slots.block_table]
    before, buffers = [tensor.clone() for tensor in state], DecodeBuffers(frame.shape[1], CPU)
    buffers.frame.copy_(frame)
    try:
        stages.fused = calls if fused else FusedStages()
        with torch.inference_mode():
            stages.decode(stage, buffers, variant)
    finally:
        stages.fused = calls
    for tensor in of_lanes:
        tensor[0] = 0  # the dummy's, whose rows may come in any order
    for x in memory:
        x[: stages.layout.num_planes(stages.r_max)] = 0
    after = [buffers.values[frame[0] > 0].clone(), *(tensor.clone() for tensor in state)]
    for tensor, then in zip(state, before, strict=True):
        tensor.copy_(then)
    assert stage is Stage.CODA or any(not torch.equal(a, b) for a, b in zip(after[1:], before, strict=True))
    return after


VARIANTS = {
    Stage.PRELUDE: [PLAIN],
    Stage.CORE: [PLAIN, Variant.GATES],
    Stage.CODA: [PLAIN, Variant.SAMPLE],
}


@pytest.mark.parametrize("stage", VARIANTS, ids=lambda stage: stage.label)
@pytest.mark.parametrize("name", KERNELS)
@given(problem=PROBLEMS, data=st.data(), seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_one_call_equals_the_operators(
    name: str, stage: Stage, problem: Problem, data: st.DataObject, seed: int
) -> None:
    """Of every layout, with drafts and without, greedy and drawn; two of one size or another, over the same scratch."""
    kernels = kernels_for("c") if name == "c" else built(name)
    if kernels.by_type[torch.float32].linear is None:
        pytest.skip("no packed products here")
    ops.use_kernels(kernels)
    if stage is Stage.PRELUDE:
        problem = problem._replace(injected=False)  # which begins otherwise
    stages = make_stages(kernels, problem, seed)
    prelude, core, coda = stages.fused
    assert core is not None and coda is not None and coda.gathers and (prelude is None) == problem.injected
    for _ in range(2):
        frame = frame_of(data.draw, stages, stage)
        for variant in data.draw(st.permutations(VARIANTS[stage])):
            ours, plain = (outcome(stages, stage, frame, variant, fused) for fused in (True, False))
            for mine, theirs in zip(ours, plain, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_numbers_choose_alike(value: float) -> None:
    """As argmax does, and draws: a model that is broken is broken in one way only."""
    kernels = kernels_for("c")
    if kernels.by_type[torch.float32].linear is None:
        pytest.skip("no packed products here")
    stages = make_stages(kernels, Problem(), 1)
    stages.slots.item[0][2] = value
    frame = torch.tensor([[1, 2, 3], [4, 5, 6], [1, 2, 3], [1, 2, 3]], dtype=torch.int32)
    for variant in (PLAIN, Variant.SAMPLE):
        ours, plain = (outcome(stages, Stage.CODA, frame, variant, fused)[0] for fused in (True, False))
        assert torch.equal(ours, plain)


def engine(model: Path, fused: bool, **options: object) -> LockstepEngine:
    values = {"max_num_seqs": 4, "min_free_slots": 1, "kv_blocks": 120, "max_loops": R_MAX[model], "policy": "refill"}
    running = LockstepEngine(EngineConfig.from_values({"model": str(model), **values, **options}))
    stages = running.built.runner.stages
    if kernels_for("c").by_type[torch.float32].linear is None:
        pytest.skip("no packed products here")
    assert [call is not None for call in stages.fused] == FUSED[model]
    if not fused:
        stages.fused = FusedStages()
    return running


FUSED = {OURO: [True, True, True], HUGINN: [False, True, True], DORY: [False, False, False]}
"""Layers before the loop run before the call, as those behind it do; Dory has stages of its own."""


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"speculation": 3, "kv_layout": "last_exited"}])
@pytest.mark.parametrize("model", [OURO, HUGINN], ids=["ouro", "huginn"])
def test_an_engine_answers_alike(model: Path, options: dict[str, object]) -> None:
    """Through the scheduler: greedy rows, drawn ones and ones with a penalty, which take the other way, in one batch."""
    requests = [
        (
            prompt,
            RequestParams(
                max_tokens=12,
                gate=Gate.OWN,
                exit_threshold=0.5 if model == OURO else 0.8,
                min_loops=2,
                max_loops=R_MAX[model],
                temperature=(0.0, 1.3)[index % 2],
                seed=index,
                presence_penalty=0.5 * (index == 6),
            ),
        )
        for index, prompt in enumerate(prompts_of(model))
    ]
    ours, plain = (engine(model, fused, **options).run(requests) for fused in (True, False))
    assert [(answer.tokens, answer.depths) for answer in ours] == [(answer.tokens, answer.depths) for answer in plain]


def test_a_model_with_stages_of_its_own_runs_them() -> None:
    engine(DORY, True)


@pytest.mark.parametrize("place", [Ouro, StackedModel, None])
@pytest.mark.parametrize("name", ["prelude", "core", "logits"])
def test_a_stage_of_a_models_own_is_run(
    name: str, place: type[StackedModel] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a method that was put in the place of the class's own was not called, since kernels did what that had done. Of
    a class beneath, of the class itself, of one object (None)."""
    kernels = kernels_for("c")
    assert all(make_stages(kernels, Problem(), 0).fused)
    plain = getattr(StackedModel, name)

    def own(self: StackedModel, *given: Any) -> Any:
        return plain(self, *given)

    def with_its_own(self: Ouro, parts: Parts, gate: ScalarHead) -> None:
        StackedModel.__init__(self, parts)
        self._gate = gate
        setattr(self, name, partial(own, self))

    if place is None:
        monkeypatch.setattr(Ouro, "__init__", with_its_own)
    else:
        monkeypatch.setattr(place, name, own, raising=False)
    fused = make_stages(kernels, Problem(), 0).fused
    assert [stage is None for stage in fused] == [name == "prelude", name == "core", name == "logits"]
