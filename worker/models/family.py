"""What a model file exports: how to recognise a config, which tensors it needs, how to build the model.

A model file in this folder defines ``FAMILY``, an instance of ModelFamily; ``registry`` finds it, and those that other
packages offer. The loader around it reads files and checks names, shapes and values; the family only says what it
wants. A family of Llama-like blocks derives from ``llama_like.LlamaLikeFamily`` and inherits most of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.worker.layers.int8 import Weight, join
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.interface import LoopedModel, ModelSpec
from depthbatch.worker.models.tensor_parallel import ONE_RANK, Splits, TensorParallel

Shapes = dict[str, tuple[int, ...]]

LOOKAHEAD_GATE = "lookahead_gate"  # <name>.safetensors beside the model: weight [1, D], bias [1]
PRELOOP_GATE = "preloop_gate"  # likewise: weight [R, D], bias [R], R the trained loops


@dataclass(frozen=True)
class TensorTable:
    """Names and shapes of a checkpoint."""

    required: Shapes
    optional: Shapes = field(default_factory=dict)
    ignored_suffixes: tuple[str, ...] = ()  # stored by some versions, recomputed by us
    core: frozenset[str] = frozenset()  # those every loop uses
    looked_up: frozenset[str] = frozenset()  # those no token is multiplied by: an untied embedding, gates
    linears: frozenset[str] = frozenset()  # [out, in], those that int8 is for; without any, the model is not quantised
    splits: Splits = field(default_factory=dict)  # those that ranks share; without any, the model runs on one
    of_one_rank: frozenset[str] = frozenset()  # optional; a model that has one of them runs on one


class SpecOptions(NamedTuple):
    """What the user may choose about a model."""

    dtype: torch.dtype
    r_max: int | None  # None: the model's own
    side_files: frozenset[str]  # names of the gate files found


class TakeTensor(Protocol):
    """Hands out a checkpoint tensor, or the rank's share of it, checked, on the device. ``dtype`` None: the model's."""

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor: ...


class TakeLinear(Protocol):
    """Hands out one of TensorTable.linears, as ``take`` does, or quantised."""

    def __call__(self, name: str) -> Weight: ...


class BuildInputs(NamedTuple):
    """What a family builds a model from."""

    take: TakeTensor
    take_linear: TakeLinear
    optional_present: frozenset[str]  # which of TensorTable.optional the checkpoint holds
    side: Mapping[str, Mapping[str, torch.Tensor]]  # fp32 tensors of each side file found
    device: torch.device
    state_init: str  # "zero" or "seeded"
    parallel: TensorParallel = ONE_RANK

    def matrix(self, *names: str) -> Weight:
        """The weight of a linear layer, whose outputs are those of ``names`` (of TensorTable.linears) in order."""
        parts = [self.take_linear(name) for name in names]
        if len({type(part) for part in parts}) > 1:
            raise ModelError(f"'{names[0]}' to '{names[-1]}' run as one layer, but some are quantised and some are not")
        return join(parts)


class ModelFamily(Protocol):
    """One architecture."""

    name: str
    eos_of_tokenizer: bool  # the configs' special ids are stale; the tokenizer knows its own

    def claims(self, config: ConfigReader) -> bool:
        """True when the config's names are this family's; ``spec`` then refuses variants it cannot run."""
        ...

    def spec(self, config: ConfigReader, options: SpecOptions) -> ModelSpec:
        """The model's facts. Raises ModelError (config) or ConfigError (options)."""
        ...

    def tensors(self, config: ConfigReader) -> TensorTable:
        """Names and shapes the checkpoint must have."""
        ...

    def side_tensors(self, config: ConfigReader) -> dict[str, TensorTable]:
        """Names and shapes of the gate files this family can use."""
        ...

    def build(self, config: ConfigReader, spec: ModelSpec, inputs: BuildInputs) -> LoopedModel:
        """The model with its weights."""
        ...


def checked_r_max(requested: int | None, default: int, limit: int) -> int:
    """Loops of a full-depth token: what the user asks for within 1..limit, else the default; ConfigError outside."""
    if requested is None:
        return default
    if not 1 <= requested <= limit:
        raise ConfigError(f"max_loops {requested} is outside the model's range 1..{limit}")
    return requested
