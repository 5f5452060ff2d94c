"""A model directory is either exactly what its config says or refused with one line that names what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthbatch.common.errors import ConfigError, DepthbatchError, ModelError
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.models.checkpoint import INDEX_NAME
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.loader import load_model, read_spec
from fakes.checkpoints import FIDELITY, HUGINN_TINY, OURO_TINY, config_only, make_tensors, tiny_config, write_checkpoint
from fakes.model_batch import Batch


def test_r_max_is_bounded() -> None:
    assert read_spec(str(OURO_TINY), r_max=2).r_max == 2
    assert read_spec(str(HUGINN_TINY), r_max=64).r_max == 64
    for path, loops in ((OURO_TINY, 5), (OURO_TINY, 0), (HUGINN_TINY, 65)):
        with pytest.raises(ConfigError, match=f"max_loops {loops}"):
            read_spec(str(path), r_max=loops)


def test_dummy_weights_are_a_function_of_the_seed(tmp_path: Path) -> None:
    """Same seed, same weights; another seed, others; variance 1 / fan_in; nothing read but config.json."""
    path = config_only(tmp_path, tiny_config(OURO_TINY))

    def embedding(seed: int) -> torch.Tensor:
        model: Any = load_model(path, load_format="dummy", seed=seed)
        return model.weights.embedding

    first = embedding(1)
    assert torch.equal(first, embedding(1))
    assert not torch.equal(first, embedding(2))
    assert abs(first.var().item() * first.shape[-1] - 1) < 0.05


def test_tied_head_and_ignored_tensors(tmp_path: Path) -> None:
    """Stored rotary tables are ignored; a second copy of a tied head is accepted only if it is a copy."""
    config = tiny_config(HUGINN_TINY)
    tensors = make_tensors(config)
    extra = {"freqs_cis": torch.zeros(3), "lm_head.weight": tensors["transformer.wte.weight"].clone()}
    load_model(str(write_checkpoint(tmp_path / "same", config, tensors | extra)))
    extra["lm_head.weight"][0, 0] += 1
    with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
        load_model(str(write_checkpoint(tmp_path / "other", config, tensors | extra)))
    config = tiny_config(OURO_TINY)
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    load_model(str(write_checkpoint(tmp_path / "ouro", config, make_tensors(config) | rotary)))


def test_dory_is_read_by_either_set_of_keys(tmp_path: Path) -> None:
    """The keys of transformers, those of vLLM and llama.cpp, or both: the same model, in layers of both halves."""
    ours = ("layer_types", "rope_parameters", "sliding_window", "initializer_range", "head_dim")
    others = ("hybrid_layer_pattern", "rope_theta", "rope_theta_2", "rope_profile_layers", "swa_window_size")
    others += ("init_method_std", "attention_head_dim", "swa_head_dim")
    specs, states = [], []
    for index, dropped in enumerate(((), ours, others)):
        config = tiny_config(FIDELITY / "dory-tiny", **dict.fromkeys(dropped))
        model: Any = load_model(config_only(tmp_path / str(index), config), load_format="dummy")
        specs.append(model.spec)
        at = torch.tensor([9])
        states.append([model._rotary[slides].at(at).cos for slides in (True, False)])
    assert specs[0] == specs[1] == specs[2]
    assert specs[0].windows == (12, 12, 12, 0, 12, 12)
    assert (specs[0].prelude_layers, specs[0].core_layers, specs[0].coda_layers, specs[0].head_dim) == (2, 2, 2, 16)
    assert all(torch.equal(a, b) for other in states[1:] for a, b in zip(states[0], other, strict=True))
    config = tiny_config(FIDELITY / "dory-tiny", recurrent_kv_cache_mode="last_loop")
    spec = read_spec(config_only(tmp_path / "last", config), load_format="dummy")
    assert (spec.default_layout, specs[0].default_layout) == (KVLayout.SINGLE, KVLayout.DEPTH_INDEXED)


def test_nanbeige_loop_counts(tmp_path: Path) -> None:
    """Missing is one; weights of a loop loss decide where there are any; positions and head_dim are the config's own."""
    for changes, loops in (({}, 2), ({"num_loops": None}, 1), ({"loop_loss_weights": [0.1, 0.2]}, 3)):
        spec = read_spec(config_only(tmp_path, tiny_config(FIDELITY / "nanbeige-tiny", **changes)), load_format="dummy")
        assert (spec.r_max, spec.head_dim, spec.max_positions, spec.eos_token_ids) == (loops, 16, 262144, (133,))
        assert spec.layouts == (KVLayout.DEPTH_INDEXED,)


