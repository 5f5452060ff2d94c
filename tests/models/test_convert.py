"""A converted Llama gives the base model's logits at every loop count."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.kv_layout import KVLayout
from depthbatch.deploy.cli.main import main
from depthbatch.worker.models.checkpoint import Checkpoint
from depthbatch.worker.models.convert import convert, save_adapter
from depthbatch.worker.models.loader import load_model, read_spec
from fakes.llama import write_llama
from fakes.model_batch import Batch, packed_rows

PROMPTS = [[5, 17, 25, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 77], [42]]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"head_dim": 16, "rope_parameters": LLAMA3 | {"rope_theta": 5e4, "original_max_position_embeddings": 8}},
    ],
    ids=["tied", "llama3"],
)
def test_every_loop_count_is_the_base_model(changes: dict[str, Any], tmp_path: Path) -> None:
    """Logits of every position against transformers' own Llama, at 1 and 3 loops, from zero and from drawn states."""
    base = write_llama(tmp_path / "base", **changes)
    target = tmp_path / "looped"
    assert main(["convert", str(tmp_path / "base"), str(target), "--prelude", "1", "--coda", "2"]) == 0
    with torch.no_grad():
        wanted = torch.cat([base(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    for loops, start in ((1, "zero"), (3, "zero"), (3, "seeded")):
        model = load_model(str(target), r_max=loops, state_init=start)
        assert (model.spec.prelude_layers, model.spec.core_layers, model.spec.coda_layers) == (1, 2, 2)
        batch = Batch(model, KVLayout.DEPTH_INDEXED, len(PROMPTS))
        item = batch.prelude([token for prompt in PROMPTS for token in prompt], packed_rows(PROMPTS, 1))
        for loop in range(1, loops + 1):
            item = batch.core(item, packed_rows(PROMPTS, loop))
        torch.testing.assert_close(batch.logits(item, packed_rows(PROMPTS, loops)), wanted, atol=1e-4, rtol=0)


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    """Bugs: a refused model left a directory behind, in which the next try was refused; a quantised checkpoint was a KeyError, or
    its bytes were taken for weights."""
    write_llama(tmp_path / "base")
    write_llama(tmp_path / "biased", attention_bias=True)
    quantized = {"quant_method": "compressed-tensors", "config_groups": {}}
    write_llama(tmp_path / "bytes")
    config = json.loads((tmp_path / "bytes" / "config.json").read_text())
    (tmp_path / "bytes" / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    for source, cut, message in (
        ("base", (3, 2), "--prelude 3 --coda 2 leave no core of 5 layers"),
        ("biased", (1, 1), "'attention_bias' = True is not supported"),
        ("bytes", (1, 1), "'quantization_config' = .* is not supported"),
        ("nothing", (1, 1), "is neither a model directory nor a .gguf file"),
    ):
        with pytest.raises((ConfigError, ModelError), match=message):
            convert(tmp_path / source, tmp_path / f"to-{source}", *cut)
        assert not (tmp_path / f"to-{source}").exists()
    with pytest.raises(ConfigError, match="is not empty"):
        convert(tmp_path / "base", tmp_path / "biased", 1, 1)


def test_an_adapter_is_put_in(tmp_path: Path) -> None:
    """Its half that reads the state; the other stays. Those of another cut, of another width and other files are refused."""
    write_llama(tmp_path / "base")
    write_llama(tmp_path / "wider", hidden_size=64)
    convert(tmp_path / "base", tmp_path / "looped", 1, 2)
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    file = tmp_path / "adapter.safetensors"
    save_adapter(weight, json.loads((tmp_path / "looped" / "config.json").read_text()), file)
    convert(tmp_path / "base", tmp_path / "with", 1, 2, file)
    got = Checkpoint(tmp_path / "with").tensor("transformer.adapter.weight")
    assert got[:, :48].equal(weight[:, :48]) and got[:, 48:].equal(torch.eye(48))
    assert read_spec(str(tmp_path / "with")).core_layers == 2
    for source, cut, message in (
        ("base", (2, 1), "was trained between layers 1-2-2, not 2-2-1"),
        ("wider", (1, 2), "is of a model of width 48, not 64"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert(tmp_path / source, tmp_path / "other", *cut, file)
    for path, message in (
        (tmp_path / "looped" / "model.safetensors", "is not what train-loops --one-loop-stays writes"),
        (tmp_path / "none", "there is no"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert(tmp_path / "base", tmp_path / "other", 1, 2, path)
    assert not (tmp_path / "other").exists()
