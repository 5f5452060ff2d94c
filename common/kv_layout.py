"""KV layouts: which of a block's S planes a row uses at loop r (architecture, section 5).

A core layer's cache has ``num_blocks * S`` physical blocks; logical block ``j`` owns the physical blocks
``j * S .. j * S + S - 1``, its planes::

    logical block j:   | plane 0 | plane 1 | ... | plane S-1 |      each [heads, block_size, head_dim]

Knows nothing of tensors; loops count from 1.
"""

from enum import StrEnum

from depthbatch.common.errors import ConfigError

_GIB = 1 << 30


class KVLayout(StrEnum):
    """The published names of the ways to store K/V of several loops."""

    SINGLE = "single"
    FIRST_THEN_SHARED = "first_then_shared"
    LAST_EXITED = "last_exited"
    DEPTH_INDEXED = "depth_indexed"

    def num_planes(self, r_max: int) -> int:
        """S, the KV slots per core layer and token."""
        match self:
            case KVLayout.SINGLE:
                return 1
            case KVLayout.FIRST_THEN_SHARED:
                return min(2, r_max)
            case _:
                return r_max

    def plane(self, loop: int) -> int:
        """The plane that loop ``loop`` (1-based) writes and reads."""
        match self:
            case KVLayout.SINGLE:
                return 0
            case KVLayout.FIRST_THEN_SHARED:
                return min(loop - 1, 1)
            case _:
                return loop - 1

    def planes_to_fill(self, exit_loop: int, r_max: int) -> range:
        """Planes that must receive a copy of plane ``plane(exit_loop)`` when a token exits at ``exit_loop``."""
        match self:
            case KVLayout.FIRST_THEN_SHARED:
                return range(1, 2) if exit_loop == 1 < r_max else range(0)
            case KVLayout.LAST_EXITED:
                return range(exit_loop, r_max)
            case _:
                return range(0)

    def keeps_every_loop(self, r_max: int) -> bool:
        """True when no loop writes over what an earlier one has written.

        Only then does a token see the same K/V of another whether the two run together (prefill) or one after the
        other (decode): in a shared plane it sees the loop that the other is at, or the other's last one.
        """
        return self.num_planes(r_max) == r_max

    @property
    def allows_early_exit(self) -> bool:
        """False for ``depth_indexed``: a token that exits early would leave holes that deeper tokens read."""
        return self is not KVLayout.DEPTH_INDEXED


def swap_blocks(host_bytes: int, block_bytes: int, most: int) -> int:
    """Logical blocks of ``block_bytes`` that fit into host memory, ``most`` at most: what all sequences can fill. 0 without
    any memory; raises ConfigError where there is some, and not one fits."""
    if 0 < host_bytes < block_bytes:
        raise ConfigError(f"swap_space {host_bytes / _GIB:.4g} GiB holds no KV block of {block_bytes / _GIB:.4f} GiB")
    return min(host_bytes // block_bytes, most)