@pytest.mark.parametrize(
    ("changes", "base"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, 1e4),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}, 5e5),
    ],
)
def test_rope_parameters_win(changes: dict[str, Any], base: float) -> None:
    """New files keep a stale ``rope_theta`` beside the ``rope_parameters`` that the published code reads."""
    config = ConfigReader(tiny_config(OURO_TINY, **changes), "config.json")
    assert config.rope("rope_theta", interleaved=False).base == base


def test_rotary_fields_that_are_not_honoured_are_refused() -> None:
    for inner in ({"mscale": 0.7}, {"partial_rotary_factor": 0.5}, {"rope_type": "linear", "factor": 2.0}):
        config = ConfigReader(tiny_config(OURO_TINY, rope_parameters=inner), "config.json")
        with pytest.raises(ModelError, match="is not supported"):
            config.rope("rope_theta", interleaved=False)


def test_the_index_decides_where_a_tensor_is(tmp_path: Path) -> None:
    """Shards that hold a stale copy of another shard's tensor are common after merges: the copy must not win, nor fail."""
    config = tiny_config(OURO_TINY)
    tensors = make_tensors(config)
    write_checkpoint(tmp_path, config, tensors, shards=2)
    index = json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"]
    name = "model.norm.weight"
    (other,) = set(index.values()) - {index[name]}
    stale = load_file(tmp_path / other) | {name: tensors[name] + 1, "of.nothing": torch.ones(2)}
    save_file(stale, tmp_path / other)
    model: Any = load_model(str(tmp_path))
    assert torch.equal(model.weights.final_norm, tensors[name])
    save_file({k: v for k, v in load_file(tmp_path / index[name]).items() if k != name}, tmp_path / index[name])
    with pytest.raises(ModelError, match=rf"says that tensor '{name}' is in {index[name]}, which does not hold it"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_files_beside_the_model_are_not_part_of_it(name: str, tmp_path: Path) -> None:
    """Training leaves its state in the same folder, publishers a second format, file managers hidden copies."""
    write_checkpoint(tmp_path, tiny_config(OURO_TINY))
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    for other in ("optimizer.safetensors", "adapter_model.safetensors", "consolidated.safetensors", "._x.safetensors"):
        save_file({"of.another": torch.ones(2)}, tmp_path / other)
    if name == "model.safetensors":
        save_file({"of.another": torch.ones(2)}, tmp_path / "anything.safetensors")
    assert load_model(str(tmp_path)).spec.architecture == "ouro"


@pytest.mark.parametrize("source", [OURO_TINY, HUGINN_TINY, FIDELITY / "retro-olmo-tiny", FIDELITY / "dory-tiny"])
def test_float16(source: Path, tmp_path: Path) -> None:
    """Stored and asked for: weights, states and K/V are fp16, logits are closer to fp32's than bf16's are."""
    prompts = [[5, 17, 25, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 77]]
    wide = Batch(load_model(str(source)), KVLayout.DEPTH_INDEXED, 2).prefill(prompts)
    coarse = Batch(load_model(str(source), dtype="bfloat16"), KVLayout.DEPTH_INDEXED, 2).prefill(prompts)
    limit = (coarse - wide).abs().max()
    config = tiny_config(source, torch_dtype="float16", dtype="float16")
    halves = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    stored = load_model(str(write_checkpoint(tmp_path, config, halves)))
    asked = load_model(str(source), dtype="float16")
    for model in (stored, asked):
        assert model.spec.dtype is torch.float16
        narrow = Batch(model, KVLayout.DEPTH_INDEXED, 2).prefill(prompts)
        assert narrow.dtype is torch.float32
        assert 0 < (narrow - wide).abs().max() < limit / 2


def test_dtype_auto_follows_config_then_checkpoint(tmp_path: Path) -> None:
    path = str(write_checkpoint(tmp_path / "a", tiny_config(OURO_TINY, torch_dtype=None, dtype="bfloat16")))
    assert read_spec(path).dtype is torch.bfloat16
    path = str(write_checkpoint(tmp_path / "b", tiny_config(OURO_TINY, torch_dtype=None)))
    assert read_spec(path).dtype is torch.float32
    assert read_spec(path, dtype="bfloat16").dtype is torch.bfloat16


Breaker = Callable[[Path], object]


def edit_config(**changes: Any) -> Breaker:
    """Rewrites config.json; None removes a field."""

    def change(path: Path) -> None:
        (path / "config.json").write_text(json.dumps(tiny_config(path, **changes)))

    return change


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Breaker:
    """Rewrites the checkpoint after a change to its tensors."""

    def apply(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        tensors = make_tensors(config)
        change(tensors)
        write_checkpoint(path, config, tensors)

    return apply


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def text(name: str, content: str) -> Breaker:
    return lambda path: (path / name).write_text(content)


def gate(kind: str, fill: float = 0.0, **shapes: tuple[int, ...]) -> Breaker:
    """Writes a gate file beside the model."""
    tensors = {name: torch.full(shape, fill) for name, shape in shapes.items()}
    return lambda path: save_file(tensors, path / f"{kind}_gate.safetensors")


def remove(name: str) -> Breaker:
    return lambda path: (path / name).unlink()


UP = "model.layers.1.mlp.up_proj.weight"
OURO_ERRORS: dict[str, tuple[Breaker, str]] = {
    "no config": (remove("config.json"), r"has no config\.json"),
    "broken JSON": (text("config.json", '{"model_type": '), r"config\.json: not valid JSON"),
    "JSON list": (text("config.json", "[]"), r"config\.json: must hold a JSON object"),
    "missing field": (edit_config(intermediate_size=None), "missing field 'intermediate_size'"),
    "missing kv heads": (edit_config(num_key_value_heads=None), "missing field 'num_key_value_heads'"),
    "missing rope": (edit_config(rope_theta=None), "missing field 'rope_theta'"),
    "missing tie": (edit_config(tie_word_embeddings=None), "missing field 'tie_word_embeddings'"),
    "wrong type": (edit_config(hidden_size="64"), "field 'hidden_size' must be an integer, got '64'"),
    "boolean for integer": (edit_config(total_ut_steps=True), "field 'total_ut_steps' must be an integer"),
    "zero": (edit_config(num_hidden_layers=0), "field 'num_hidden_layers' must be at least 1"),
    "uneven groups": (edit_config(num_key_value_heads=3), "num_attention_heads 4 is not a multiple"),
    "scaled rope": (edit_config(rope_scaling={"rope_type": "yarn"}), "'rope_scaling' of type 'yarn'"),
    "activation": (edit_config(hidden_act="gelu"), "'hidden_act' = 'gelu' is not supported"),
    "sliding window": (edit_config(layer_types=["sliding_attention"]), "'layer_types' holds"),
    "eos": (edit_config(eos_token_id=300), "field 'eos_token_id' must hold token ids below 300"),
    "float64": (edit_config(torch_dtype="float64"), "dtype 'float64' is not supported"),
    "unknown": (edit_config(model_type="gpt2", architectures=["GPT2LMHeadModel"]), "unknown architecture: .*'gpt2'"),
    "no weights": (remove("model.safetensors"), r"has no \*\.safetensors"),
    "empty weights": (text("model.safetensors", ""), r"model\.safetensors: cannot be read as safetensors"),
    "cut-off weights": (truncate, r"model\.safetensors: cannot be read as safetensors"),
    "missing tensor": (edit_tensors(lambda t: t.pop(UP)), rf"tensor '{UP}' is missing"),
    "unexpected tensor": (edit_tensors(lambda t: t.update(extra=torch.ones(2))), "tensor 'extra' is unexpected"),
    "wrong shape": (
        edit_tensors(lambda t: t.update({UP: t[UP].T.contiguous()})),
        rf"tensor '{UP}' has shape \[64, 176\], expected \[176, 64\]",
    ),
    "NaN": (edit_tensors(lambda t: t[UP].view(-1)[5:6].fill_(torch.nan)), rf"tensor '{UP}' holds NaN"),
    "infinity": (
        edit_tensors(lambda t: t[UP].view(-1)[5:6].fill_(torch.inf)),
        rf"tensor '{UP}' holds NaN or inf",
    ),
    "integers": (edit_tensors(lambda t: t.update({UP: t[UP].int()})), rf"tensor '{UP}' has type torch\.int32"),
    "index names a missing file": (
        text("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
        r"has no b\.safetensors, which model\.safetensors\.index\.json names",
    ),
    "index escapes the directory": (
        text("model.safetensors.index.json", '{"weight_map": {"a": "../b.safetensors"}}'),
        "is not a plain file name",
    ),
    "broken gate": (text("lookahead_gate.safetensors", "x"), r"lookahead_gate\.safetensors: cannot be read"),
    "gate without bias": (gate("lookahead", weight=(1, 64)), r"/lookahead_gate\.safetensors: tensor 'bias' is missing"),
    "gate of another model": (
        gate("preloop", weight=(2, 64), bias=(2,)),
        r"/preloop_gate\.safetensors: tensor 'bias' has shape \[2\], expected \[4\]",
    ),
    "gate with more": (
        gate("lookahead", weight=(1, 64), bias=(1,), scale=(1,)),
        r"/lookahead_gate\.safetensors: tensor 'scale' is unexpected",
    ),
    "gate of no numbers": (
        gate("lookahead", weight=(1, 64), bias=(1,), fill=torch.nan),
        r"/lookahead_gate\.safetensors: tensor '\w+' holds NaN",
    ),
}
HUGINN_ERRORS: dict[str, tuple[Breaker, str]] = {
    "retrofitted": (edit_config(block_class_name="TransformerPreNormBlock"), "'block_class_name' = 'TransformerPre"),
    "unnamed block": (edit_config(block_class_name=None), "missing field 'block_class_name'"),
    "no qk_bias": (edit_config(qk_bias=False), "'qk_bias' = False is not supported"),
    "injection": (edit_config(injection_type="add"), "'injection_type' = 'add' is not supported"),
    "grouped": (edit_config(num_key_value_heads=2), "grouped-query attention"),
    "heads": (edit_config(n_heads=5), "n_embd 64 must be an even multiple of n_heads 5"),
}


RETRO_ERRORS: dict[str, tuple[Breaker, str]] = {
    "block": (edit_config(block_class_name="TransformerPreNormBlock"), "'block_class_name' = 'TransformerPre"),
    "qk_bias": (edit_config(qk_bias=True), "'qk_bias' = True is not supported"),
    "noise": (edit_config(test_time_noise=0.1), "'test_time_noise' = 0.1 is not supported"),
    "padded": (edit_config(padded_vocab_size=4096), "'padded_vocab_size' = 4096 is not supported"),
    "start": (edit_config(initial_state_mode="zeros"), "'initial_state_mode' = 'zeros' is not supported"),
    "no init_values": (edit_config(init_values=None), "init_values: missing field 'embed_scale'"),
    "scaling": (
        edit_config(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        "'rope_scaling' of type 'yarn' is not supported",
    ),
    "half a scaling": (
        edit_config(rope_scaling={"rope_type": "llama3", "factor": 2.0}),
        "rope_scaling: missing field 'low_freq_factor'",
    ),
    "partial": (edit_config(partial_rotary_factor=0.5), "'partial_rotary_factor' = 0.5 is not supported"),
    "heads": (edit_config(num_key_value_heads=3), "n_heads 4 is not a multiple of num_key_value_heads 3"),
    "one q norm": (
        edit_tensors(lambda t: t.update({"transformer.coda.0.attn.q_norm.weight": torch.ones(64)})),
        r"tensor 'transformer\.coda\.0\.attn\.k_norm\.weight' is missing",
    ),
}
NANBEIGE_ERRORS: dict[str, tuple[Breaker, str]] = {
    name: (edit_config(**{name: value}), f"'{name}' = ")
    for name, value in {
        "qk_layernorm": True,
        "emb_neighbor_num": 2,
        "insert_ngram_layer_idx": [3],
        "ngram_insert_all_layers": True,
        "enable_double_loop_split": True,
        "loop_middle_layers": [1, 2],
        "loop_share_kv": True,
        "enable_hyper_connection": True,
        "enable_depth_attention": True,
        "attention_bias": True,
        "hidden_act": "gelu",
    }.items()
} | {"scaling": (edit_config(rope_scaling={"type": "yarn"}), "'rope_scaling' of type 'yarn' is not supported")}
DORY_ERRORS: dict[str, tuple[Breaker, str]] = {
    "two windows": (edit_config(swa_window_size=13), "'sliding_window' = 12 and 'swa_window_size' = 13 contradict"),
    "two patterns": (edit_config(hybrid_layer_pattern="*-S-S-*-S-S-"), "'hybrid_layer_pattern'"),
    "an attention pair": (
        edit_config(layer_types=None, hybrid_layer_pattern="SSS-S-*-S-S-"),
        "are not attention and MLP in turn",
    ),
    "layer counts": (edit_config(n_input_layers=3), "do not divide the layers"),
    "final norm": (edit_config(ngpt_enable_final_norm=True), "'ngpt_enable_final_norm' = True is not supported"),
    "version": (edit_config(dory_format_version=2), "'dory_format_version' = 2 is not supported"),
    "no rope": (edit_config(no_rope_layers=[1] + [0] * 11), "'no_rope_layers' names layers"),
    "other heads": (edit_config(swa_num_attention_heads=8), "'swa_num_attention_heads' = 8 is not supported"),
    "transform": (edit_config(input_transform="replace"), "'input_transform' = 'replace' is not supported"),
    "cache mode": (edit_config(recurrent_kv_cache_mode="first_loop"), "'recurrent_kv_cache_mode' = 'first_loop'"),
    "rope": (
        edit_config(rope_parameters={"full_attention": {"rope_theta": 1e7, "rope_type": "yarn"}}),
        "full_attention: rope_parameters.*yarn|'rope_parameters' of type 'yarn' is not supported",
    ),
}
ERRORS = {
    FIDELITY / "dory-tiny": DORY_ERRORS,
    OURO_TINY: OURO_ERRORS,
    HUGINN_TINY: HUGINN_ERRORS,
    FIDELITY / "retro-llama-tiny": RETRO_ERRORS,
    FIDELITY / "nanbeige-tiny": NANBEIGE_ERRORS,
}


@pytest.mark.parametrize(("base", "name"), [(base, name) for base, errors in ERRORS.items() for name in errors])
def test_errors_name_the_thing(base: Path, name: str, tmp_path: Path) -> None:
    """Each way of breaking a directory gives one ModelError line; the unbroken directory loads (tested above)."""
    change, message = ERRORS[base][name]
    write_checkpoint(tmp_path, tiny_config(base))
    change(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_retrofitted_recurrence_is_refused(tmp_path: Path) -> None:
    """Huginn's class name on other blocks must not be misloaded, not even with made-up weights."""
    with pytest.raises(ModelError, match="not supported"):
        load_model(
            config_only(
                tmp_path,
                tiny_config(
                    HUGINN_TINY, block_class_name="TransformerPreNormBlock", num_key_value_heads=2, qk_bias=False
                ),
            ),
            load_format="dummy",
        )


def test_missing_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that lead nowhere; a repo id without a network says both things it could have been."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, message in (
        (str(tmp_path / "none"), "does not exist"),
        ("./none", "does not exist"),
        ("demo-unknown", "does not exist"),
        ("owner/none", "neither a local directory nor"),
        (str(OURO_TINY / "config.json"), "is a file"),
    ):
        with pytest.raises(ModelError, match=message):
            read_spec(name)


@pytest.mark.parametrize(
    "options", [{"dtype": "float64"}, {"load_format": "gguf"}, {"state_init": "normal"}, {"r_max": -1}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(str(OURO_TINY), **options)
    assert isinstance(caught.value, DepthbatchError)


def test_demo_loads() -> None:
    """The name 'demo' is a model in the package."""
    model = load_model("demo")
    assert model.spec.architecture == "ouro"
