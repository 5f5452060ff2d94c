"""Families beyond Ouro and Huginn through the whole engine: the published code's greedy tokens, and the references' under
every gate, layout and policy."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams
from depthbatch.worker.layers import ops
from depthbatch.worker.layers.cpu.library import MODE_VARIABLE, cpu_kernels
from fakes.lockstep import LockstepEngine
from reference.oracle import DORY, NANBEIGE, R_MAX, RETROFITTED, compare, prompts_of

PUBLISHED_LOOPS = 8
OUTPUTS = 10
RECURRENT_LAYOUTS = (("depth_indexed", "greedy_depth_indexed"), ("single", "greedy_single"))
PUBLISHED = [(model, layout, key, PUBLISHED_LOOPS) for model in RETROFITTED for layout, key in RECURRENT_LAYOUTS]
FULL_DEPTH = [(model, "depth_indexed", "greedy_full_depth", 2) for model in (NANBEIGE, DORY)]
LAST_LOOP = [(DORY, "single", "greedy_single", 2)]
BACKENDS = {"c": None, "portable": None, "torch": "sdpa"}


@pytest.fixture(params=BACKENDS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the CPU computes with, for this test."""
    monkeypatch.setenv(MODE_VARIABLE, request.param)
    ops.use_kernels(cpu_kernels())
    yield request.param
    monkeypatch.undo()
    ops.use_kernels(cpu_kernels())


def engine(model: Path, layout: str, backend: str | None = None, **options: object) -> LockstepEngine:
    values = {"max_num_seqs": 5, "min_free_slots": 1, "kv_blocks": 120, "max_loops": R_MAX[model]} | options
    return LockstepEngine(EngineConfig.from_values({"model": str(model), "kv_layout": layout, **values}), backend)


@pytest.mark.parametrize(
    ("model", "layout", "key", "loops"),
    PUBLISHED + FULL_DEPTH + LAST_LOOP,
    ids=lambda value: getattr(value, "name", None),
)
def test_greedy_tokens_are_the_published_ones(model: Path, layout: str, key: str, loops: int, kernels: str) -> None:
    """All four prompts in one batch. The smallest gap on these paths is 0.0028, so a wrong plane or norm shows."""
    values = np.load(model / "expected.npz")
    request = RequestParams(max_tokens=24, min_loops=min(2, loops), max_loops=loops)
    running = engine(model, layout, BACKENDS[kernels], max_loops=loops)
    answers = running.run([(values[f"prompt_{i}"].tolist(), request) for i in range(4)])
    for index, answer in enumerate(answers):
        assert answer.tokens == values[f"{key}_{index}"].tolist()
        assert answer.depths == [loops] * 24


def request_of(running: LockstepEngine, gate: Gate, index: int) -> RequestParams:
    """``index`` varies thresholds, limits and replayed depths."""
    r_max = running.built.info.r_max
    low = high = r_max
    if gate is Gate.FIXED:
        low = high = 1 + index // 2 % r_max
    elif gate is not Gate.NONE:
        low = min(2, r_max)
    depths = np.random.default_rng(index).integers(1, r_max + 1, OUTPUTS).astype(np.uint8).tobytes()
    return RequestParams(
        max_tokens=OUTPUTS,
        gate=gate,
        exit_threshold=(0.3, 0.6, 0.9)[index % 3],
        min_loops=low,
        max_loops=high,
        exit_depths=depths if gate is Gate.REPLAY else b"",
    )


@pytest.mark.parametrize("policy", ["no-refill", "refill", "auto"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) for model in RETROFITTED for layout in KVLayout if layout.allows_early_exit]
    + [(NANBEIGE, KVLayout.DEPTH_INDEXED), (DORY, KVLayout.DEPTH_INDEXED), (DORY, KVLayout.SINGLE)],
    ids=lambda value: getattr(value, "name", None),
)
def test_gates_side_by_side(model: Path, layout: KVLayout, policy: str) -> None:
    """Every request another gate of those the model has, prompts in chunks of 13 tokens, rows at several depths in one core
    batch."""
    prompts = prompts_of(model)
    running = engine(model, layout, policy=policy, max_num_batched_tokens=13)
    gates = running.built.info.gates
    requests = [request_of(running, gates[index % len(gates)], index) for index in range(len(prompts))]
    answers = running.run(list(zip(prompts, requests, strict=True)))
    agreements = [
        compare(model, prompt, request, layout, answer)
        for prompt, request, answer in zip(prompts, requests, answers, strict=True)
    ]
    assert sum(a.compared for a in agreements) >= 0.9 * sum(a.total for a in agreements)
    assert len({depth for answer in answers for depth in answer.depths[1:]}) >= 2


@pytest.mark.parametrize("policy", ["cb", "no-refill", "refill", "auto"])
@pytest.mark.parametrize(("model", "layout", "key", "loops"), FULL_DEPTH)
def test_full_depth_under_every_policy(model: Path, layout: str, key: str, loops: int, policy: str) -> None:
    """Families without a gate: prompts in chunks of 13 tokens and other batches give the published tokens, too; what a
    family has no gate for is not offered."""
    values = np.load(model / "expected.npz")
    running = engine(model, layout, policy=policy, max_num_batched_tokens=13, max_num_seqs=3)
    assert set(running.built.info.gates) == {Gate.NONE, Gate.FIXED}
    request = RequestParams(max_tokens=24, min_loops=1, max_loops=loops)
    answers = running.run([(values[f"prompt_{i}"].tolist(), request) for i in range(4)])
    assert [answer.tokens for answer in answers] == [values[f"{key}_{i}"].tolist() for i in range(4)]
    assert max(len(answer.chunks) for answer in answers) >= 5
