"""The engine's model code equals the independent batch-1 references, through a trivial attention context.

Rows of different sequences, positions and loops share every call, as in the engine; the reference runs each sequence
alone. Unwritten K/V is NaN here, so a row that reads a plane nobody wrote cannot pass.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.layers.rotary import Rotation
from depthbatch.worker.models.interface import WorkItem
from depthbatch.worker.models.loader import load_model
from fakes.checkpoints import (
    HUGINN_TINY,
    OURO_TINY,
    tiny_config,
    write_checkpoint,
    write_lookahead_gate,
    write_preloop_gate,
)
from fakes.contiguous_attention import Row
from fakes.model_batch import Batch
from reference import huginn, ouro

PROMPTS = ([5, 17, 250, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 77, 100, 200], [42], [3, 1, 4, 1, 5, 9, 2, 6])
ATOL = 1e-4


def decode_with_refill(batch: Batch, prompts: list[list[int]], depths: list[list[int]]) -> list[list[torch.Tensor]]:
    """Greedy decoding with recorded depths; a row that exits is replaced by its next token in the next core call.

    Returns logits [V] of every token of every sequence.
    """
    outputs = [[row] for row in batch.prefill(prompts)]
    items: dict[int, WorkItem] = {}
    active: dict[int, Row] = {}

    def start(sequence: int) -> None:
        row = Row(sequence, len(prompts[sequence]) + len(outputs[sequence]) - 1, 0)
        items[sequence] = batch.prelude([int(outputs[sequence][-1].argmax())], [row])
        active[sequence] = row

    for sequence in range(len(prompts)):
        start(sequence)
    while active:
        order = sorted(active, key=lambda s: (s * 7) % 5)  # any order of rows must do
        rows = [active[s]._replace(loop=active[s].loop + 1) for s in order]
        item = batch.core(tuple(torch.cat(parts) for parts in zip(*(items[s] for s in order), strict=True)), rows)
        for i, (sequence, row) in enumerate(zip(order, rows, strict=True)):
            items[sequence], active[sequence] = tuple(part[i : i + 1] for part in item), row
            done = len(outputs[sequence]) - 1
            if row.loop == depths[sequence][done]:
                outputs[sequence].append(batch.logits(items[sequence], [row])[0])
                del active[sequence]
                if done + 1 < len(depths[sequence]):
                    start(sequence)
    return outputs


@pytest.fixture(scope="module")
def grouped_ouro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ouro with grouped-query attention, a head_dim of its own, a tied head, rope_parameters, in three shards."""
    config = tiny_config(
        OURO_TINY,
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=True,
        rope_theta=None,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    )
    return write_checkpoint(tmp_path_factory.mktemp("grouped"), config, shards=3)


