"""Reading and writing model directories in the exact public formats.

An exported directory holds `config.json`, `model.safetensors` (bf16), `tokenizer.json` and
`tokenizer_config.json`: what the engine, or anything else that knows the public format, loads.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from depthbatch.common.errors import ModelError
from depthbatch.training.demo_tokenizer import END_OF_TEXT, IM_END, save_tokenizer
from depthbatch.training.huginn import HuginnSize, HuginnTrainer
from depthbatch.training.ouro import OuroSize, OuroTrainer

DEMO_THRESHOLD = 0.95
DEMO_HUGINN_THRESHOLD = 0.5
"""Exit thresholds written to the demos' `config.json`, so that they leave early when not told otherwise."""
Size = TypeVar("Size", OuroSize, HuginnSize)


def ouro_config(size: OuroSize) -> dict[str, Any]:
    """The `config.json` of an Ouro model of these sizes."""
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "torch_dtype": "float32",
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": [END_OF_TEXT, IM_END],
        "pad_token_id": END_OF_TEXT,
        "hidden_act": "silu",
        "num_key_value_heads": size.num_attention_heads,
        "head_dim": size.hidden_size // size.num_attention_heads,
        "early_exit_threshold": DEMO_THRESHOLD,
        "tie_word_embeddings": False,
        **dataclasses.asdict(size),
    }


def huginn_config(size: HuginnSize) -> dict[str, Any]:
    """The `config.json` of a Huginn model of these sizes."""
    return {
        "architectures": ["RavenForCausalLM"],
        "model_type": "huginn_raven",
        "torch_dtype": "float32",
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": [END_OF_TEXT, IM_END],
        "pad_token_id": END_OF_TEXT,
        "n_layers": size.n_layers_in_prelude + size.n_layers_in_recurrent_block + size.n_layers_in_coda,
        "padding_multiple": 8,
        "tie_embeddings": True,
        "bias": False,
        "block_class_name": "SandwichBlock",
        "norm_class_name": "RMSNorm_llama",
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "state_init": "like-init",
        "injection_type": "linear",
        "qk_bias": True,
        "early_exit_threshold": DEMO_HUGINN_THRESHOLD,
        **dataclasses.asdict(size),
    }


def export(model: OuroTrainer | HuginnTrainer, directory: Path) -> None:
    """Write the model directory: bf16 weights under the public keys, configuration, tokenizer.

    Args:
        model: the trained model.
        directory: created when missing; files in it are replaced one by one, each atomically.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(model, OuroTrainer):
        config, positions = ouro_config(model.size), model.size.max_position_embeddings
    else:
        config, positions = huginn_config(model.size), model.size.block_size
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    partial = directory / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # the library writes 0600, which another user of an installed package cannot read
    os.replace(partial, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_tokenizer(directory, positions)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return config


def _size_of(size_class: type[Size], config: dict[str, Any], path: Path) -> Size:
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(size_class):
        if field.name in config:
            fields[field.name] = config[field.name]
        elif field.default is dataclasses.MISSING:
            raise ModelError(f"{path / 'config.json'} lacks {field.name}")
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope and size_class is OuroSize:
        fields["rope_theta"] = rope["rope_theta"]
    return size_class(**fields)


def _load_weights(model: nn.Module, directory: Path) -> None:
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{directory} holds no model*.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {file}: {error}") from None
    wanted = model.state_dict()
    for name, value in wanted.items():
        if name not in tensors:
            raise ModelError(f"{directory} lacks the tensor {name}")
        if tensors[name].shape != value.shape:
            raise ModelError(f"{name} in {directory} is {list(tensors[name].shape)}, expected {list(value.shape)}")
    model.load_state_dict({name: tensors[name] for name in wanted})


def load_ouro(directory: Path) -> OuroTrainer:
    """Load an Ouro model directory in fp32.

    Raises:
        ModelError: the directory is missing, incomplete, inconsistent or another architecture.
    """
    config = _read_config(directory)
    if config.get("model_type") != "ouro":
        raise ModelError(f"{directory} is a {config.get('model_type')!r} model; exit gates need an Ouro model")
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int):
        if config.get("num_key_value_heads", heads) != heads:
            raise ModelError(f"{directory}: grouped-query attention is not supported")
        if config.get("head_dim", width // heads) * heads != width:
            raise ModelError(f"{directory}: head_dim times heads is not hidden_size")
    model = OuroTrainer(_size_of(OuroSize, config, directory))
    _load_weights(model, directory)
    return model


def load_huginn(directory: Path) -> HuginnTrainer:
    """Load a Huginn model directory in fp32; errors as for `load_ouro`."""
    config = _read_config(directory)
    if config.get("model_type") != "huginn_raven":
        raise ModelError(f"{directory} is a {config.get('model_type')!r} model, not a Huginn model")
    model = HuginnTrainer(_size_of(HuginnSize, config, directory))
    _load_weights(model, directory)
    return model
