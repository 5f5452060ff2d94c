"""A looped model out of a Llama checkpoint, in the retrofitted format: layers are cut into prelude, core and coda.

The adapter starts as [0 | I]: a loop sees the injection alone, so every loop count gives exactly the base model, and
training may go on from there. What it made of the adapter's half that reads the state can be put in again, as long as the
cut is the same. Reads safetensors, or a GGUF file through transformers.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.worker.models.checkpoint import Checkpoint, read_json
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.huginn import ADAPTER
from depthbatch.worker.models.llama_like import head_sizes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MEAN_RECURRENCE = 4
ADAPTER_FILE = "adapter.safetensors"
CUT = ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")
Take = Callable[[str], torch.Tensor]


class Source(NamedTuple):
    """What is converted: config, tensors by name, and what writes its tokenizer into a directory."""

    values: dict[str, Any]
    take: Take
    save_tokenizer: Callable[[Path], object]


def convert(source: Path, target: Path, prelude: int, coda: int, adapter: Path | None = None) -> None:
    """Writes ``target`` from a model directory or a ``.gguf`` file. ``adapter``: a file that save_adapter wrote. Raises
    ModelError or ConfigError."""
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty")
    if source.suffix == ".gguf":
        values, take, save_tokenizer = _from_gguf(source)
    elif source.is_dir():
        values, take, save_tokenizer = _from_directory(source)
    else:
        raise ModelError(f"{source} is neither a model directory nor a .gguf file")
    config = ConfigReader(values, str(source))
    fields = converted_config(config, prelude, coda)
    tensors = converted_tensors(take, fields, config.tied_head(("tie_word_embeddings",)))
    if adapter is not None:
        tensors[ADAPTER][:, : fields["n_embd"]] = read_adapter(adapter, fields)
    target.mkdir(parents=True, exist_ok=True)
    save_tokenizer(target)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def converted_config(config: ConfigReader, prelude: int, coda: int) -> dict[str, Any]:
    """The fields of the retrofitted format. Refuses what is no plain Llama, and cuts that leave no core."""
    if not config.is_named("llama", "LlamaForCausalLM"):
        raise config.fail("only Llama models (model_type 'llama') can be converted")
    config.expect("hidden_act", ("silu",))
    config.refuse("attention_bias", "mlp_bias", "quantization_config")
    hidden, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    heads, kv_heads, head_dim = head_sizes(config, hidden, "num_attention_heads", "num_key_value_heads")
    if prelude < 0 or coda < 0 or layers - prelude - coda < 1:
        raise ConfigError(f"--prelude {prelude} --coda {coda} leave no core of {layers} layers")
    rope = config.rope("rope_theta", interleaved=False, scaled=True)
    scaling = None
    if rope.scaling is not None:
        scaling = {"rope_type": "llama3", "factor": rope.scaling.factor} | {
            "low_freq_factor": rope.scaling.low_freq_factor,
            "high_freq_factor": rope.scaling.high_freq_factor,
            "original_max_position_embeddings": rope.scaling.original_positions,
        }
    return {
        "architectures": ["RavenForCausalLM"],
        "model_type": "huginn_raven",
        "block_class_name": "SandwichBlock",
        "norm_class_name": "RMSNorm_llama",
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "injection_type": "linear",
        "bias": False,
        "qk_bias": False,
        "tie_embeddings": False,
        "vocab_size": config.integer("vocab_size"),
        "padded_vocab_size": config.integer("vocab_size"),
        "n_embd": hidden,
        "n_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": config.integer("intermediate_size"),
        "n_layers": layers,
        "n_layers_in_prelude": prelude,
        "n_layers_in_recurrent_block": layers - prelude - coda,
        "n_layers_in_coda": coda,
        "mean_recurrence": MEAN_RECURRENCE,
        "norm_eps": config.number("rms_norm_eps"),
        "rope_theta": rope.base,
        "rope_scaling": scaling,
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "init_values": {"std": (2.0 / (5.0 * hidden)) ** 0.5, "embed_scale": 1.0},
        "test_time_noise": 0,
    }


def converted_tensors(take: Take, fields: dict[str, Any], tied: bool) -> dict[str, torch.Tensor]:
    """All tensors under their new names; a tied head is stored, as the format has it."""
    embedding, hidden = take("model.embed_tokens.weight"), fields["n_embd"]
    nothing, identity = torch.zeros(hidden, hidden), torch.eye(hidden)
    tensors = {
        "transformer.wte.weight": embedding,
        ADAPTER: torch.cat((nothing, identity), 1).to(embedding.dtype),
        "transformer.ln_f.weight": take("model.norm.weight"),
        "lm_head.weight": embedding.clone() if tied else take("lm_head.weight"),
    }
    layer = 0
    for stage, field in zip(("prelude", "core_block", "coda"), CUT, strict=True):
        for index in range(fields[field]):
            old, new = f"model.layers.{layer}.", f"transformer.{stage}.{index}."
            qkv = [take(f"{old}self_attn.{part}_proj.weight") for part in "qkv"]
            gate_up = [take(f"{old}mlp.{part}_proj.weight") for part in ("gate", "up")]
            tensors |= {
                f"{new}attn.Wqkv.weight": torch.cat(qkv),
                f"{new}attn.proj.weight": take(f"{old}self_attn.o_proj.weight"),
                f"{new}mlp.fc.weight": torch.cat(gate_up),
                f"{new}mlp.proj.weight": take(f"{old}mlp.down_proj.weight"),
                f"{new}norm_1.weight": take(f"{old}input_layernorm.weight"),
                f"{new}norm_2.weight": take(f"{old}post_attention_layernorm.weight"),
            }
            layer += 1
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def save_adapter(weight: torch.Tensor, fields: dict[str, Any], path: Path) -> None:
    """The half of an adapter [D, 2D] that reads the state, fp32 [D, D], with the cut that it was trained at."""
    half = weight[:, : weight.shape[0]].detach().float().contiguous()
    save_file({"state_half": half}, path, {"format": "pt", "cut": _cut(fields)})
    path.chmod(0o644)  # the library writes 0600


def read_adapter(path: Path, fields: dict[str, Any]) -> torch.Tensor:
    """What save_adapter wrote. Raises ConfigError where it is none, or of another cut or width."""
    if not path.is_file():
        raise ConfigError(f"--adapter: there is no {path}")
    checkpoint = Checkpoint(path.parent, (path,))
    cut, hidden = checkpoint.metadata(path).get("cut"), fields["n_embd"]
    if cut is None or set(checkpoint.file_of) != {"state_half"}:
        raise ConfigError(f"--adapter: {path} is not what train-loops --one-loop-stays writes")
    if cut != _cut(fields):
        raise ConfigError(f"--adapter: {path} was trained between layers {cut}, not {_cut(fields)}")
    if checkpoint.shape("state_half") != (hidden, hidden):
        raise ConfigError(f"--adapter: {path} is of a model of width {checkpoint.shape('state_half')[0]}, not {hidden}")
    return checkpoint.tensor("state_half")


def _cut(fields: dict[str, Any]) -> str:
    return "-".join(str(fields[name]) for name in CUT)


def _from_directory(source: Path) -> Source:
    def save_tokenizer(target: Path) -> None:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)

    return Source(read_json(source / "config.json"), Checkpoint(source).tensor, save_tokenizer)


def _from_gguf(source: Path) -> Source:
    """Its tensors as fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except (ImportError, OSError, ValueError) as error:
        raise ModelError(f"{source}: cannot be read as GGUF ({str(error).strip().splitlines()[0]})") from error
    values = model.config.to_dict() | {"quantization_config": None}  # it has made them whole
    return Source(values, dict(model.state_dict()).__getitem__, tokenizer.save_pretrained)
