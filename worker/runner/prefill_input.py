"""A prefill frame as the stage reads it: counts from the host's copy, tensors from the device's.

Everything with a data-dependent size is taken from the host, so that preparing a prefill never waits for the device.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from depthbatch.common.frames import TARGET_FIELDS, Int32Array, split_prefill_frame
from depthbatch.worker.attention.interface import PrefillRows


class PrefillInput(NamedTuple):
    """Packed prompt chunks. Tensors are int32 on the device."""

    starts_host: tuple[int, ...]
    lengths_host: tuple[int, ...]
    slots: Tensor  # [n_seqs]
    starts: Tensor  # [n_seqs]
    lengths: Tensor  # [n_seqs]
    token_ids: Tensor  # [n_tokens]
    updates: Tensor  # [n_updates, 3]
    sampled: Tensor  # [n_sampled]: which sequences end their prompt here
    targets: Tensor  # [n_targets, 2]: index among the tokens, token whose logprob is wanted there
    depths: Tensor | None = None  # [n_tokens]: loops that each token runs; None: r_max
    known: Tensor | None = None  # [n, 2]: slot, token that it goes on with instead of a sampled one

    @classmethod
    def from_frame(
        cls,
        frame: Int32Array,
        on_device: Tensor,
        sampled: Tensor,
        n_tokens: int,
        n_updates: int,
        targets: Tensor | None = None,
    ) -> "PrefillInput":
        """The frame on the host, the same frame on the device, and the indices of its sequences with sample = 1.

        Raises ValueError when the frame's size is not that of its counts.
        """
        n_seqs = (frame.size - n_tokens - 3 * n_updates) // 4
        host = split_prefill_frame(frame, n_seqs, n_tokens, n_updates)
        heads = on_device[: 4 * n_seqs].view(4, n_seqs)
        token_ids = on_device[4 * n_seqs : 4 * n_seqs + n_tokens]
        updates = on_device[4 * n_seqs + n_tokens :].view(n_updates, 3)
        starts, lengths = tuple(host.starts.tolist()), tuple(host.lengths.tolist())
        if targets is None:
            targets = on_device.new_empty(0, TARGET_FIELDS)
        return cls(starts, lengths, heads[0], heads[1], heads[2], token_ids, updates, sampled, targets)

    @classmethod
    def upload(cls, frame: Int32Array, n_tokens: int, n_updates: int, device: torch.device) -> "PrefillInput":
        """Copies a frame to the device, the plain way."""
        n_seqs = (frame.size - n_tokens - 3 * n_updates) // 4
        sampled = sampled_sequences(frame, n_seqs)
        on_device, indices = torch.tensor(frame, device=device), torch.tensor(sampled, device=device)
        return cls.from_frame(frame, on_device, indices, n_tokens, n_updates)

    @classmethod
    def dummy(cls, n_tokens: int, device: torch.device) -> "PrefillInput":
        """One prompt of the dummy slot, which is sampled."""
        frame = np.zeros(4 + n_tokens, np.int32)
        frame[2:4] = n_tokens, 1
        return cls.upload(frame, n_tokens, 0, device)

    def with_rare(self, rare: Mapping[str, Tensor]) -> "PrefillInput":
        """With what few prefills have, by field name."""
        return self._replace(
            targets=rare.get("targets", self.targets), depths=rare.get("depths"), known=rare.get("known")
        )

    def rows(self, block_table: Tensor) -> PrefillRows:
        """Where every token belongs, at plane 0."""
        count = len(self.token_ids)
        cu_lengths = torch.nn.functional.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        shift = (self.starts - cu_lengths[:-1]).repeat_interleave(self.lengths, output_size=count)
        positions = torch.arange(count, dtype=torch.int32, device=shift.device) + shift
        return PrefillRows(
            slots=self.slots,
            starts=self.starts,
            lengths=self.lengths,
            cu_lengths=cu_lengths,
            token_slots=self.slots.repeat_interleave(self.lengths, output_size=count),
            positions=positions,
            plane=0,
            block_tables=block_table,
            starts_host=self.starts_host,
            lengths_host=self.lengths_host,
        )


def sampled_sequences(frame: Int32Array, n_seqs: int) -> Int32Array:
    """Indices of a frame's sequences with sample = 1."""
    return np.flatnonzero(frame[3 * n_seqs : 4 * n_seqs]).astype(np.int32)
