"""Which tokens end a sequence, by all the files of a model directory that say so."""

import json
from pathlib import Path

import pytest
from models.test_published_sizes import RECURRENT_LLAMA

from depthbatch.worker.models.loader import read_spec
from fakes.checkpoints import OURO_TINY, config_only, tiny_config


def test_generation_config_adds_stop_tokens(tmp_path: Path) -> None:
    path = config_only(tmp_path, tiny_config(OURO_TINY))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    assert read_spec(path, load_format="dummy").eos_token_ids == (0, 7)


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config.json": {"eos_token": "<end>"}}, (0, 9)),
        ({"special_tokens_map.json": {"eos_token": {"content": "<end>"}}}, (0, 9)),
        ({"special_tokens_map.json": {"eos_token": "word"}, "tokenizer_config.json": {"eos_token": None}}, (0, 5)),
        ({"special_tokens_map.json": {"eos_token": "word"}, "tokenizer_config.json": {"eos_token": "<end>"}}, (0, 9)),
        ({"tokenizer_config.json": {"eos_token": "<pad>"}}, (0,)),  # beyond the model's rows
        ({"tokenizer_config.json": {"eos_token": "nowhere"}}, (0,)),
        ({"tokenizer_config.json": {}}, (0,)),
        ({"generation_config.json": {"eos_token_id": 7}, "tokenizer_config.json": {"eos_token": "<end>"}}, (0, 7, 9)),
    ],
)
def test_the_tokenizers_end_of_sequence_joins_that_of_the_configs(
    tmp_path: Path, files: dict[str, dict[str, object]], eos: tuple[int, ...]
) -> None:
    """Bug: chat models whose turns end with a token of the tokenizer's own ran on to max_tokens."""
    path = config_only(tmp_path, tiny_config(OURO_TINY))
    added = [{"id": 9, "content": "<end>"}, {"id": 10**6, "content": "<pad>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"word": 5}}}))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_spec(path, load_format="dummy").eos_token_ids == eos


def test_retrofitted_models_take_the_tokenizers_stop_tokens(tmp_path: Path) -> None:
    """Their config and generation config hold Huginn's ids: beyond TinyLlama's vocabulary, ordinary words of Llama's."""
    config = RECURRENT_LLAMA | {"eos_token_id": 65505}
    path = config_only(tmp_path, config)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 65505}')
    assert read_spec(path, load_format="dummy").eos_token_ids == ()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end_of_text|>"}}')
    added = [{"id": 128000, "content": "<|begin_of_text|>"}, {"id": 128001, "content": "<|end_of_text|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    spec = read_spec(path, load_format="dummy")
    assert spec.eos_token_ids == (128001,)
    assert (spec.vocab_size, spec.max_positions, spec.num_kv_heads) == (128256, 131072, 8)
