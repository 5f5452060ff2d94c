"""The training forwards against the published references' outputs, and the exported formats."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from depthbatch.common.errors import ModelError
from depthbatch.training.checkpoints import export, load_huginn, load_ouro
from depthbatch.training.demo_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, chat_text
from depthbatch.training.huginn import HuginnSize, HuginnTrainer
from depthbatch.training.ouro import OuroSize, OuroTrainer
from reference import decoding
from reference.huginn import HuginnReference

SMALL_OURO = OuroSize(VOCAB_SIZE, 32, 64, 2, 2, 128)
SMALL_HUGINN = HuginnSize(VOCAB_SIZE, 32, 2, 64, 2, 1, 1, 128)


@pytest.mark.parametrize("prompt", range(4))
def test_ouro_forward_equals_the_reference(ouro_directory: Path, prompt: int) -> None:
    expected = np.load(ouro_directory / "expected.npz")
    model = load_ouro(ouro_directory)
    with torch.no_grad():
        output = model(torch.from_numpy(expected[f"prompt_{prompt}"]).long()[None])
        logits = model.logits(output.states)[:, 0]
    torch.testing.assert_close(logits, torch.from_numpy(expected[f"logits_{prompt}"]), atol=1e-4, rtol=1e-4)
    gate = torch.from_numpy(expected[f"gate_logits_{prompt}"])
    torch.testing.assert_close(output.gate_logits[:, 0], gate, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prompt", range(4))
def test_huginn_forward_equals_the_reference(huginn_directory: Path, prompt: int) -> None:
    expected = np.load(huginn_directory / "expected.npz")
    model = load_huginn(huginn_directory)
    with torch.no_grad():
        states = model(torch.from_numpy(expected[f"prompt_{prompt}"]).long()[None], 8).states
        logits = model.logits(states[torch.from_numpy(expected["steps"]).long() - 1])[:, 0]
    torch.testing.assert_close(logits, torch.from_numpy(expected[f"logits_{prompt}"]), atol=2e-4, rtol=2e-4)
    before = torch.cat((torch.zeros_like(states[:1]), states[:-1]))
    distance = ((states - before).norm(dim=-1) / states.norm(dim=-1))[:, 0]
    expected_distance = torch.from_numpy(expected[f"convergence_{prompt}"])
    torch.testing.assert_close(distance, expected_distance, atol=1e-4, rtol=1e-4)


def test_decoding_sees_the_last_loop_as_a_shared_plane_has_it(huginn_directory: Path) -> None:
    """The states of the last token equal the reference's under the layout ``single``, loop by loop: every loop sees the last
    loop of all tokens before. Not so with a plane a loop."""
    model, reference = load_huginn(huginn_directory), HuginnReference(huginn_directory)
    ids, loops, last = [5, 1, 7, 40, 2, 30, 8], 6, 6
    wanted = {}
    with torch.no_grad():
        for layout in ("single", "depth_indexed"):
            memory = decoding.new_memory(reference, layout, loops, len(ids))
            decoding.prefill(reference, ids[:last], layout, loops, None, memory)
            state, states = reference.prelude(ids[last:], last, memory), []
            for loop in range(1, loops + 1):
                state = reference.core(state, decoding.plane_of(layout, loop), last, memory)
                states.append(state[0][0])
            wanted[layout] = torch.stack(states)
        whole = model(torch.tensor([ids]), loops)
        states = model.decode(whole, torch.tensor([[last, last - 3]]), loops)
    torch.testing.assert_close(states[:, 0, 0], wanted["single"], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(whole.states[:, 0, last], wanted["depth_indexed"], atol=2e-4, rtol=2e-4)
    assert (wanted["single"] - wanted["depth_indexed"]).abs().max() > 0.01


def test_truncated_backpropagation_leaves_the_value_and_cuts_the_gradient() -> None:
    """The embedding gets less gradient when early loops are cut off, though the injection still feeds the last."""
    model = HuginnTrainer(SMALL_HUGINN, seed=1)
    ids = torch.arange(12)[None]
    gradients = []
    values = []
    for gradient_loops in (None, 6, 1):
        model.zero_grad()
        states = model(ids, 6, gradient_loops=gradient_loops).states
        values.append(states[-1].detach())
        states[-1].square().mul(torch.linspace(0, 1, 32)).sum().backward()
        gradient = model.transformer.adapter.weight.grad
        assert gradient is not None
        gradients.append(gradient.clone())
    assert values[0].equal(values[1]) and values[0].equal(values[2])
    assert gradients[0].equal(gradients[1])
    assert not torch.allclose(gradients[0], gradients[2])


def ouro_keys(layers: int) -> set[str]:
    """The public key names of an Ouro checkpoint."""
    per_layer = [f"self_attn.{p}_proj.weight" for p in "qkvo"] + [
        f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    ]
    per_layer += ["input_layernorm.weight", "input_layernorm_2.weight"]
    per_layer += ["post_attention_layernorm.weight", "post_attention_layernorm_2.weight"]
    top = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    top |= {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    return top | {f"model.layers.{i}.{name}" for i in range(layers) for name in per_layer}


def huginn_keys(prelude: int, core: int, coda: int) -> set[str]:
    """The public key names of a Huginn checkpoint with a tied head."""
    block = [f"norm_{i}.weight" for i in (1, 2, 3, 4)]
    block += ["attn.Wqkv.weight", "attn.qk_bias", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight"]
    counts = {"prelude": prelude, "core_block": core, "coda": coda}
    names = {f"transformer.{s}.{i}.{name}" for s, n in counts.items() for i in range(n) for name in block}
    return names | {"transformer.wte.weight", "transformer.adapter.weight", "transformer.ln_f.weight"}


@pytest.mark.parametrize("architecture", ["ouro", "huginn"])
def test_export_has_exactly_the_public_keys_and_loads_again(tmp_path: Path, architecture: str) -> None:
    model = OuroTrainer(SMALL_OURO, 3) if architecture == "ouro" else HuginnTrainer(SMALL_HUGINN, 3)
    export(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert all(file.get_slice(name).get_dtype() == "BF16" for name in names)
    assert names == (ouro_keys(2) if architecture == "ouro" else huginn_keys(2, 1, 1))
    loaded = load_ouro(tmp_path) if architecture == "ouro" else load_huginn(tmp_path)
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].equal(value.to(torch.bfloat16).float()), name
    assert loaded.size == model.size


def test_exported_tokenizer_loads_without_remote_code(tmp_path: Path) -> None:
    """AutoTokenizer round-trips any text, knows the end marker, and its template is what training renders."""
    from transformers import AutoTokenizer

    export(OuroTrainer(SMALL_OURO), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    config = json.loads((tmp_path / "config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id in config["eos_token_id"]
    assert tokenizer.pad_token_id == config["pad_token_id"]
    for text in ("12+30=", "user says: assistant", "héllo\n\tworld  \U0001f600", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(i < VOCAB_SIZE for i in ids)
    assert len(tokenizer.encode("12+30=")) == 6
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "say x="},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == chat_text([("1+1=", "2")], "say x=")
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_bad_directories_are_named_in_one_line(tmp_path: Path, huginn_directory: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_ouro(tmp_path)
    with pytest.raises(ModelError, match=r"huginn_raven.*exit gates are trained for Ouro and Huginn"):
        load_ouro(huginn_directory)
    export(OuroTrainer(SMALL_OURO), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_ouro(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config\.json: unknown architecture: model_type None"):
        load_ouro(tmp_path)
