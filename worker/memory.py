"""How many KV blocks there are, and how long a sequence may be: from the options, or from the free memory.

Without ``--kv-blocks`` the KV memory takes a share of what is free: 85 % on CUDA (the rest is for activations and
graphs), 40 % on the CPU (other processes live there too), but never more than W sequences of the greatest length can
use. Knows nothing of backends; it only counts.
"""

from typing import NamedTuple

from depthbatch.common.errors import ConfigError

FREE_SHARE = {"cuda": 0.85, "cpu": 0.40}
GIB = 1 << 30


class KVRequest(NamedTuple):
    """What is asked for."""

    bytes_per_token: int
    block_size: int
    max_positions: int  # the model's
    max_num_seqs: int
    kv_blocks: int | None  # usable blocks, as the option gives them
    max_model_len: int | None


class KVPlan(NamedTuple):
    """What there will be."""

    num_blocks: int  # dummy block 0 included
    block_size: int
    bytes_per_token: int
    max_model_len: int

    @property
    def max_blocks(self) -> int:
        """Columns of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def tokens_that_fit(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.bytes_per_token

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"KV cache: {self.bytes_per_token / 1024:g} KiB per token, {self.tokens_that_fit} tokens fit "
            f"({self.num_blocks - 1} blocks of {self.block_size}, {self.total_bytes / GIB:.2f} GiB), "
            f"longest sequence {self.max_model_len}"
        )


def plan_kv(request: KVRequest, free_bytes: int, device_type: str) -> KVPlan:
    """Sizes the KV memory; ConfigError with the numbers when it cannot be had or is of no use."""
    length = request.max_model_len or request.max_positions
    if length > request.max_positions:
        raise ConfigError(f"max_model_len {length} is more than the model's {request.max_positions} positions")
    block_bytes = request.bytes_per_token * request.block_size
    blocks = request.kv_blocks or _blocks_from_memory(request, length, free_bytes, device_type)
    if (blocks + 1) * block_bytes > free_bytes:
        raise ConfigError(
            f"kv_blocks {blocks} of {request.block_size} tokens need {(blocks + 1) * block_bytes / GIB:.2f} GiB "
            f"({request.bytes_per_token / 1024:g} KiB per token), but only {free_bytes / GIB:.2f} GiB are free"
        )
    fits = blocks * request.block_size
    if request.max_model_len is not None and fits < length:
        raise ConfigError(f"{blocks} KV blocks hold {fits} tokens, less than max_model_len {length}")
    return KVPlan(blocks + 1, request.block_size, request.bytes_per_token, min(length, fits))


def _blocks_from_memory(request: KVRequest, length: int, free_bytes: int, device_type: str) -> int:
    """Usable blocks in the device's share of the free memory, at most what W sequences can fill."""
    block_bytes = request.bytes_per_token * request.block_size
    share = int(free_bytes * FREE_SHARE[device_type])
    blocks = min(share // block_bytes - 1, request.max_num_seqs * -(-length // request.block_size))
    if blocks < 1:
        raise ConfigError(
            f"no room for the KV cache: {share / GIB:.3f} GiB may be used, two blocks of {request.block_size} tokens "
            f"need {2 * block_bytes / GIB:.3f} GiB"
        )
    return blocks
