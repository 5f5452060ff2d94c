"""Gates that are trained apart from the model: the engine's exits and tokens equal the batch-1 reference's.

The heads have made-up weights, large enough that every threshold here gives several depths (asserted), and the same
files are read by the engine's loader and by the reference.
"""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams
from fakes.checkpoints import (
    HUGINN_TINY,
    OURO_TINY,
    tiny_config,
    write_checkpoint,
    write_lookahead_gate,
    write_preloop_gate,
)
from fakes.lockstep import Answer, LockstepEngine
from reference import huginn, ouro

OUTPUTS = 10


@pytest.fixture(scope="module")
def gated_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Ouro with both gate files beside it."""
    path = tmp_path_factory.mktemp("gated")
    config = tiny_config(OURO_TINY)
    write_checkpoint(path, config)
    write_lookahead_gate(path, config["hidden_size"])
    write_preloop_gate(path, config["hidden_size"], config["total_ut_steps"])
    return path


def check(
    reference: ModuleType, model: Path, layout: str, prompt: list[int], params: RequestParams, answer: Answer
) -> None:
    """Depths and tokens are those of the request alone, by the reference."""
    limits = {"min_loops": params.min_loops, "max_loops": params.max_loops}
    gate = {"gate": params.gate.label, "threshold": params.exit_threshold}
    alone = reference.generate(model, prompt, OUTPUTS, layout, **gate, **limits)
    assert answer.depths == alone.depths, params
    assert answer.tokens == alone.tokens, params


@pytest.mark.parametrize("policy", ["refill", "no-refill"])
def test_exits_of_trained_gates(gated_model: Path, policy: str) -> None:
    """Both gates side by side in one batch, several thresholds and limits."""
    values = {"model": str(gated_model), "policy": policy, "max_num_seqs": 4, "min_free_slots": 1, "kv_blocks": 120}
    engine = LockstepEngine(EngineConfig.from_values(values))
    generator = np.random.default_rng(0)
    requests = []
    for index in range(8):
        prompt = generator.integers(0, 300, 3 + 5 * index).tolist()
        params = RequestParams(
            max_tokens=OUTPUTS,
            gate=Gate.LOOKAHEAD if index % 2 else Gate.PRELOOP,
            exit_threshold=(0.3, 0.5, 0.7, 1.0)[index // 2],
            min_loops=2 + index // 2 % 2,
            max_loops=4,
        )
        requests.append((prompt, params))
    answers = engine.run(requests)
    for (prompt, params), answer in zip(requests, answers, strict=True):
        check(ouro, gated_model, "last_exited", prompt, params, answer)
    for gate in (Gate.LOOKAHEAD, Gate.PRELOOP):
        seen = {
            d for (_, params), a in zip(requests, answers, strict=True) if params.gate is gate for d in a.depths[1:]
        }
        assert len(seen) >= 2, gate


@pytest.mark.parametrize(("layout", "policy"), [("single", "refill"), ("last_exited", "auto")])
def test_a_preloop_head_decides_the_first_exit_and_lookahead_the_rest(tmp_path: Path, layout: str, policy: str) -> None:
    """Of a model whose own exits are distances: thresholds are probabilities. With min_loops 2 nothing leaves after one
    loop."""
    config = tiny_config(HUGINN_TINY) | {"mean_recurrence": 6}
    write_checkpoint(tmp_path, config)
    write_lookahead_gate(tmp_path, config["n_embd"])
    write_preloop_gate(tmp_path, config["n_embd"], 6)
    values = {"model": str(tmp_path), "policy": policy, "kv_layout": layout, "max_num_seqs": 3, "kv_blocks": 120}
    engine = LockstepEngine(EngineConfig.from_values(values))
    generator = np.random.default_rng(0)
    requests = [
        (
            generator.integers(0, 250, 3 + 4 * index).tolist(),
            RequestParams(
                max_tokens=OUTPUTS,
                gate=(Gate.LOOKAHEAD, Gate.LOOKAHEAD, Gate.PRELOOP)[index % 3],
                exit_threshold=(0.3, 0.7)[index // 3],
                min_loops=(1, 2, 1)[index % 3],
                max_loops=6,
            ),
        )
        for index in range(6)
    ]
    depths: dict[tuple[Gate, int], set[int]] = {}
    for (prompt, params), answer in zip(requests, engine.run(requests), strict=True):
        check(huginn, tmp_path, layout, prompt, params, answer)
        depths.setdefault((params.gate, params.min_loops), set()).update(answer.depths[1:])
    assert {1, 2, 3} <= depths[Gate.LOOKAHEAD, 1], "the first loop, and later ones by the other head"
    assert min(depths[Gate.LOOKAHEAD, 2]) == 2
