"""Gate files that lie elsewhere than beside the model: found by kind, and refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.gates import Gate
from depthbatch.worker.models.loader import load_model, read_spec
from fakes.checkpoints import (
    FIDELITY,
    HUGINN_TINY,
    OURO_TINY,
    tiny_config,
    write_checkpoint,
    write_lookahead_gate,
    write_preloop_gate,
)


def test_gate_weights_come_from_anywhere(tmp_path: Path) -> None:
    """A file, whatever its name, or a directory; before a file of its kind beside the model, not instead of the others."""
    model, there = tmp_path / "model", tmp_path / "there"
    for path in (model, there):
        path.mkdir()
    config = tiny_config(OURO_TINY)
    write_checkpoint(model, config)
    write_preloop_gate(model, config["hidden_size"], config["total_ut_steps"])
    assert Gate.LOOKAHEAD not in read_spec(str(model)).gates
    write_lookahead_gate(there, config["hidden_size"], seed=3)
    own = there.joinpath("lookahead_gate.safetensors").rename(there / "mine.safetensors")
    spec = read_spec(str(model), gate_weights=str(own))
    assert (spec.default_gate, spec.gates[-2:]) == (Gate.LOOKAHEAD, (Gate.LOOKAHEAD, Gate.PRELOOP))
    item = (torch.randn(3, config["hidden_size"], generator=torch.Generator().manual_seed(0)),)
    write_lookahead_gate(model, config["hidden_size"], seed=4)
    beside, given = load_model(str(model)), load_model(str(model), gate_weights=str(own))
    expected = item[0] @ load_file(own)["weight"].flatten() + 0.2
    torch.testing.assert_close(given.lookahead_logit(item), expected)
    assert not torch.allclose(beside.lookahead_logit(item), expected)
    own.rename(there / "lookahead_gate.safetensors")
    from_directory = load_model(str(model), gate_weights=str(there))
    torch.testing.assert_close(from_directory.lookahead_logit(item), expected)


def test_bad_gate_weights_are_named(tmp_path: Path) -> None:
    """A file of another shape, of a kind the family does not take, of none, and what is not there. Bug: a gate of another family
    of the same width was taken."""
    model = tmp_path / "model"
    model.mkdir()
    write_checkpoint(model, tiny_config(OURO_TINY))
    write_lookahead_gate(tmp_path, 7)
    file = tmp_path / "lookahead_gate.safetensors"
    with pytest.raises(ModelError, match=r"lookahead_gate.*'weight' has shape \[1, 7\]"):
        load_model(str(model), gate_weights=str(file))
    with pytest.raises(ConfigError, match=r"gate_weights: there is no .*nowhere"):
        read_spec(str(model), gate_weights=str(tmp_path / "nowhere"))
    with pytest.raises(
        ConfigError, match=r"gate_weights: .* holds no gate file \(lookahead_gate\.safetensors, preloop"
    ):
        read_spec(str(model), gate_weights=str(model))
    save_file({"weight": torch.zeros(1, 7)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="of kind None; ouro models take lookahead or preloop"):
        read_spec(str(model), gate_weights=str(tmp_path / "other.safetensors"))
    width = tiny_config(OURO_TINY)["hidden_size"]
    for family, refused in (("huginn", True), ("ouro", False)):
        metadata = {"kind": "lookahead", "family": family}
        save_file({"weight": torch.zeros(1, width), "bias": torch.zeros(1)}, file, metadata)
        if refused:
            with pytest.raises(ModelError, match=f"{file} is a gate of a model of the family huginn, this one is ouro"):
                load_model(str(model), gate_weights=str(file))
        else:
            assert Gate.LOOKAHEAD in load_model(str(model), gate_weights=str(file)).spec.gates
    nanbeige = FIDELITY / "nanbeige-tiny"
    with pytest.raises(ConfigError, match="of kind 'lookahead'; nanbeige models take none"):
        read_spec(str(nanbeige), gate_weights=str(file))


def test_full_depth_is_all_loops_that_are_run(tmp_path: Path) -> None:
    """Bug: with --max-loops beyond the depths that a pre-loop head tells apart, a threshold of 1 ended at the head's last."""
    config = tiny_config(HUGINN_TINY) | {"mean_recurrence": 4}
    write_checkpoint(tmp_path, config)
    write_preloop_gate(tmp_path, config["n_embd"], 4)
    for loops in (4, 7):
        model = load_model(str(tmp_path), r_max=loops)
        states = torch.randn(3, config["n_embd"], generator=torch.Generator().manual_seed(1))
        item = (torch.zeros(3, config["n_embd"]), states)
        depths = model.preloop_depth(item, torch.tensor([1.0, 1.5, 1e-6]))
        assert depths[:2].tolist() == [loops, loops] and depths[2] < 4 and depths.dtype is torch.int32
