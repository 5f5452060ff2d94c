"""A shipped demo model gives committed token ids and depths, under every policy and every layout that must agree.

The committed values come from the batch-1 reference (demo_oracle.py), which shares no code with the engine, so that a
change of the model files, of the engine or of the reference shows here, and the reference alone cannot hide it.
"""

import json
from functools import cache
from typing import Any

import pytest

from depthbatch.common.config import POLICIES, EngineConfig
from depthbatch.common.gates import GATE_BY_LABEL
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams
from fakes.lockstep import LockstepEngine
from reference import demo_oracle
from reference.demo_oracle import MODELS, Setting, Shipped

RENEW = "the shipped model has changed: run python tests/reference/demo_oracle.py NAME and read the diff"
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)


@cache
def committed(model: Shipped) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(model.data.read_text())
    return data


def request(setting: Setting) -> RequestParams:
    return RequestParams(
        max_tokens=demo_oracle.MAX_TOKENS,
        stop_token_ids=demo_oracle.STOP,
        gate=GATE_BY_LABEL[setting.gate],
        exit_threshold=setting.threshold,
        min_loops=setting.min_loops,
        max_loops=setting.max_loops,
    )


def expected(model: Shipped, layout: KVLayout, policy: str, setting: Setting) -> list[dict[str, list[int]]]:
    """Under ``cb`` no gate decides; ``depth_indexed`` holds what ``last_exited`` holds where nothing exits early."""
    label = f"none {model.r_max}" if policy == "cb" and setting.may_exit_early else setting.label
    answers: list[dict[str, list[int]]]
    answers = committed(model)["answers"]["last_exited" if layout is KVLayout.DEPTH_INDEXED else layout][label]
    return answers


@each_model
def test_the_committed_values_are_of_the_shipped_weights(model: Shipped) -> None:
    """First, so that new weights are not mistaken for a broken engine."""
    assert committed(model)["weights"] == model.weights_digest(), RENEW
    assert len(committed(model)["prompts"]) == 10
    assert set(committed(model)["answers"]["last_exited"]) == {setting.label for setting in model.settings()}, RENEW


@each_model
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", list(KVLayout))
def test_tokens_and_depths_are_the_committed_ones(model: Shipped, layout: KVLayout, policy: str) -> None:
    """All prompts under all settings in one batch, more requests than slots."""
    values = {"model": model.name, "device": "cpu", "dtype": "float32", "kv_layout": layout, "policy": policy}
    running = LockstepEngine(EngineConfig.from_values(values | {"max_num_seqs": 6, "kv_blocks": 120}))
    chosen = [s for s in model.settings() if layout.allows_early_exit or not s.may_exit_early]
    prompts = [prompt["ids"] for prompt in committed(model)["prompts"]]
    answers = iter(running.run([(ids, request(setting)) for setting in chosen for ids in prompts]))
    for setting in chosen:
        for ids, wanted in zip(prompts, expected(model, layout, policy, setting), strict=True):
            got = next(answers)
            count = len(wanted["tokens"])
            assert {"tokens": got.tokens[:count], "depths": got.depths[:count]} == wanted, (setting.label, ids)
            if layout in (KVLayout.LAST_EXITED, KVLayout.DEPTH_INDEXED):  # never cut at a near tie
                assert len(got.tokens) == count, (setting.label, ids)


@each_model
def test_the_committed_values_can_tell_settings_apart(model: Shipped) -> None:
    """Equal rows would let an engine pass that ignores gate, threshold or layout. (Huginn was trained with a shared plane,
    which at full depth changes no token.)"""
    by_layout, full = committed(model)["answers"], f"none {model.r_max}"
    assert by_layout["last_exited"] != by_layout["single"]
    assert by_layout["last_exited"] != by_layout["first_then_shared"]
    assert model.name != "demo" or by_layout["last_exited"][full] != by_layout["single"][full]
    rows = by_layout["last_exited"]
    for gate in {setting.gate for setting in model.settings() if setting.may_exit_early}:
        low, high = model.of_heads if gate in ("lookahead", "preloop") else model.thresholds
        depths = {d for answer in rows[f"{gate} {high:g}"] for d in answer["depths"][1:]}
        assert len(depths) >= 2, gate
        assert rows[f"{gate} {low:g}"] != rows[f"{gate} {high:g}"], gate
    high = model.thresholds[1]
    assert rows[f"own {high:g}"] != rows[f"delayed {high:g}"]
