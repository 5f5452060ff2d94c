"""Writes small checkpoints for tests: variants of the fidelity configs with made-up weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from depthbatch.deploy.family_check import random_tensors
from depthbatch.worker.models.checkpoint import INDEX_NAME
from depthbatch.worker.models.config_reader import ConfigReader

FIDELITY = Path(__file__).parent.parent / "data" / "fidelity"
OURO_TINY, HUGINN_TINY = FIDELITY / "ouro-tiny", FIDELITY / "huginn-tiny"


def tiny_config(model_dir: Path, **changes: Any) -> dict[str, Any]:
    """A fidelity model's config with changes; None removes a field."""
    values = json.loads((model_dir / "config.json").read_text()) | changes
    return {name: value for name, value in values.items() if value is not None}


def make_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a config: made up, and with norms that differ from 1 so that a skipped norm shows."""
    return random_tensors(ConfigReader(config, "config.json"), seed)


def write_checkpoint(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None, shards: int = 1
) -> Path:
    """config.json and safetensors (with an index when there are several shards) in ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = make_tensors(config) if tensors is None else tensors
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names = sorted(tensors)
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, path / file)
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return path


def write_lookahead_gate(path: Path, hidden_size: int, seed: int = 0) -> None:
    """A lookahead gate with made-up weights beside a model."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, hidden_size, generator=generator) * hidden_size**-0.5
    tensors = {"weight": weight, "bias": torch.tensor([0.2])}
    save_file(tensors, path / "lookahead_gate.safetensors", {"kind": "lookahead"})


def write_preloop_gate(path: Path, hidden_size: int, loops: int, seed: int = 0) -> None:
    """A pre-loop gate with made-up weights beside a model."""
    generator = torch.Generator().manual_seed(seed)
    weight = 2.0 * torch.randn(loops, hidden_size, generator=generator)
    tensors = {"weight": weight, "bias": torch.randn(loops, generator=generator)}
    save_file(tensors, path / "preloop_gate.safetensors", {"kind": "preloop"})


def config_only(path: Path, config: dict[str, Any]) -> str:
    """A model directory without weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)
