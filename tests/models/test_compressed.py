"""Checkpoints in the format of compressed-tensors: what is read, and every scheme that is not, by field."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, DepthbatchError, ModelError
from depthbatch.common.messages import RequestParams
from depthbatch.deploy.cli.main import main
from depthbatch.worker.layers.int8 import Int8Weight, groups, int8_product, quantize
from depthbatch.worker.models import checkpoint
from depthbatch.worker.models.compressed import CompressedCheckpoint
from depthbatch.worker.models.loader import load_model, open_model_dir, read_spec, weight_bytes
from depthbatch.worker.models.tensor_parallel import TensorParallel
from fakes.lockstep import LockstepEngine
from reference.oracle import OURO, prompts_of

BYTES = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "actorder": None, "block_structure": None}
WEIGHTS = BYTES | {"strategy": "channel", "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
INPUTS = BYTES | {"strategy": "token", "dynamic": True, "observer": None}
FORMATS = {"W8A8": "int-quantized", "W8A16": "pack-quantized"}


def scheme(kind: str) -> dict[str, Any]:
    """What llm-compressor writes into config.json."""
    group = {
        "targets": ["Linear"],
        "weights": WEIGHTS,
        "input_activations": INPUTS if kind == "W8A8" else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "version": "0.9.0",
    }


def linear_names(model: Path) -> frozenset[str]:
    directory = open_model_dir(str(model))
    return directory.family.tensors(directory.config).linears


def write(target: Path, kind: str, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """The tiny Ouro quantised as ``kind``; ``change`` is given the scheme."""
    shutil.copytree(OURO, target, dirs_exist_ok=True)
    names, tensors = linear_names(OURO), load_file(OURO / "model.safetensors")
    for name in names:
        weight = tensors.pop(name)
        values, tensors[f"{name}_scale"], _ = quantize(weight, weight.shape[1])
        if kind == "W8A8":
            tensors[name] = values
            continue
        rows, columns = values.shape  # four bytes + 128 in a little-endian int32, the first lowest
        padded = np.full((rows, -(-columns // 4) * 4), 0, np.int64)
        padded[:, :columns] = values.numpy().astype(np.int64) + 128
        words = sum(padded[:, i::4] << (8 * i) for i in range(4))
        tensors[f"{name}_packed"] = torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))
        tensors[f"{name}_shape"] = torch.tensor([rows, columns])
    save_file(tensors, target / "model.safetensors")
    values_of = json.loads((target / "config.json").read_text())
    values_of["quantization_config"] = scheme(kind)
    if change is not None:
        change(values_of["quantization_config"])
    (target / "config.json").write_text(json.dumps(values_of))
    return target


def scores(model: Path, **options: object) -> list[bytes]:
    values = {"model": str(model), "max_num_seqs": 5, "kv_blocks": 60, "max_loops": 2} | options
    running = LockstepEngine(EngineConfig.from_values(values))
    requests = [
        (prompt, RequestParams(max_tokens=4, logprobs=True, min_loops=2, max_loops=2))
        for prompt in prompts_of(OURO)[:2]
    ]
    return [answer.scores for answer in running.run(requests)]


@pytest.fixture
def by_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quantised at load has a scale an output, as in these checkpoints, not one a group."""
    monkeypatch.setattr(checkpoint, "quantize", lambda weight: quantize(weight, weight.shape[1]))


@pytest.mark.usefixtures("by_output")
def test_w8a8_is_the_int8_of_our_own(tmp_path: Path) -> None:
    """Without an option: the checkpoint says it. The same bytes, made at load or stored, give the same bits."""
    model = write(tmp_path, "W8A8")
    assert read_spec(str(model)).quantization == "int8"
    assert scores(model) == scores(OURO, quantization="int8") != scores(OURO)
    tables = open_model_dir(str(OURO)).family.tensors(open_model_dir(str(OURO)).config)
    more = sum(4 * rows * (groups(columns) - 1) for rows, columns in map(tables.required.__getitem__, tables.linears))
    assert weight_bytes(str(model)) + more == weight_bytes(str(OURO), quantization="int8")


