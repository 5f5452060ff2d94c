"""A converted Llama gives the base model's logits at every loop count."""

from pathlib import Path
from typing import Any

import pytest
import torch

from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.kv_layout import KVLayout
from depthbatch.deploy.cli.main import main
from depthbatch.worker.models.loader import load_model
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
    from depthbatch.worker.models.convert import convert

    write_llama(tmp_path / "base")
    write_llama(tmp_path / "biased", attention_bias=True)
    for source, cut, message in (
        ("base", (3, 2), "--prelude 3 --coda 2 leave no core of 5 layers"),
        ("biased", (1, 1), "'attention_bias' = True is not supported"),
        ("nothing", (1, 1), "is neither a model directory nor a .gguf file"),
    ):
        with pytest.raises((ConfigError, ModelError), match=message):
            convert(tmp_path / source, tmp_path / f"to-{source}", *cut)
    with pytest.raises(ConfigError, match="is not empty"):
        convert(tmp_path / "base", tmp_path / "biased", 1, 1)
