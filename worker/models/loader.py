"""From a name or directory to a model on a device: config.json and *.safetensors only, never remote code.

Checks everything a file can get wrong before any weight is used; each failure is a ModelError of one line that names
the file, tensor or field. Knows no architecture: ``models.registry`` finds the family, the family says what it needs.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from depthbatch.common.config import DTYPE_NAMES, LOAD_FORMATS, STATE_INITS
from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.worker.layers.int8 import SCALE_BYTES, Weight, groups
from depthbatch.worker.models.checkpoint import (
    Checkpoint,
    CheckpointSource,
    DummySource,
    Progress,
    check_names_and_shapes,
    no_progress,
    read_json,
)
from depthbatch.worker.models.compressed import CompressedCheckpoint, quantizes_activations
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import BuildInputs, ModelFamily, SpecOptions, TensorTable
from depthbatch.worker.models.interface import LoopedModel, ModelSpec
from depthbatch.worker.models.registry import find_family
from depthbatch.worker.models.tensor_parallel import ONE_RANK, TensorParallel, degrees, spelt

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
INT8_TYPES = (torch.bfloat16, torch.float32)  # of activations that are quantised


@dataclass(frozen=True)
class ModelDir:
    """A resolved model directory with its parsed config and family."""

    path: Path
    config: ConfigReader
    family: ModelFamily
    dummy: bool  # weights are made up, not read
    bytes_of_inputs: bool | None  # of a checkpoint that is quantised: whether inputs of layers are, too
    gate_weights: Path | None = None  # a gate file or a directory of such, before those beside the model

    def checkpoint(self) -> Checkpoint:
        """Its weights. Raises ModelError."""
        return Checkpoint(self.path) if self.bytes_of_inputs is None else CompressedCheckpoint(self.path)

    def side_files(self) -> dict[str, Path]:
        """The gate files that its family can use, by name. Raises ModelError or ConfigError for ``gate_weights``."""
        known = self.family.side_tensors(self.config)
        files = _gate_files(self.path, known)
        if self.gate_weights is None:
            return files
        return files | _given_gates(self.gate_weights, known, self.family.name)


def _gate_files(directory: Path, known: Collection[str]) -> dict[str, Path]:
    paths = {name: directory / f"{name}.safetensors" for name in known}
    return {name: path for name, path in paths.items() if path.is_file()}


def _given_gates(given: Path, known: Collection[str], family: str) -> dict[str, Path]:
    """What --gate-weights names; a file says its kind itself."""
    if given.is_dir():
        if files := _gate_files(given, known):
            return files
        names = ", ".join(f"{name}.safetensors" for name in known) or f"{family} models take none"
        raise ConfigError(f"gate_weights: {given} holds no gate file ({names})")
    if not given.is_file():
        raise ConfigError(f"gate_weights: there is no {given}")
    kind = Checkpoint(given.parent, (given,)).metadata(given).get("kind")
    if f"{kind}_gate" not in known:
        takes = " or ".join(name.removesuffix("_gate") for name in known) or "none"
        raise ConfigError(f"gate_weights: {given} is a gate of kind {kind!r}; {family} models take {takes}")
    return {f"{kind}_gate": given}


def open_model_dir(name: str, load_format: str = "auto", gate_weights: str | None = None) -> ModelDir:
    """Resolves a name, reads its config.json and finds its family; weights are not touched."""
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format '{load_format}' is not one of {', '.join(LOAD_FORMATS)}")
    path = resolve_model_dir(name)
    config = ConfigReader(read_json(path / "config.json"), str(path / "config.json"))
    family = find_family(config)
    by_tokenizer = _tokenizer_eos_ids(path, config.values.get("vocab_size"))
    if family.eos_of_tokenizer:
        config.values["eos_token_id"] = by_tokenizer
    else:
        generation = _json_if_there(path / "generation_config.json")
        config.values["eos_token_id"] = _merge_ids(
            config.values.get("eos_token_id"), generation.get("eos_token_id"), by_tokenizer
        )
    gates = None if gate_weights is None else Path(gate_weights).expanduser()
    return ModelDir(path, config, family, load_format == "dummy", quantizes_activations(config), gates)


def _json_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _tokenizer_eos_ids(path: Path, vocab_size: object) -> list[int]:
    """The id of the tokenizer's ``eos_token``, by its own files; none where there is no tokenizer.json. One that no row of
    the model stands for cannot come."""
    settings = _json_if_there(path / "special_tokens_map.json")
    settings |= {k: v for k, v in _json_if_there(path / "tokenizer_config.json").items() if v is not None}
    eos = settings.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text is None:
        return []
    tokenizer = _json_if_there(path / "tokenizer.json")
    ids = [token["id"] for token in tokenizer.get("added_tokens") or [] if token.get("content") == text]
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if not ids and isinstance(vocab, dict) and text in vocab:
        ids = [vocab[text]]
    return [token for token in ids if not isinstance(vocab_size, int) or token < vocab_size]


def _merge_ids(*values: object) -> list[object]:
    """The files' end-of-sequence ids as one list; null entries dropped."""
    merged: list[object] = []
    for value in values:
        merged += value if isinstance(value, list) else [] if value is None else [value]
    return list(dict.fromkeys(merged))


