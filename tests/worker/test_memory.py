"""KV sizing: every refusal carries the numbers, and what is promised fits into what is free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthbatch.common.errors import ConfigError
from depthbatch.worker.device import KVPlan, KVRequest, plan_kv

KIB, GIB = 1024, 1 << 30


def request(**changes: int | None) -> KVRequest:
    base = KVRequest(
        bytes_per_token=6 * KIB,
        block_size=16,
        max_positions=2048,
        max_num_seqs=8,
        kv_blocks=None,
        max_model_len=None,
    )
    return base._replace(**changes)  # type: ignore[arg-type]


@given(
    st.integers(1, 1 << 20),
    st.sampled_from([1, 16, 256]),
    st.integers(1, 70_000),
    st.integers(1, 512),
    st.none() | st.integers(1, 5000),
    st.none() | st.integers(1, 80_000),
    st.integers(0, 64 * GIB),
    st.sampled_from(["cpu", "cuda"]),
)
def test_a_plan_fits_memory_and_holds_its_longest_sequence(
    per_token: int, block: int, positions: int, width: int, blocks: int | None, length: int | None, free: int, kind: str
) -> None:
    """Any request either gives such a plan or a ConfigError; nothing else can come out."""
    asked = KVRequest(per_token, block, positions, width, blocks, length)
    try:
        plan = plan_kv(asked, free, kind)
    except ConfigError:
        return
    assert plan.total_bytes <= free
    assert 1 <= plan.max_model_len <= min(positions, plan.tokens_that_fit)
    assert plan.max_model_len <= plan.max_blocks * block
    assert length is None or plan.max_model_len == length
    assert blocks is None or plan.num_blocks == blocks + 1


def test_more_blocks_than_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_blocks 20000 of 16 tokens need 1\.83 GiB \(6 KiB per token\).*1\.00 GiB"
    ):
        plan_kv(request(kv_blocks=20_000), GIB, "cpu")


def test_too_few_blocks_for_the_longest_sequence_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="4 KV blocks hold 64 tokens, less than max_model_len 65"):
        plan_kv(request(kv_blocks=4, max_model_len=65), GIB, "cpu")
    assert plan_kv(request(kv_blocks=4, max_model_len=64), GIB, "cpu").max_model_len == 64


def test_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len 2049 is more than the model's 2048"):
        plan_kv(request(max_model_len=2049), GIB, "cpu")


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for the KV cache"):
        plan_kv(request(), 200 * KIB, "cpu")


def test_no_more_blocks_than_sequences_can_use() -> None:
    """8 sequences of 2048 tokens: 1024 blocks, however much memory is free."""
    assert plan_kv(request(), 64 * GIB, "cpu").num_blocks == 1025


def test_the_line_at_start_says_kib_and_tokens() -> None:
    line = KVPlan(101, 16, 6 * KIB, 2048).describe()
    assert "6 KiB per token" in line and "1600 tokens fit" in line
