"""Checkpoints in the format of compressed-tensors (llm-compressor): layers in a byte a weight, with a scale an output.

W8A16 (activations as they are) and W8A8 (activations quantised a row at a time), per channel and symmetric, which is what
int8.py computes. Every other scheme is refused by the field that says so. A quantised tensor ``a.weight`` is stored as
``a.weight`` in int8, or as ``a.weight_packed`` with four bytes + 128 in an int32, beside ``a.weight_scale`` [out, 1].
"""

from pathlib import Path

import torch

from depthbatch.common.errors import ModelError
from depthbatch.worker.layers.int8 import Int8Weight
from depthbatch.worker.models.checkpoint import Checkpoint
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.tensor_parallel import ONE_RANK, Split, TensorParallel

FIELD = "quantization_config"
FORMATS = ("int-quantized", "naive-quantized", "pack-quantized")
SCALE, PACKED, SHAPE = "_scale", "_packed", "_shape"  # behind the name of a quantised tensor
GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}


def quantizes_activations(config: ConfigReader) -> bool | None:
    """Whether a checkpoint's quantised layers have quantised inputs too; None where it has no such layers.

    Raises ModelError for what is not built, by field.
    """
    if not config.has(FIELD):
        return None
    reader = _object(config, FIELD)
    reader.expect("quant_method", ("compressed-tensors",))
    reader.expect("format", FORMATS, optional=True)
    reader.expect("quantization_status", ("compressed", "frozen"), optional=True)
    reader.refuse("kv_cache_scheme", "sparsity_config", "transform_config")
    groups = _object(reader, "config_groups")
    if not groups.values:
        raise groups.fail("holds no group")
    schemes = {_group(_object(groups, name)) for name in sorted(groups.values)}
    if len(schemes) > 1:
        raise groups.fail("some groups quantise activations and some do not, which is not supported")
    return schemes.pop()


def _object(config: ConfigReader, name: str) -> ConfigReader:
    values = config.values.get(name)
    if not isinstance(values, dict):
        raise config.fail(f"field '{name}' must be an object, got {values!r}")
    return ConfigReader(values, f"{config.path}: {name}")


def _group(group: ConfigReader) -> bool:
    """Whether its activations are quantised."""
    group.refuse("output_activations", *sorted(group.values.keys() - set(GROUP)))
    group.expect("format", FORMATS, optional=True)
    weights = _object(group, "weights")
    _eight_bits(weights, "channel")
    weights.refuse("dynamic", "actorder")
    if not group.has("input_activations"):
        return False
    activations = _object(group, "input_activations")
    _eight_bits(activations, "token")
    activations.expect("dynamic", (True,))
    return True


def _eight_bits(reader: ConfigReader, strategy: str) -> None:
    for name, value in EIGHT_BITS.items():
        reader.expect(name, (value,))
    reader.expect("strategy", (strategy,))
    reader.refuse("group_size", "block_structure")


class CompressedCheckpoint(Checkpoint):
    """The same tensors under their plain names. ``quantized``: those that are stored as bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = dict(self.file_of)  # of all that is stored
        self.quantized = frozenset(name.removesuffix(SCALE) for name in self._files if name.endswith(f".weight{SCALE}"))
        for name in self.quantized:
            stored = name if name in self._files else name + PACKED
            if stored not in self._files:
                raise ModelError(f"{path}: tensor '{name}{SCALE}' is there, but neither '{name}' nor '{name}{PACKED}'")
            self.file_of[name] = self._files[stored]
            for suffix in (SCALE, PACKED, SHAPE):
                self.file_of.pop(name + suffix, None)

    def num_bytes(self, name: str) -> int:
        """Of a tensor, as it is stored."""
        parts = [part for suffix in ("", SCALE, PACKED) if (part := name + suffix) in self._files]
        return sum(self.bytes_in(self._files[part], part) for part in parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor that the bytes stand for."""
        if name + PACKED not in self._files:
            return super().shape(name)
        stored = self._raw(name + SHAPE)
        if stored.is_floating_point() or tuple(stored.shape) != (2,):
            raise self._misfit(name + SHAPE, stored, "int", (2,))
        return tuple(stored.tolist())

    def tensor(self, name: str, split: Split | None = None, parallel: TensorParallel = ONE_RANK) -> torch.Tensor:
        """A tensor on the CPU; of bytes and scales their product in fp32."""
        if name not in self.quantized:
            return super().tensor(name, split, parallel)
        whole = self.int8(name).whole()
        return whole if split is None else split.cut(whole, parallel)

    def int8(self, name: str) -> Int8Weight:
        """One of ``quantized`` as it is stored. Raises ModelError where its parts do not fit each other."""
        if name + PACKED in self._files:
            rows, columns = self.shape(name)
            packed = self._raw(name + PACKED)
            if packed.dtype is not torch.int32 or tuple(packed.shape) != (rows, -(-columns // 4)):
                raise self._misfit(name + PACKED, packed, "int32", (rows, -(-columns // 4)))
            values = (packed.view(torch.uint8)[:, :columns] ^ 128).view(torch.int8)  # little-endian: a byte + 128 each
        else:
            values = self._raw(name)
            if values.dtype is not torch.int8 or values.dim() != 2:
                raise self._misfit(name, values, "int8", self.shape(name))
        scales = self._raw(name + SCALE)
        if not scales.is_floating_point() or tuple(scales.shape) not in ((len(values), 1), (len(values),)):
            raise self._misfit(name + SCALE, scales, "floats", (len(values), 1))
        scales = scales.float().view(-1, 1)
        if not scales.isfinite().all():
            raise ModelError(f"{self._files[name + SCALE]}: tensor '{name}{SCALE}' holds NaN or infinite values")
        return Int8Weight(values.contiguous(), scales, group=values.shape[1])

    def _raw(self, name: str) -> torch.Tensor:
        """A tensor as it is stored."""
        if name not in self._files:
            raise ModelError(f"{self.path}: tensor '{name}' is missing")
        return self.read(self._files[name], name)

    def _misfit(self, name: str, got: torch.Tensor, kind: str, shape: tuple[int, ...]) -> ModelError:
        said = f"{got.dtype} {list(got.shape)}, expected {kind} {list(shape)}"
        return ModelError(f"{self._files[name]}: tensor '{name}' is {said}")
