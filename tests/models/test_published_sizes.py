"""The published models by their configurations alone: how many tensors, parameters and KV bytes, which gates and ranks."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from depthbatch.benchmarks.gpu import shapes
from depthbatch.common.gates import Gate
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import TensorTable
from depthbatch.worker.models.loader import open_model_dir, rank_counts, read_spec
from depthbatch.worker.models.registry import find_family
from fakes.checkpoints import FIDELITY, HUGINN_TINY, OURO_TINY, config_only

OURO_1_4B = shapes.OURO | {"max_position_embeddings": 65536, "torch_dtype": "bfloat16"}
OURO_2_6B = OURO_1_4B | {"num_hidden_layers": 48}
HUGINN_3_5B = shapes.HUGINN | {"torch_dtype": "bfloat16"}
RECURRENT_LLAMA = {  # 4-6-4
    **json.loads((FIDELITY / "retro-llama-tiny" / "config.json").read_text()),
    "vocab_size": 128256,
    "padded_vocab_size": 128256,
    "n_embd": 2048,
    "n_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "n_layers_in_prelude": 4,
    "n_layers_in_recurrent_block": 6,
    "n_layers_in_coda": 4,
    "max_position_embeddings": 131072,
}


def table_of(config: dict[str, Any]) -> TensorTable:
    reader = ConfigReader(dict(config), "config.json")
    return find_family(reader).tensors(reader)


@pytest.mark.parametrize(
    ("config", "tensors", "parameters"),
    [
        (OURO_1_4B, 269, 1_434_652_673),
        (OURO_2_6B, 533, 2_667_974_657),
        (HUGINN_3_5B, 75, 3_564_976_800),
        (RECURRENT_LLAMA, 88, 1_385_228_288),
    ],
    ids=["ouro-1.4b", "ouro-2.6b", "huginn-3.5b", "recurrent-llama-3.2"],
)
def test_published_sizes(config: dict[str, Any], tensors: int, parameters: int) -> None:
    """Tensor and parameter counts of the published checkpoints: a wrong shape or a missing key changes one of them."""
    shapes = table_of(config).required
    assert len(shapes) == tensors
    assert sum(prod(shape) for shape in shapes.values()) == parameters


def test_published_key_names() -> None:
    """Key lists equal those stored in the fidelity checkpoints, which use the public names."""
    from safetensors import safe_open

    for path in (
        OURO_TINY,
        HUGINN_TINY,
        *(FIDELITY / f"retro-{base}-tiny" for base in ("llama", "tinyllama", "olmo")),
        FIDELITY / "nanbeige-tiny",
    ):
        table = table_of(json.loads((path / "config.json").read_text()))
        wanted = table.required | (table.optional if "olmo" in path.name else {})
        with safe_open(path / "model.safetensors", "pt") as stored:
            assert wanted == {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118


def test_published_specs(tmp_path: Path) -> None:
    """KV bytes a token, loops, gates and stop tokens of the published models (models.md)."""
    ouro = read_spec(config_only(tmp_path / "ouro", OURO_1_4B), load_format="dummy")
    assert (ouro.r_max, ouro.r_min, ouro.r_limit, ouro.dtype) == (4, 2, 4, torch.bfloat16)
    assert ouro.kv_bytes_per_token(KVLayout.SINGLE) == 192 * 1024
    assert ouro.kv_bytes_per_token(KVLayout.LAST_EXITED) == 768 * 1024
    assert ouro.kv_bytes_per_token(KVLayout.LAST_EXITED, KVCacheDtype.INT8) == 390 * 1024
    assert ouro.eos_token_ids == (0, 2)
    assert (ouro.default_gate, ouro.default_threshold, ouro.default_layout) == (Gate.DELAYED, 1.0, KVLayout.LAST_EXITED)
    huginn = read_spec(config_only(tmp_path / "huginn", HUGINN_3_5B), load_format="dummy")
    assert (huginn.r_max, huginn.r_min, huginn.r_limit) == (16, 2, 64)
    assert huginn.kv_bytes_per_token(KVLayout.SINGLE) == 165 * 1024
    assert huginn.kv_bytes_per_token(KVLayout.DEPTH_INDEXED) == 1402.5 * 1024
    assert huginn.eos_token_ids == (65505, 65508)
    assert (huginn.num_heads, huginn.num_kv_heads, huginn.head_dim) == (55, 55, 96)


@pytest.mark.parametrize(
    ("config", "counts"),
    [(OURO_2_6B, (1, 2, 4, 8, 16)), (HUGINN_3_5B, (1, 5)), (RECURRENT_LLAMA, (1, 2, 4, 8))],
)
def test_ranks_that_can_share_a_model(config: dict[str, Any], counts: tuple[int, ...], tmp_path: Path) -> None:
    """The table of docs/models.md. Heads and KV heads are cut whole."""
    assert rank_counts(open_model_dir(config_only(tmp_path, config), "dummy")) == counts