@pytest.fixture(scope="module")
def untied_huginn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Huginn 1-2-3 with an untied head and padded vocabulary rows."""
    config = tiny_config(
        HUGINN_TINY,
        n_layers_in_prelude=1,
        n_layers_in_recurrent_block=2,
        n_layers_in_coda=3,
        tie_embeddings=False,
        vocab_size=310,
    )
    return write_checkpoint(tmp_path_factory.mktemp("untied"), config)


MODELS = ("ouro", "huginn", "grouped_ouro", "untied_huginn")


def model_dir(name: str, request: pytest.FixtureRequest) -> tuple[Path, ModuleType]:
    path = {"ouro": OURO_TINY, "huginn": HUGINN_TINY}.get(name) or request.getfixturevalue(name)
    return path, ouro if "ouro" in name else huginn


@pytest.mark.parametrize("name", MODELS)
def test_every_depth_of_a_prompt(name: str, request: pytest.FixtureRequest) -> None:
    """Logits and gate values at every depth and position, for a packed batch of prompts."""
    path, reference = model_dir(name, request)
    model = load_model(str(path))
    batch = Batch(model, KVLayout.DEPTH_INDEXED, len(PROMPTS))
    rows = [Row(s, p, 1) for s, prompt in enumerate(PROMPTS) for p in range(len(prompt))]
    item = batch.prelude([token for prompt in PROMPTS for token in prompt], rows)
    steps = {"steps": model.spec.r_max} if reference is huginn else {}
    wanted = [reference.outputs_at_depths(path, prompt, **steps) for prompt in PROMPTS]
    for loop in range(1, model.spec.r_max + 1):
        rows = [row._replace(loop=loop) for row in rows]
        before, item = item, batch.core(item, rows)
        logits = torch.cat([w[0][loop - 1] for w in wanted])[:, : model.spec.vocab_size]
        torch.testing.assert_close(batch.logits(item, rows), logits, atol=ATOL, rtol=0)
        signal = model.gate_logit(item) if reference is ouro else model.convergence(before, item)
        torch.testing.assert_close(signal, torch.cat([w[1][loop - 1] for w in wanted]), atol=ATOL, rtol=0)


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("name", ["ouro", "huginn", "grouped_ouro"])
def test_rows_at_different_depths_in_one_core_call(name: str, layout: KVLayout, request: pytest.FixtureRequest) -> None:
    """Decoding with refill under every layout: the same tokens and logits as each sequence alone."""
    path, reference = model_dir(name, request)
    model = load_model(str(path))
    r_max = model.spec.r_max
    generator = torch.Generator().manual_seed(3)
    depths = torch.randint(2, r_max + 1, (len(PROMPTS), 9), generator=generator).tolist()
    depths[0][3] = 1  # first_then_shared has to copy
    if not layout.allows_early_exit:
        depths = [[r_max] * 9 for _ in PROMPTS]
    outputs = decode_with_refill(Batch(model, layout, len(PROMPTS)), list(PROMPTS), depths)
    for prompt, row, logits in zip(PROMPTS, depths, outputs, strict=True):
        alone = reference.generate(path, prompt, 10, layout.value, gate="replay", exit_depths=row)
        assert [int(one.argmax()) for one in logits] == alone.tokens
        torch.testing.assert_close(torch.stack(logits), torch.stack(alone.logits), atol=ATOL, rtol=0)


def test_seeded_state() -> None:
    """The seeded initial state is that of an independent double-precision computation, whatever the batch."""
    model = load_model(str(HUGINN_TINY), state_init="seeded")
    batch = Batch(model, KVLayout.SINGLE, len(PROMPTS), state_seed=-12345)
    logits = batch.prefill(list(PROMPTS))
    zero = load_model(str(HUGINN_TINY))
    assert not torch.allclose(logits, Batch(zero, KVLayout.SINGLE, 4).prefill(list(PROMPTS)), atol=1e-2)
    for i, prompt in enumerate(PROMPTS):
        alone = huginn.generate(HUGINN_TINY, prompt, 1, "single", state_seed=-12345)
        # states of unit variance where zero ones begin: products that add up in another order differ by more
        torch.testing.assert_close(logits[i], alone.logits[0], atol=5 * ATOL, rtol=0)


def test_seeded_state_distribution() -> None:
    """Variance 0.4 times that of a unit normal cut at three deviations (0.9733), nothing beyond the cut."""
    from depthbatch.worker.models.huginn import seeded_state

    positions = torch.arange(500, dtype=torch.int32)
    states = seeded_state(torch.full_like(positions, 5), positions, 640, torch.float32)
    count = states.numel()
    assert states.abs().max() <= 3 * 0.4**0.5
    assert abs(states.mean().item()) < 5 * (0.4 / count) ** 0.5
    assert abs(states.double().var().item() / (0.4 * 0.97334) - 1) < 5 * (2 / count) ** 0.5


def test_lookahead_gate(tmp_path: Path) -> None:
    """The head beside the model is loaded, becomes the default gate, and computes weight . h + bias in fp32."""
    config = tiny_config(OURO_TINY)
    write_checkpoint(tmp_path, config)
    assert Gate.LOOKAHEAD not in load_model(str(tmp_path)).spec.gates
    write_lookahead_gate(tmp_path, config["hidden_size"])
    model = load_model(str(tmp_path))
    assert model.spec.default_gate is Gate.LOOKAHEAD
    h = torch.randn(5, config["hidden_size"], generator=torch.Generator().manual_seed(1))
    decider: Any = ouro.OuroReference(tmp_path).make_decider("lookahead", 0.5)
    wanted = h @ decider.weight[0] + decider.bias[0]
    torch.testing.assert_close(model.lookahead_logit((h,)), wanted)


def test_preloop_gate(tmp_path: Path) -> None:
    """Depths predicted for every token id equal the reference's, for several thresholds; all four depths occur."""
    config = tiny_config(OURO_TINY)
    write_checkpoint(tmp_path, config)
    write_preloop_gate(tmp_path, config["hidden_size"], config["total_ut_steps"])
    model = load_model(str(tmp_path))
    assert Gate.PRELOOP in model.spec.gates
    assert model.spec.default_gate is Gate.DELAYED
    reference = ouro.OuroReference(tmp_path)
    rows = [Row(0, 0, 1)] * 300
    item = Batch(model, KVLayout.SINGLE, 1).prelude(list(range(300)), rows)
    for threshold in (0.3, 0.7, 1.0):
        depths = model.preloop_depth(item, torch.full((300,), threshold)).tolist()
        assert depths == [reference.predicted_depth((item[0][i : i + 1],), threshold) for i in range(300)]
        assert set(depths) == ({1, 2, 3, 4} if threshold < 1 else {4})
    generated = ouro.generate(tmp_path, PROMPTS[0], 8, "last_exited", gate="preloop", threshold=0.5, min_loops=1)
    assert len(set(generated.depths)) > 1


@pytest.mark.parametrize("path", [OURO_TINY, HUGINN_TINY])
def test_stages_on_fake_cuda(path: Path) -> None:
    """Every stage traces on fake cuda tensors: a host synchronisation or a tensor left on the CPU raises there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    class NoAttention:
        def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return q.flatten(1)

        def from_qkv(
            self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_bias: torch.Tensor | None = None
        ) -> Any:
            q = qkv.chunk(3, -1)[0]
            assert rotation.cos.shape == rotation.sin.shape == (q.shape[0], model.spec.head_dim // 2)
            return q if qk_bias is None else q + qk_bias.chunk(2, -1)[0]

        def run_stack(self, stack: Any, x: torch.Tensor, rotation: Rotation) -> None:
            return None

    with FakeTensorMode():
        model = load_model(str(path), dtype="bfloat16", device="cuda", load_format="dummy", state_init="seeded")
        rows = torch.zeros(6, dtype=torch.int32, device="cuda")
        before = model.prelude(rows, rows, rows, NoAttention())
        after = model.core(before, rows, rows, NoAttention())
        logits = model.logits(model.coda(after, rows, NoAttention()))
        signal = model.gate_logit(after) if "ouro" in path.name else model.convergence(before, after)
    assert logits.device.type == signal.device.type == "cuda"
    assert logits.dtype == signal.dtype == torch.float32
    assert [part.dtype for part in after] == [torch.bfloat16] * len(model.spec.work_item)
