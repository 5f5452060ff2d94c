"""The tensors that stages read and write: static ones of each decode stage and bucket, uploaded ones of a prefill.

Knows the shapes of frames, not what stages do.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from depthbatch.common.frames import (
    ROW_AUX,
    ROW_FIELDS,
    ROW_LANE,
    ROW_POSITION,
    ROW_SLOT,
    TARGET_FIELDS,
    UPDATE_FIELDS,
    Int32Array,
    PrefillFrame,
    Stage,
    logprob_fields,
    prefill_slices,
    prefill_words,
    split_prefill_frame,
)
from depthbatch.worker.attention.backend import PrefillRows
from depthbatch.worker.runner.stage_input import StageLimits
from depthbatch.worker.sampling.logprobs import num_likeliest


class DecodeBuffers:
    """Static tensors of one decode stage at one bucket, so that a captured graph can own them.

    ``frame`` is the stage's input exactly as it travels; slots, positions, aux and lanes are its rows.
    """

    def __init__(self, bucket: int, device: torch.device, logprob_columns: int = 0) -> None:
        """``logprob_columns``: width of a row of logprobs, where the stage has some."""
        self.bucket = bucket
        self.frame = torch.zeros(ROW_FIELDS, bucket, dtype=torch.int32, device=device)
        self.planes = torch.zeros(bucket, dtype=torch.int32, device=device)
        # What the host gets of a row: the depth it predicts (prelude), whether its gate fired (core), its token (coda).
        self.values = torch.zeros(bucket, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(bucket, logprob_columns, dtype=torch.int32, device=device)

    @property
    def slots(self) -> Tensor:
        """int32 [bucket]"""
        return self.frame[ROW_SLOT]

    @property
    def positions(self) -> Tensor:
        """int32 [bucket]"""
        return self.frame[ROW_POSITION]

    @property
    def aux(self) -> Tensor:
        """int32 [bucket]: new block (prelude), loop (core) or exit loop (coda; below 0: a draft is read)."""
        return self.frame[ROW_AUX]

    @property
    def lanes(self) -> Tensor:
        """int32 [bucket]"""
        return self.frame[ROW_LANE]

    def fill(self, frame: Int32Array) -> None:
        """Takes a frame, int32 [4 * bucket]; on another device than the CPU the copy is waited for."""
        rows = frame.reshape(ROW_FIELDS, self.bucket)
        if self.frame.is_cpu:
            self.frame.numpy()[...] = rows
        else:
            self.frame.copy_(torch.tensor(rows))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.frame, self.planes, self.values, self.logprobs)

    @staticmethod
    def bytes_a_row(logprob_columns: int) -> int:
        """Of ``tensors``."""
        return 4 * (ROW_FIELDS + 2 + logprob_columns)

    def part(self, bucket: int) -> "DecodeBuffers":
        """Buffers of a smaller bucket in the memory of these."""
        part = DecodeBuffers.__new__(DecodeBuffers)
        part.bucket = bucket
        part.frame = self.frame.view(-1)[: ROW_FIELDS * bucket].view(ROW_FIELDS, bucket)
        part.planes, part.values, part.logprobs = self.planes[:bucket], self.values[:bucket], self.logprobs[:bucket]
        return part


class SharedDecodeBuffers(dict[tuple[Stage, int], DecodeBuffers]):
    """Those of every decode stage and bucket in the memory of the largest bucket, for a runner that runs one stage at a
    time: a set for each of thousands of sizes would take memory that grows with their square."""

    def __init__(self, limits: StageLimits, device: torch.device) -> None:
        super().__init__()
        largest = limits._replace(buckets=limits.buckets[-1:])
        self.whole = {stage: buffers for (stage, _), buffers in decode_buffers(largest, device).items()}

    def __missing__(self, key: tuple[Stage, int]) -> DecodeBuffers:
        self[key] = self.whole[key[0]].part(key[1])
        return self[key]


def decode_buffers(limits: StageLimits, device: torch.device) -> dict[tuple[Stage, int], DecodeBuffers]:
    """One set for every decode stage and bucket."""
    columns = logprob_columns(limits)
    return {
        (stage, bucket): DecodeBuffers(bucket, device, columns if stage is Stage.CODA else 0)
        for stage in (Stage.PRELUDE, Stage.CORE, Stage.CODA)
        for bucket in limits.buckets
    }


def logprob_columns(limits: StageLimits) -> int:
    """int32 of a token's logprobs."""
    return logprob_fields(num_likeliest(limits.vocab_size))


class PrefillInput(NamedTuple):
    """Packed prompt chunks. Tensors are int32 on the device.

    What has a data-dependent size is taken from the host, so that preparing a prefill never waits for the device.
    """

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
    forced: Tensor | None = None  # [n, 2]: slot, token that it goes on with instead of a sampled one

    @classmethod
    def from_frame(
        cls,
        host: PrefillFrame,
        frame: Tensor,
        sampled: Tensor,
        targets: Tensor | None = None,
        depths: Tensor | None = None,
        forced: Tensor | None = None,
    ) -> "PrefillInput":
        """The frame on the host, the same frame on the device, flat, and there the indices of what is sampled."""
        at = prefill_slices(host.slots.size, host.token_ids.size, len(host.updates))
        return cls(
            tuple(host.starts.tolist()),
            tuple(host.lengths.tolist()),
            frame[at.slots],
            frame[at.starts],
            frame[at.lengths],
            frame[at.token_ids],
            frame[at.updates].view(-1, UPDATE_FIELDS),
            sampled,
            frame.new_empty(0, TARGET_FIELDS) if targets is None else targets,
            depths,
            forced,
        )

    @classmethod
    def upload(
        cls, frame: Int32Array, n_seqs: int, n_tokens: int, n_updates: int, device: torch.device
    ) -> "PrefillInput":
        """Copies a frame to the device. Raises ValueError when its size is not that of the counts."""
        host = split_prefill_frame(frame, n_seqs, n_tokens, n_updates)
        on_device, sampled = (torch.tensor(values, device=device) for values in (frame, host.sampled))
        return cls.from_frame(host, on_device, sampled)

    @classmethod
    def dummy(cls, n_tokens: int, device: torch.device) -> "PrefillInput":
        """One prompt of the dummy slot, which is sampled."""
        at, frame = prefill_slices(1, n_tokens, 0), np.zeros(prefill_words(1, n_tokens, 0), np.int32)
        frame[at.lengths], frame[at.sample] = n_tokens, 1
        return cls.upload(frame, 1, n_tokens, 0, device)

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
