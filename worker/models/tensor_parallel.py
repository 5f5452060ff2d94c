"""How ranks share a model's tensors: each declares along which dimension it is cut, and into what (``TensorTable.splits``).

A rank has its share of the heads and of the MLP; what is not declared it has whole. Knows no process and no network.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch


def _alone(x: torch.Tensor) -> torch.Tensor:
    return x


class TensorParallel(NamedTuple):
    """Which rank of how many."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = _alone  # the sum over ranks; may overwrite its argument


ONE_RANK = TensorParallel()


class Split(NamedTuple):
    """A tensor whose dimension ``dim`` holds parts, one behind the other, of which every rank gets an equal share.

    ``counts``: how many units each part has, heads for instance; ``unit``: elements a unit, which is never cut.
    """

    dim: int
    counts: tuple[int, ...]
    unit: int = 1

    def slices(self, parallel: TensorParallel) -> list[slice]:
        """Along ``dim``, in order: what the rank has of each part."""
        slices, start = [], 0
        for count in self.counts:
            share = count * self.unit // parallel.size
            slices.append(slice(start + parallel.rank * share, start + (parallel.rank + 1) * share))
            start += count * self.unit
        return slices

    def cut(self, whole: Any, parallel: TensorParallel) -> torch.Tensor:
        """The rank's share of ``whole``: a tensor, or a safetensors slice, of which nothing else is then read."""
        before = (slice(None),) * self.dim
        parts = [whole[(*before, part)] for part in self.slices(parallel)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


Splits = Mapping[str, Split]


def degrees(splits: Iterable[Split]) -> tuple[int, ...]:
    """Numbers of ranks that divide every part of every tensor, ascending; only 1 where nothing is declared."""
    common = math.gcd(*(count for split in splits for count in split.counts)) or 1
    return tuple(size for size in range(1, common + 1) if common % size == 0)


def spelt(counts: tuple[int, ...]) -> str:
    """1 rank; 1, 2 or 4 ranks."""
    *others, last = map(str, counts)
    return f"{', '.join(others)} or {last} ranks" if others else f"{last} rank"
