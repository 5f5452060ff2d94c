"""Who may use which block and which slot: two pools with a free list each.

Frees are in stream order: the worker runs stages in the order sent, so a block or slot can be handed to a later stage
as soon as the last stage that touches it has been dispatched.
"""

import numpy as np

from depthbatch.common.frames import Int32Array


class BlockPool:
    """Logical KV blocks 1 .. num_blocks - 1; block 0 is the dummy."""

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks - 1
        self._stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)  # [:height] is free, the top is next
        self._height = self.total

    @property
    def free(self) -> int:
        return self._height

    def take(self, count: int) -> Int32Array:
        """``count`` blocks; the caller has checked ``free``."""
        if count > self.free:
            raise ValueError(f"{count} blocks asked, {self.free} free")
        self._height -= count
        return self._stack[self._height : self._height + count][::-1].copy()

    def give(self, blocks: Int32Array) -> None:
        """Takes blocks back."""
        self._stack[self._height : self._height + blocks.size] = blocks
        self._height += blocks.size

    def free_blocks(self) -> Int32Array:
        """The free blocks, as a view."""
        return self._stack[: self._height]

    def owners(self, blocks: Int32Array) -> Int32Array:
        """How many sequences hold each of these held blocks."""
        return np.ones(blocks.size, np.int32)


class SlotPool:
    """Device slots 1 .. W; slot 0 is the dummy."""

    def __init__(self, width: int) -> None:
        self.total = width
        self._stack = list(range(width, 0, -1))

    @property
    def free(self) -> int:
        return len(self._stack)

    def take(self) -> int:
        return self._stack.pop()

    def give(self, slot: int) -> None:
        self._stack.append(slot)

    def free_slots(self) -> list[int]:
        return list(self._stack)