def test_a_family_without_linear_layers_is_not_told_to_run_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: 'int8' was reported of a checkpoint whose weights are made whole, for its family does not declare its layers."""
    model = write(tmp_path, "W8A8")
    family = open_model_dir(str(model)).family
    table = replace(family.tensors(open_model_dir(str(model)).config), linears=frozenset())
    monkeypatch.setattr(family, "tensors", lambda config: table)
    assert read_spec(str(model)).quantization is None
    with pytest.raises(ConfigError, match="do not say which tensors are linear"):
        read_spec(str(model), quantization="int8")


def test_info_tells_what_ranks_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: of a W8A8 checkpoint with ranks, whose weights are made whole, the one-rank model in int8 was described."""
    model = str(write(tmp_path, "W8A8"))
    said = []
    for options in ([], ["--tensor-parallel-size", "2"]):
        assert main(["info", model, "--device", "cpu", "--kv-blocks", "10", *options]) == 0
        said += [line for line in capsys.readouterr().out.splitlines() if line.startswith("weights")]
    assert said[0].endswith("MiB, int8 layers") and said[1].endswith("MiB on each of 2 ranks")
    for line, ranks in zip(said, (1, 2), strict=True):
        assert f" {weight_bytes(model, ranks=ranks) / 2**20:.1f} MiB" in line


