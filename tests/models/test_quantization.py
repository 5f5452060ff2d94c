"""Quantised weights from a model directory: which tensors, what they take, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.deploy.cli.main import main
from depthbatch.worker import device
from depthbatch.worker.layers.int8 import groups
from depthbatch.worker.layers.linear import GatedLinear, Linear, PackedInt8Product
from depthbatch.worker.models.loader import load_model, open_model_dir, weight_bytes
from reference.oracle import DORY, HUGINN, OURO, RETROFITTED

FAMILIES = [OURO, HUGINN, DORY, *RETROFITTED]


def linears(owner: object) -> list[Linear | GatedLinear]:
    """All linear layers in the dataclasses of a model."""
    if isinstance(owner, Linear | GatedLinear):
        return [owner]
    if isinstance(owner, tuple):
        return [layer for part in owner for layer in linears(part)]
    if dataclasses.is_dataclass(owner):
        return [layer for field in dataclasses.fields(owner) for layer in linears(getattr(owner, field.name))]
    return []


@pytest.mark.parametrize("model", FAMILIES, ids=lambda path: path.name)
def test_all_blocks_and_nothing_else(model: Path) -> None:
    """Four products a block, whichever family; head, adapter and embedding keep their type."""
    loaded = load_model(str(model), quantization="int8")
    spec, found = loaded.spec, linears(loaded.weights)
    int8 = [layer for layer in found if isinstance(layer.product, PackedInt8Product)]
    assert len(int8) == 4 * (spec.prelude_layers + spec.core_layers + spec.coda_layers) == len(found) - 1
    assert not isinstance(loaded.weights.head.product, PackedInt8Product)


def test_a_byte_a_weight_and_a_scale_a_group() -> None:
    """What is counted before loading, for the plan of the memory; and what the layers then hold, padding apart: 0.516
    of bf16 at most where layers are as wide as 512."""
    directory = open_model_dir(str(OURO))
    table = directory.family.tensors(directory.config)
    shapes = [table.required[name] for name in table.linears]
    saved = sum(3 * rows * columns - 4 * rows * groups(columns) for rows, columns in shapes)  # fp32 to a byte
    assert weight_bytes(str(OURO)) - weight_bytes(str(OURO), quantization="int8") == saved
    product = PackedInt8Product(*_quantised(1024, 512))
    assert product.packed.values.nbytes + product.packed.scales.nbytes <= 0.516 * 2 * 1024 * 512


def _quantised(rows: int, columns: int) -> tuple[object, ...]:
    from depthbatch.worker.layers.cpu.library import load_kernels
    from depthbatch.worker.layers.int8 import quantize

    kernels = load_kernels("auto")
    if kernels is None:
        pytest.skip("no C compiler")
    return quantize(torch.randn(rows, columns)), kernels


def test_what_cannot_be_quantised_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="quantization int8 is for one rank, not for tensor_parallel_size 2"):
        EngineConfig(quantization="int8", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="quantization int8: a simulated device has no weights"):
        EngineConfig(quantization="int8", device="simulated:h100-ouro-1.4b")
    with pytest.raises(ConfigError, match="quantization must be one of int8, not 'int4'"):
        EngineConfig(quantization="int4")
    with pytest.raises(ConfigError, match="quantization int8 needs dtype bfloat16 or float32, not float16"):
        load_model(str(OURO), dtype="float16", quantization="int8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="quantization int8 needs device cpu"):
        device.resolve_device("auto", quantization="int8")
    assert main(["info", str(OURO), "--quantization", "int8"]) == 2
    assert "quantization int8 needs device cpu" in capsys.readouterr().err


def test_a_family_that_does_not_know_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's family: without declared layers the option is refused; one that declares them and takes them as plain
    tensors would ignore it, which is an error, too."""
    family = open_model_dir(str(OURO)).family
    tensors = family.tensors
    with monkeypatch.context() as patch:
        patch.setattr(family, "tensors", lambda config: dataclasses.replace(tensors(config), linears=frozenset()))
        with pytest.raises(ConfigError, match="quantization int8: ouro models do not say which tensors are linear"):
            weight_bytes(str(OURO), quantization="int8")
    also = frozenset({"model.norm.weight"})
    with monkeypatch.context() as patch:
        patch.setattr(family, "tensors", lambda config: dataclasses.replace(tensors(config), linears=also))
        with pytest.raises(ModelError, match=r"does not take 'model\.norm\.weight' as a linear layer"):
            load_model(str(OURO), quantization="int8")
