"""Checkpoint files: safetensors (one, several, or with an index), their checks, and made-up weights.

Reads headers first, so that a wrong name, shape or a cut-off file is reported before any weight is. Hands tensors out
one by one, so that no second copy of the model exists while it is built.
"""

import math
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from depthbatch.common import text_files
from depthbatch.common.errors import ModelError
from depthbatch.worker.layers.int8 import Int8Weight, quantize
from depthbatch.worker.models.family import TensorTable
from depthbatch.worker.models.tensor_parallel import ONE_RANK, Split, Splits, TensorParallel
from depthbatch.worker.sampling.random_numbers import bits_of_key, row_key

SIDE_SUFFIXES = ("_gate.safetensors",)  # gate files beside a model are not part of its checkpoint
INDEX_NAME = "model.safetensors.index.json"
MODEL_NAME = "model.safetensors"
NOT_THE_MODEL = (".", "optimizer", "adapter", "consolidated")  # training state and other formats, and hidden files
_ELEMENTS_A_DRAW = 4  # a dummy weight is 16 of a draw's 64 bits
_DUMMY_CHUNK = 1 << 13  # draws at a time: temporaries stay in cache, operators below the size where threads must meet


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError when it is missing, unreadable or not an object."""
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name}")
    try:
        values = text_files.read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: must hold a JSON object, holds a {type(values).__name__}")
    return values


Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """For whoever has nobody to tell."""


class Checkpoint:
    """The tensors of one or more safetensors files.

    Args:
        path: the model directory.
        files: the files to read; None finds them (through the index when there is one).

    Raises ModelError when there are none, one is missing, or one cannot be read.
    """

    quantized: frozenset[str] = frozenset()  # weights that are stored in int8

    def __init__(self, path: Path, files: tuple[Path, ...] | None = None) -> None:
        self.path = files[0] if files is not None and len(files) == 1 else path  # what errors of no single file name
        self._handles: dict[Path, Any] = {}
        self._stored: dict[Path, frozenset[str]] = {}
        self.file_of: dict[str, Path] = {}
        if files is None and (path / INDEX_NAME).is_file():
            self._obey_index(path)
            return
        for file in files or _find_files(path):
            for name in self._names(file):
                if name in self.file_of:
                    raise ModelError(f"tensor '{name}' is in both {self.file_of[name].name} and {file.name}")
                self.file_of[name] = file

    def _obey_index(self, path: Path) -> None:
        """Every tensor from the file that the index names for it; what else the files hold is not part of the model."""
        for name, file in _read_index(path).items():
            if name not in self._names(file):
                raise ModelError(f"{INDEX_NAME} says that tensor '{name}' is in {file.name}, which does not hold it")
            self.file_of[name] = file

    def _names(self, file: Path) -> frozenset[str]:
        """Names of the tensors in a file."""
        if file not in self._stored:
            self._stored[file] = frozenset(self._open(file).keys())
        return self._stored[file]

    def metadata(self, file: Path) -> dict[str, str]:
        """What a file's header says beside its tensors."""
        return self._open(file).metadata() or {}

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file}: cannot be read as safetensors ({error})") from None
        return self._handles[file]

    def num_bytes(self, name: str) -> int:
        """Of a stored tensor, as it is stored."""
        return self.bytes_in(self.file_of[name], name)

    def bytes_in(self, file: Path, name: str) -> int:
        """Of a tensor that a file holds."""
        part = self._open(file).get_slice(name)
        return int(math.prod(part.get_shape())) * _bits(part.get_dtype()) // 8

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor."""
        return tuple(self._open(self.file_of[name]).get_slice(name).get_shape())

    def tensor(self, name: str, split: Split | None = None, parallel: TensorParallel = ONE_RANK) -> torch.Tensor:
        """A stored tensor on the CPU in its stored type; of one that is split, the rank's share."""
        return self.read(self.file_of[name], name, split, parallel)

    def read(
        self, file: Path, name: str, split: Split | None = None, parallel: TensorParallel = ONE_RANK
    ) -> torch.Tensor:
        """A tensor that a file holds, or the rank's share of it."""
        try:
            if split is not None:
                return split.cut(self._open(file).get_slice(name), parallel)
            tensor: torch.Tensor = self._open(file).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: tensor '{name}' cannot be read ({error})") from None
        return tensor

    def int8(self, name: str) -> Int8Weight:
        """One of ``quantized``, as it is stored."""
        raise NotImplementedError(f"tensor '{name}' is stored whole")

    def first_dtype(self) -> str:
        """Type name of the first tensor, as torch spells it."""
        return str(self.tensor(min(self.file_of)).dtype)


