"""The batch-1 references reproduce the published reference implementations' recorded values.

These values were computed by other code, so agreement within 1e-4 at every depth and position, on weights with random
norms, cannot come from a shared mistake. The engine's tests stand on these references.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from reference import huginn, ouro

FIDELITY = Path(__file__).parent.parent / "data" / "fidelity"
OURO, HUGINN = FIDELITY / "ouro-tiny", FIDELITY / "huginn-tiny"
PROMPTS = range(4)


def expected(model_dir: Path) -> "np.lib.npyio.NpzFile":
    return np.load(model_dir / "expected.npz")


@pytest.mark.parametrize("i", PROMPTS)
def test_ouro_logits_and_gate_at_every_depth(i: int) -> None:
    values = expected(OURO)
    logits, gates = ouro.outputs_at_depths(OURO, values[f"prompt_{i}"].tolist())
    np.testing.assert_allclose(logits, values[f"logits_{i}"], atol=1e-4)
    np.testing.assert_allclose(gates, values[f"gate_logits_{i}"], atol=1e-4)


@pytest.mark.parametrize("i", PROMPTS)
def test_huginn_logits_and_convergence_at_every_depth(i: int) -> None:
    values = expected(HUGINN)
    steps = values["steps"]
    logits, distances = huginn.outputs_at_depths(HUGINN, values[f"prompt_{i}"].tolist(), int(steps.max()))
    np.testing.assert_allclose(logits[steps - 1], values[f"logits_{i}"], atol=1e-4)
    np.testing.assert_allclose(distances, values[f"convergence_{i}"], atol=1e-4)


@pytest.mark.parametrize("i", PROMPTS)
def test_ouro_greedy_tokens(i: int) -> None:
    """Full depth under last_exited is the depth-indexed cache: no plane is ever left empty."""
    values = expected(OURO)
    for layout in ("depth_indexed", "last_exited"):
        result = ouro.generate(OURO, values[f"prompt_{i}"].tolist(), 24, layout)
        assert result.tokens == values[f"greedy_full_depth_{i}"].tolist()
        assert result.depths == [4] * 24


@pytest.mark.parametrize("i", PROMPTS)
@pytest.mark.parametrize("layout", ["depth_indexed", "single"])
def test_huginn_greedy_tokens(layout: str, i: int) -> None:
    values = expected(HUGINN)
    result = huginn.generate(HUGINN, values[f"prompt_{i}"].tolist(), 24, layout)
    assert result.tokens == values[f"greedy_{layout}_{i}"].tolist()


def test_layouts_and_chunks_differ_where_they_should() -> None:
    """Chunk borders change ``single`` and ``first_then_shared`` and nothing else; so do the layouts among each other."""
    prompt = expected(OURO)["prompt_2"].tolist()
    for layout, changes in (("single", True), ("first_then_shared", True), ("last_exited", False)):
        whole = ouro.generate(OURO, prompt, 1, layout).logits[0]
        chunked = ouro.generate(OURO, prompt, 1, layout, chunk=8).logits[0]
        assert torch.allclose(whole, chunked, atol=1e-4) is not changes, layout


@pytest.mark.parametrize("gate", ["own", "delayed"])
def test_exit_depths_follow_the_definition(gate: str) -> None:
    """Depths equal those computed from the recorded gate values of a whole run: the oracle's gate is no circular proof.

    The first decode token of ``single``-free layouts sees only full-depth K/V, so its hazards are those of the prompt
    run with that token appended.
    """
    values = expected(OURO)
    for i in PROMPTS:
        prompt = values[f"prompt_{i}"].tolist()
        first = values[f"greedy_full_depth_{i}"][0]
        hazards = ouro.outputs_at_depths(OURO, [*prompt, int(first)])[1][:, -1].sigmoid().numpy()
        cumulated = 1 - np.cumprod(1 - hazards)
        for threshold in (0.05, 0.3, 0.6, 0.9):
            reached = [r for r in range(1, 5) if cumulated[r - 1] >= threshold]
            if gate == "own":
                depth = max(2, reached[0]) if reached else 4
            else:
                depth = min(4, reached[0] + 1) if reached else 4
            result = ouro.generate(OURO, prompt, 2, "last_exited", gate=gate, threshold=threshold)
            assert result.depths == [4, depth], (i, threshold)


def test_gates_give_several_depths_and_limits_hold() -> None:
    """On these weights the gates exit at different depths, so equality tests against the engine are not vacuous."""
    prompt = expected(OURO)["prompt_1"].tolist()
    free = ouro.generate(OURO, prompt, 16, "last_exited", gate="own", threshold=0.95)
    assert len(set(free.depths[1:])) >= 2
    bounded = ouro.generate(OURO, prompt, 16, "last_exited", gate="own", threshold=0.95, min_loops=3, max_loops=3)
    assert bounded.depths[1:] == [3] * 15
    assert ouro.generate(OURO, prompt, 6, "single", gate="own", threshold=1.0).depths == [4] * 6
    replayed = ouro.generate(OURO, prompt, 5, "last_exited", gate="replay", exit_depths=[2, 3, 1])
    assert replayed.depths == [4, 2, 3, 1, 4]
    prompt = expected(HUGINN)["prompt_0"].tolist()
    converged = huginn.generate(HUGINN, prompt, 16, "single", gate="convergence", threshold=0.5)
    assert len(set(converged.depths[1:])) >= 2
    assert min(converged.depths) >= 3
    assert min(huginn.generate(HUGINN, prompt, 4, "single", gate="own", threshold=9.0).depths[1:]) == 2


def test_early_exit_leaves_copies_that_later_tokens_see() -> None:
    """Without the copies of ``last_exited`` a later, deeper token would read zeros; its logits show the difference."""
    prompt = expected(OURO)["prompt_0"].tolist()
    shallow = ouro.generate(OURO, prompt, 3, "last_exited", gate="replay", exit_depths=[1, 4])
    holes = ouro.generate(OURO, prompt, 3, "depth_indexed", gate="replay", exit_depths=[1, 4])
    assert shallow.tokens[:2] == holes.tokens[:2]
    assert not torch.allclose(shallow.logits[2], holes.logits[2], atol=1e-3)