def test_perplexity_does_not_compare_bytes_with_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: what a W8A8 checkpoint was called 'as stored' ran in int8, so that int8 looked as if it cost nothing."""
    model, text = str(write(tmp_path / "model", "W8A8")), tmp_path / "text.txt"
    text.write_text("a")
    assert main(["bench", "perplexity", model, "--text", str(text), "--device", "cpu", "--quantization", "int8"]) == 2
    assert "is stored and run in int8; there is nothing to compare it with" in capsys.readouterr().err


def test_stored_bytes_are_kept(tmp_path: Path) -> None:
    """Of a scheme that does not use the largest byte: quantised anew, the bytes would be others."""
    model = write(tmp_path, "W8A8")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    halved = tensors[name] // 2
    save_file(tensors | {name: halved}, model / "model.safetensors")
    product = load_model(str(model)).weights.core.blocks[0].down.product
    x = torch.randn(3, halved.shape[1])
    assert torch.equal(product(x), int8_product(x, Int8Weight(halved, tensors[f"{name}_scale"], halved.shape[1])))


def test_a_layer_is_of_one_kind(tmp_path: Path) -> None:
    """q, k and v run as one product; with int8 asked for, what is stored whole is quantised as well."""
    model, name = write(tmp_path, "W8A8"), "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(model / "model.safetensors")
    del tensors[f"{name}_scale"]
    save_file(tensors | {name: load_file(OURO / "model.safetensors")[name]}, model / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"q_proj\.weight' to '.*v_proj\.weight' run as one layer, but some are quantised"
    ):
        load_model(str(model))
    assert load_model(str(model), quantization="int8").spec.quantization == "int8"


@pytest.mark.usefixtures("by_output")
def test_w8a16_is_made_whole(tmp_path: Path) -> None:
    """Activations stay as they are: a model of the bytes times their scales. With the option they are quantised, too."""
    model, whole = write(tmp_path / "bytes", "W8A16"), tmp_path / "whole"
    shutil.copytree(OURO, whole)
    tensors = load_file(OURO / "model.safetensors")
    for name in linear_names(OURO):
        tensors[name] = quantize(tensors[name], tensors[name].shape[1]).whole()
    save_file(tensors, whole / "model.safetensors")
    assert read_spec(str(model)).quantization is None
    assert scores(model) == scores(whole)
    assert scores(model, quantization="int8") == scores(OURO, quantization="int8")


@pytest.mark.parametrize("kind", FORMATS)
def test_where_int8_does_not_run_weights_are_whole(tmp_path: Path, kind: str) -> None:
    """Ranks, other types and GPUs get the weights that the bytes stand for, each rank its share."""
    model = write(tmp_path, kind)
    stored, table = CompressedCheckpoint(model), open_model_dir(str(model)).family.tensors
    name = min(linear_names(OURO))
    split, parallel = table(open_model_dir(str(model)).config).splits[name], TensorParallel(1, 2)
    assert torch.equal(stored.tensor(name, split, parallel), split.cut(stored.tensor(name), parallel))
    assert stored.shape(name) == stored.tensor(name).shape == load_file(OURO / "model.safetensors")[name].shape
    assert read_spec(str(model), ranks=2).quantization is None
    assert read_spec(str(model), dtype="float16").quantization is None
    assert read_spec(str(model), device="cuda").quantization is None
    total: list[tuple[int, int]] = []
    load_model(str(model), parallel=parallel, progress=lambda done, of: total.append((done, of)))
    assert total[-1][0] == total[-1][1]


def group(quantization: dict[str, Any]) -> dict[str, Any]:
    only: dict[str, Any] = quantization["config_groups"]["group_0"]
    return only


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q: q.update(quant_method="gptq"), "'quant_method' = 'gptq'"),
        (lambda q: q.update(format="marlin-24"), "'format' = 'marlin-24'"),
        (lambda q: q.update(kv_cache_scheme={"num_bits": 8}), "'kv_cache_scheme'"),
        (lambda q: q.update(sparsity_config={"format": "sparse-24"}), "'sparsity_config'"),
        (lambda q: q.update(transform_config={"r1": {}}), "'transform_config'"),
        (lambda q: q.update(config_groups={}), "config_groups: holds no group"),
        (lambda q: q.update(config_groups=[]), "'config_groups' must be an object"),
        (lambda q: group(q).update(weights=WEIGHTS | {"num_bits": 4}), "weights: 'num_bits' = 4"),
        (lambda q: group(q).update(weights=WEIGHTS | {"type": "float"}), "weights: 'type' = 'float'"),
        (lambda q: group(q).update(weights=WEIGHTS | {"symmetric": False}), "weights: 'symmetric' = False"),
        (lambda q: group(q).update(weights=WEIGHTS | {"strategy": "group"}), "weights: 'strategy' = 'group'"),
        (lambda q: group(q).update(weights=WEIGHTS | {"group_size": 128}), "weights: 'group_size' = 128"),
        (lambda q: group(q).update(weights=WEIGHTS | {"actorder": "group"}), "weights: 'actorder' = 'group'"),
        (lambda q: group(q).update(output_activations=INPUTS), "'output_activations'"),
        (
            lambda q: group(q).update(input_activations=INPUTS | {"dynamic": False}),
            "input_activations: 'dynamic' = False",
        ),
        (lambda q: group(q).update(input_activations=INPUTS | {"strategy": "tensor"}), "'strategy' = 'tensor'"),
        (lambda q: group(q).update(input_activations=INPUTS | {"symmetric": False}), "'symmetric' = False"),
        (lambda q: group(q).update(rotation="hadamard"), "group_0: 'rotation' = 'hadamard'"),
        (
            lambda q: q["config_groups"].update(group_1=group(q) | {"input_activations": None}),
            "some groups quantise activations and some do not",
        ),
    ],
)
def test_other_schemes_are_refused_by_field(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    """Bug: a config's quantization was not looked at, and its tensors failed one by one by their names."""
    shutil.copytree(OURO, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = json.loads(json.dumps(scheme("W8A8")))
    change(values["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError) as caught:
        open_model_dir(str(tmp_path))
    assert said in str(caught.value) and "quantization_config" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "suffix", "tensor", "said"),
    [
        ("W8A8", "", torch.zeros(64, 64), r"torch\.float32 \[64, 64\], expected int8"),
        ("W8A8", "", None, "neither"),
        ("W8A8", "_scale", torch.ones(3, 1), r"torch\.float32 \[3, 1\], expected floats \[\d+, 1\]"),
        ("W8A8", "_scale", "nan", "holds NaN or infinite values"),
        ("W8A8", "_scale", None, "expected floats"),
        ("W8A16", "_packed", torch.zeros(64, 3, dtype=torch.int32), r"expected int32 \[\d+, \d+\]"),
        ("W8A16", "_shape", None, "_shape' is missing"),
        ("W8A16", "_shape", torch.tensor(5), r"torch\.int64 \[\], expected int \[2\]"),  # these two were a TypeError
        ("W8A16", "_shape", torch.tensor([64.0, 64.0]), r"torch\.float32 \[2\], expected int \[2\]"),
    ],
)
def test_broken_files_are_one_line(
    tmp_path: Path, kind: str, suffix: str, tensor: torch.Tensor | str | None, said: str
) -> None:
    """A part that is missing, or does not fit the others, is named."""
    model = write(tmp_path, kind)
    tensors = load_file(model / "model.safetensors")
    name = next(n for n in sorted(linear_names(OURO)) if "q_proj" in n) + suffix
    old = tensors.pop(name)
    if isinstance(tensor, torch.Tensor):
        tensors[name] = tensor
    elif tensor == "nan":
        tensors[name] = torch.full_like(old, torch.nan)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(DepthbatchError, match=said) as caught:
        load_model(str(model))
    assert "\n" not in str(caught.value)