def _bits(dtype: str) -> int:
    """Of a type as safetensors writes it: F32, BF16, F8_E4M3, BOOL."""
    digits = re.match(r"[A-Z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8


def _read_index(path: Path) -> dict[str, Path]:
    """Tensor name -> file. Raises ModelError."""
    weight_map = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{path / INDEX_NAME}: field 'weight_map' must map tensor names to file names")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise ModelError(f"{path / INDEX_NAME}: '{name}' is not a plain file name")
        if not (path / name).is_file():
            raise ModelError(f"{path} has no {name}, which {INDEX_NAME} names")
    return {tensor: path / name for tensor, name in weight_map.items()}


def _find_files(path: Path) -> tuple[Path, ...]:
    """Without an index: ``model.safetensors`` alone, else all that looks like a part of the model."""
    if (path / MODEL_NAME).is_file():
        return (path / MODEL_NAME,)
    files = sorted(f for f in path.glob("*.safetensors") if not _is_beside_the_model(f.name))
    if not files:
        raise ModelError(f"{path} has no *.safetensors (use --load-format dummy for random weights)")
    return tuple(files)


def _is_beside_the_model(name: str) -> bool:
    return name.startswith(NOT_THE_MODEL) or name.endswith(SIDE_SUFFIXES)


def check_names_and_shapes(checkpoint: Checkpoint, table: TensorTable) -> frozenset[str]:
    """Compares a checkpoint with what its family needs; returns which optional tensors it holds.

    Raises ModelError for the first missing, unexpected or wrongly shaped tensor.
    """
    stored = {name for name in checkpoint.file_of if not name.endswith(table.ignored_suffixes)}
    wanted = table.required | table.optional
    missing = [name for name in table.required if name not in stored]
    if missing:
        raise ModelError(f"{checkpoint.path}: tensor '{missing[0]}' is missing{_and_more(missing)}")
    unexpected = sorted(stored - wanted.keys())
    if unexpected:
        raise ModelError(f"{checkpoint.path}: tensor '{unexpected[0]}' is unexpected{_and_more(unexpected)}")
    for name in sorted(stored):
        if checkpoint.shape(name) != wanted[name]:
            got, expected = list(checkpoint.shape(name)), list(wanted[name])
            raise ModelError(f"{checkpoint.file_of[name]}: tensor '{name}' has shape {got}, expected {expected}")
    return frozenset(table.optional.keys() & stored)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


class CheckpointSource:
    """Hands out checked tensors of a checkpoint on a device; of those in ``splits`` the rank's share. ``progress`` is told
    of bytes read, and of how many."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        splits: Splits = MappingProxyType({}),
        parallel: TensorParallel = ONE_RANK,
        progress: Progress = no_progress,
    ) -> None:
        self._progress = progress
        self._done = 0
        self._total = sum(map(checkpoint.num_bytes, checkpoint.file_of))
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._splits = splits if parallel.size > 1 else {}
        self._parallel = parallel

    def take(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in ``dtype`` (None: the model's). Raises ModelError when it holds NaN or infinity or no floats."""
        stored = self._checkpoint.tensor(name, self._splits.get(name), self._parallel)
        if not stored.is_floating_point():
            raise ModelError(
                f"{self._checkpoint.file_of[name]}: tensor '{name}' has type {stored.dtype}, expected floats"
            )
        tensor = stored.to(self._device, dtype or self._dtype).contiguous()
        if not torch.isfinite(tensor.sum(dtype=torch.float32)):  # one pass; NaN and infinity both survive a sum
            raise ModelError(f"{self._checkpoint.file_of[name]}: tensor '{name}' holds NaN or infinite values")
        self._has_read(name)
        return tensor

    def take_int8(self, name: str) -> Int8Weight:
        """A weight [out, in] in int8, as it is stored or quantised now."""
        if name not in self._checkpoint.quantized:
            return quantize(self.take(name, torch.float32))
        self._has_read(name)
        return self._checkpoint.int8(name)

    def _has_read(self, name: str) -> None:
        self._done += self._checkpoint.num_bytes(name)
        self._progress(min(self._done, self._total), self._total)


class DummySource:
    """Random weights, a function of (seed, tensor name, element) only: the same on every device, in any order of asking.

    Vectors are 1, or 0 where their name ends in ``bias``; everything else has variance 1 / (last dimension). The draws
    are uniform, not normal, so that no transcendental function makes devices differ.
    """

    def __init__(
        self,
        table: TensorTable,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        parallel: TensorParallel = ONE_RANK,
    ) -> None:
        self._shapes = table.required
        self._splits = table.splits if parallel.size > 1 else {}
        self._parallel = parallel
        self._dtype = dtype
        self._device = device
        self._seed = seed

    def take(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A made-up tensor in ``dtype`` (None: the model's); of one that is split, the rank's share."""
        whole = self._whole(name, dtype or self._dtype)
        split = self._splits.get(name)
        return whole if split is None else split.cut(whole, self._parallel).contiguous()

    def take_int8(self, name: str) -> Int8Weight:
        """The same quantised."""
        return quantize(self.take(name, torch.float32))

    def _whole(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=self._device)
        key, count = self._key(name), math.prod(shape)
        scale = (12.0 / shape[-1]) ** 0.5 / (1 << 16)  # a uniform of width w has variance w**2 / 12
        draws = -(-count // _ELEMENTS_A_DRAW)
        chunk = _DUMMY_CHUNK if self._device.type == "cpu" else _DUMMY_CHUNK << 10
        parts = []
        for first in range(0, draws, chunk):
            lanes = torch.arange(first, min(first + chunk, draws), device=self._device)
            elements = bits_of_key(key, lanes).view(torch.int16)
            parts.append(elements.float().add_(0.5).mul_(scale).to(dtype))
        return torch.cat(parts).narrow(0, 0, count).view(shape)

    def _key(self, name: str) -> torch.Tensor:
        """int64 key of (seed, name), on the device."""
        digest = int.from_bytes(sha256(name.encode()).digest()[:8], "little", signed=True)
        seed, place = (torch.tensor(n, device=self._device) for n in (self._seed, digest))
        return row_key(seed, seed >> 32, place)