def resolve_dtype(model_dir: ModelDir, dtype: str) -> torch.dtype:
    """The dtype of weights and KV. 'auto' is the config's, or that of the first stored tensor.

    Raises ConfigError for an unknown option, ModelError when 'auto' finds any other type.
    """
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigError(f"dtype '{dtype}' is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    config = model_dir.config
    stored = config.values.get("dtype") or config.values.get("torch_dtype")
    if stored is None:
        stored = "float32" if model_dir.dummy else model_dir.checkpoint().first_dtype()
    if not isinstance(stored, str) or stored.removeprefix("torch.") not in DTYPES:
        raise config.fail(f"the model's dtype {stored!r} is not supported; choose --dtype {' or '.join(DTYPES)}")
    return DTYPES[stored.removeprefix("torch.")]


def read_spec(
    path_or_name: str,
    dtype: str = "auto",
    load_format: str = "auto",
    r_max: int | None = None,
    ranks: int = 1,
    quantization: str | None = None,
    device: str | torch.device = "cpu",
    gate_weights: str | None = None,
) -> ModelSpec:
    """The facts of a model, or of one rank's share of it, without loading weights. Raises ModelError, or ConfigError for
    a bad option."""
    model_dir = open_model_dir(path_or_name, load_format, gate_weights)
    return _spec(model_dir, dtype, r_max, ranks, quantization, torch.device(device))


def weight_bytes(
    path_or_name: str,
    dtype: str = "auto",
    load_format: str = "auto",
    r_max: int | None = None,
    ranks: int = 1,
    quantization: str | None = None,
    device: str | torch.device = "cpu",
) -> int:
    """Bytes of one rank's weights, gate files apart. Raises like ``read_spec``."""
    model_dir = open_model_dir(path_or_name, load_format)
    spec = _spec(model_dir, dtype, r_max, ranks, quantization, torch.device(device))
    table = model_dir.family.tensors(model_dir.config)
    int8 = _int8_layers(model_dir, spec, table, quantization)
    stored = model_dir.checkpoint().quantized if int8 and not model_dir.dummy else frozenset()

    def size(name: str, shape: tuple[int, ...]) -> int:
        count = math.prod(shape)
        if name in int8:
            return count + shape[0] * (1 if name in stored else groups(shape[1])) * SCALE_BYTES
        return (-(-count // ranks) if name in table.splits else count) * spec.dtype.itemsize

    return sum(size(name, shape) for name, shape in table.required.items())


def _resolve_quantization(
    model_dir: ModelDir, asked: str | None, dtype: torch.dtype, ranks: int, device: torch.device
) -> str | None:
    """What layers run as: as it is asked for, else as the checkpoint has it where that can run; elsewhere its weights are
    made whole. Raises ConfigError."""
    can = device.type == "cpu" and ranks == 1 and dtype in INT8_TYPES
    linears = model_dir.family.tensors(model_dir.config).linears
    if asked is None:
        return "int8" if model_dir.bytes_of_inputs and can and linears else None
    if dtype not in INT8_TYPES:
        types = " or ".join(str(one).removeprefix("torch.") for one in INT8_TYPES)
        raise ConfigError(f"quantization {asked} needs dtype {types}, not {str(dtype).removeprefix('torch.')}")
    if not linears:
        name = model_dir.family.name
        raise ConfigError(f"quantization {asked}: {name} models do not say which tensors are linear layers")
    return asked


def _int8_layers(model_dir: ModelDir, spec: ModelSpec, table: TensorTable, asked: str | None) -> frozenset[str]:
    """The tensors that run in int8: all linear layers where it is asked for, else those that the checkpoint has so."""
    if spec.quantization is None:
        return frozenset()
    if asked is not None or model_dir.dummy:
        return table.linears
    return table.linears & model_dir.checkpoint().quantized


def rank_counts(model_dir: ModelDir) -> tuple[int, ...]:
    """Numbers of ranks that can share a model, ascending. Raises ModelError."""
    table = model_dir.family.tensors(model_dir.config)
    if table.of_one_rank and not model_dir.dummy and table.of_one_rank & model_dir.checkpoint().file_of.keys():
        return (1,)
    return degrees(table.splits.values())


def _spec(
    model_dir: ModelDir, dtype: str, r_max: int | None, ranks: int, quantization: str | None, device: torch.device
) -> ModelSpec:
    options = SpecOptions(resolve_dtype(model_dir, dtype), r_max, frozenset(model_dir.side_files()))
    spec = model_dir.family.spec(model_dir.config, options)
    if ranks > 1 and ranks not in (known := rank_counts(model_dir)):
        raise ConfigError(f"tensor_parallel_size {ranks}: this {spec.architecture} model runs on {spelt(known)}")
    resolved = _resolve_quantization(model_dir, quantization, spec.dtype, ranks, device)
    return replace(spec.of_a_rank(ranks), quantization=resolved)


def load_model(
    path_or_name: str,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    r_max: int | None = None,
    state_init: str = "zero",
    parallel: TensorParallel = ONE_RANK,
    progress: Progress = no_progress,
    gate_weights: str | None = None,
    quantization: str | None = None,
) -> LoopedModel:
    """A model with its weights on ``device``.

    Args:
        path_or_name: see ``resolve_model_dir``.
        dtype: auto, float32, bfloat16 or float16; auto is the checkpoint's.
        device: a torch device.
        load_format: 'dummy' makes weights from config.json and ``seed`` alone.
        seed: of dummy weights.
        r_max: loops of a full-depth token; None is the model's own.
        state_init: 'zero' or 'seeded', for models with a recurrent state of their own.
        parallel: the rank whose share is loaded.
        progress: told of the bytes of weights that are read, and of how many there are.
        gate_weights: a gate file, or a directory of such, before those beside the model.
        quantization: 'int8' keeps the layers' weights in a byte each; for the CPU and one rank.

    Raises ModelError for anything wrong with the directory, ConfigError for a bad option.
    """
    if state_init not in STATE_INITS:
        raise ConfigError(f"state_init '{state_init}' is not one of {', '.join(STATE_INITS)}")
    model_dir = open_model_dir(path_or_name, load_format, gate_weights)
    device = torch.device(device)
    spec = _spec(model_dir, dtype, r_max, parallel.size, quantization, device)
    table = model_dir.family.tensors(model_dir.config)
    source: DummySource | CheckpointSource
    if model_dir.dummy:
        optional: frozenset[str] = frozenset()
        source = DummySource(table, spec.dtype, device, seed, parallel)
    else:
        checkpoint = model_dir.checkpoint()
        optional = check_names_and_shapes(checkpoint, table)
        source = CheckpointSource(checkpoint, spec.dtype, device, table.splits, parallel, progress)
    tables = model_dir.family.side_tensors(model_dir.config)
    family = model_dir.family.name
    side = {name: _side_tensors(path, tables[name], family, device) for name, path in model_dir.side_files().items()}
    int8, taken = _int8_layers(model_dir, spec, table, quantization), set()

    def take_linear(name: str) -> Weight:
        taken.add(name)
        return source.take_int8(name) if name in int8 else source.take(name)

    inputs = BuildInputs(source.take, take_linear, optional, side, device, state_init, parallel)
    model = model_dir.family.build(model_dir.config, spec, inputs)
    if forgotten := int8 - taken:
        raise ModelError(f"{spec.architecture} does not take '{min(forgotten)}' as a linear layer: it is not quantised")
    return model


def _side_tensors(path: Path, table: TensorTable, family: str, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a gate file, fp32 whatever the model's type: gates decide in fp32. Its metadata name kind and family
    (training/train_gate.py); files of others that do not are taken."""
    checkpoint = Checkpoint(path.parent, (path,))
    if (of := checkpoint.metadata(path).get("family", family)) != family:
        raise ModelError(f"{path} is a gate of a model of the family {of}, this one is {family}")
    check_names_and_shapes(checkpoint, table)
    source = CheckpointSource(checkpoint, torch.float32, device)
    return {name: source.take(name) for name in table.required}
