"""Reading and writing model directories in the exact public formats.

An exported directory holds ``config.json``, ``model.safetensors`` (bf16), ``tokenizer.json`` and
``tokenizer_config.json``: what the engine, or anything else that knows the public format, loads.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from depthbatch.common.errors import ModelError
from depthbatch.training.demo_tokenizer import END_OF_TEXT, IM_END, save_tokenizer
from depthbatch.training.huginn import HuginnSize, HuginnTrainer
from depthbatch.training.ouro import OuroSize, OuroTrainer
from depthbatch.training.retrofitted import RetrofittedTrainer
from depthbatch.worker.models.checkpoint import CheckpointSource, check_names_and_shapes
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.loader import ModelDir, open_model_dir, read_spec, resolve_dtype
from depthbatch.worker.models.retrofitted import RetrofittedFamily

DEMO_THRESHOLD = 0.95
DEMO_HUGINN_THRESHOLD = 0.5
"""Exit thresholds written to the demos' ``config.json``, so that they leave early when not told otherwise."""
Size = TypeVar("Size", OuroSize, HuginnSize)


def ouro_config(size: OuroSize) -> dict[str, Any]:
    """The ``config.json`` of an Ouro model of these sizes."""
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
    """The ``config.json`` of a Huginn model of these sizes."""
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

    ``model``: the trained model.
    ``directory``: created when missing; files in it are replaced one by one, each atomically.
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


def _open(name: str, family: str) -> ModelDir:
    """A checked model directory of a family. Raises ModelError."""
    model_dir = open_model_dir(name)
    if model_dir.family.name != family:
        wanted = "exit gates are trained for Ouro and Huginn models" if family == "ouro" else "not a Huginn model"
        raise ModelError(f"{model_dir.path} is a {model_dir.config.values.get('model_type')!r} model; {wanted}")
    read_spec(name)
    return model_dir


def _sizes(size_class: type[Size], config: ConfigReader) -> Size:
    """The fields that a config has; the others keep their defaults."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(size_class):
        if field.name in ("rope_theta", "rope_base"):
            fields[field.name] = config.rope(field.name, interleaved=False).base
        elif config.has(field.name):
            fields[field.name] = config.number(field.name) if field.type == "float" else config.values[field.name]
        elif field.default is dataclasses.MISSING:
            raise config.fail(f"missing field '{field.name}'")
    return size_class(**fields)


def _load_weights(model: nn.Module, model_dir: ModelDir) -> frozenset[str]:
    """Checked as the engine checks them; fp32. Which optional tensors there are."""
    checkpoint = model_dir.checkpoint()
    optional = check_names_and_shapes(checkpoint, model_dir.family.tensors(model_dir.config))
    source = CheckpointSource(checkpoint, torch.float32, torch.device("cpu"))
    model.load_state_dict({name: source.take(name) for name in model.state_dict()})
    return optional


def load_ouro(name: str | Path) -> OuroTrainer:
    """An Ouro model directory, by path or name, in fp32.

    Raises ModelError when it is missing, incomplete, inconsistent, another architecture, or has grouped-query attention.
    """
    model_dir = _open(str(name), "ouro")
    config = model_dir.config
    heads, width = config.integer("num_attention_heads"), config.integer("hidden_size")
    if config.values.get("num_key_value_heads", heads) != heads:
        raise ModelError(f"{model_dir.path}: grouped-query attention is not supported")
    if config.values.get("head_dim", width // heads) * heads != width:
        raise ModelError(f"{model_dir.path}: head_dim times heads is not hidden_size")
    model = OuroTrainer(_sizes(OuroSize, config))
    _load_weights(model, model_dir)
    return model


def load_retrofitted(name: str | Path) -> tuple[RetrofittedTrainer, torch.dtype]:
    """A retrofitted model directory with Llama blocks in fp32, its state starting at zero, and the type it is stored in.
    Raises ModelError as ``load_ouro``, for OLMo blocks, whose q and k are normed, and for quantised weights."""
    model_dir = open_model_dir(str(name))
    if not isinstance(model_dir.family, RetrofittedFamily):
        kind = model_dir.family.name
        raise ModelError(
            f"{model_dir.path} is of the family {kind}; loops are trained of what depthbatch convert writes"
        )
    config, plan = model_dir.config, model_dir.family.plan(model_dir.config)
    config.expect("initial_state_mode", ("random",), optional=True)
    config.refuse("quantization_config")
    scale = ConfigReader(config.values.get("init_values") or {}, f"{config.path}: init_values").number("embed_scale")
    model = RetrofittedTrainer(plan, scale)
    if plan.tied or _load_weights(model, model_dir):
        raise config.fail("only Llama blocks (no q and k norms) and a head of its own can be trained")
    return model, resolve_dtype(model_dir, "auto")


def load_huginn(name: str | Path) -> HuginnTrainer:
    """A Huginn model directory, by path or name, in fp32; errors as for ``load_ouro``."""
    model_dir = _open(str(name), "huginn")
    model = HuginnTrainer(_sizes(HuginnSize, model_dir.config))
    _load_weights(model, model_dir)
    return model
