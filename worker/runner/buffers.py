"""Static memory of the stages: what a stage reads and writes at addresses that never change.

One set a (stage, bucket), so that a captured graph can own it. Knows the shapes of frames, not what stages do.
"""

import torch
from torch import Tensor

from depthbatch.common.frames import ROW_AUX, ROW_FIELDS, ROW_POSITION, ROW_SLOT, Int32Array


class DecodeBuffers:
    """Buffers of one decode stage at one bucket.

    ``frame`` is the stage's input exactly as it travels; slots, positions and aux are its rows.
    """

    def __init__(self, bucket: int, device: torch.device, score_columns: int = 0) -> None:
        """``score_columns``: width of a row of scores, where the stage has some."""
        self.bucket = bucket
        self._host = torch.zeros(ROW_FIELDS, bucket, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.frame = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self.planes = torch.zeros(bucket, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(bucket, dtype=torch.int32, device=device)
        self.flags = torch.zeros(bucket, dtype=torch.uint8, device=device)
        self.scores = torch.zeros(bucket, score_columns, dtype=torch.int32, device=device)

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
        """int32 [bucket]: new block (prelude), loop (core) or exit loop (coda)."""
        return self.frame[ROW_AUX]

    def fill(self, frame: Int32Array) -> None:
        """Takes a frame: int32 [3 * bucket]. One copy on the CPU; to another device one more, and it is waited for,
        since the next fill overwrites what it reads."""
        self._host.numpy()[...] = frame.reshape(ROW_FIELDS, self.bucket)
        if self.frame is not self._host:
            self.frame.copy_(self._host)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.frame, self.planes, self.tokens, self.flags, self.scores)
