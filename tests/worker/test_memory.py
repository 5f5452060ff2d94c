"""Sizing of memory: every refusal carries the numbers, and what is promised fits into what is free."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import Stage
from depthbatch.common.messages import WIRE_VERSION, WorkerReady
from depthbatch.scheduler import process
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.worker import build
from depthbatch.worker.device import KVPlan, KVRequest, plan_kv, set_threads
from depthbatch.worker.memory_plan import beside_kv, check_weights, plan_memory
from depthbatch.worker.models.checkpoint import Checkpoint, no_progress
from depthbatch.worker.models.loader import open_model_dir, read_spec, weight_bytes
from depthbatch.worker.process import build as build_device
from depthbatch.worker.runner.stage_input import StageLimits
from depthbatch.worker.runner.stage_tensors import DecodeBuffers, SharedDecodeBuffers
from depthbatch.worker.slots import SlotState

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


# --- what runs beside the KV cache


@pytest.mark.parametrize(("slots", "blocks", "lanes"), [(1, 1, 1), (7, 5, 1), (3, 2, 4)])
def test_slots_take_what_is_counted(slots: int, blocks: int, lanes: int) -> None:
    """The count before there is a tensor is that of the tensors."""
    spec = read_spec("demo")
    state = SlotState(slots, blocks, spec, torch.device("cpu"), lanes)
    assert SlotState.bytes_needed(slots, blocks, spec, lanes) == sum(tensor.nbytes for tensor in state.tensors())


def test_decode_buffers_of_all_sizes_share_memory() -> None:
    """Bug: a set for each of 8,000 sizes took memory that grows with their square, so that --max-num-seqs 65535 never
    started. Each size is whole, and in the memory of the largest."""
    limits = StageLimits(64, 2, 1, 64, 4, 264, buckets=(1, 3, 64), lanes=1)
    shared = SharedDecodeBuffers(limits, torch.device("cpu"))
    total = sum(tensor.nbytes for buffers in shared.whole.values() for tensor in buffers.tensors())
    columns = shared.whole[Stage.CODA].logprobs.shape[1]
    assert total == 64 * (2 * DecodeBuffers.bytes_a_row(0) + DecodeBuffers.bytes_a_row(columns)) and columns
    for stage in (Stage.PRELUDE, Stage.CORE, Stage.CODA):
        for bucket in limits.buckets:
            part, apart = (
                shared[stage, bucket],
                DecodeBuffers(bucket, torch.device("cpu"), columns * (stage is Stage.CODA)),
            )
            part.fill(np.arange(4 * bucket, dtype=np.int32))
            apart.fill(np.arange(4 * bucket, dtype=np.int32))
            assert torch.equal(part.frame, apart.frame) and part.frame.is_contiguous()
            assert [tensor.shape for tensor in part.tensors()] == [tensor.shape for tensor in apart.tensors()]
            assert part.frame.data_ptr() == shared.whole[stage].frame.data_ptr()


def test_weights_are_counted_before_they_are_read() -> None:
    """By the config alone; gate files beside them apart."""
    model_dir = open_model_dir("demo")
    stored = Checkpoint(model_dir.path)
    required = model_dir.family.tensors(model_dir.config).required
    assert weight_bytes("demo") == 4 * sum(stored.tensor(name).numel() for name in required)
    assert weight_bytes("demo", dtype="bfloat16") == weight_bytes("demo") // 2
    with pytest.raises(ConfigError, match=r"model 'x': its weights take 2\.00 GiB, but only 1\.50 GiB are free"):
        check_weights("x", 2 * GIB, 3 * GIB // 2)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_num_seqs": 65535}, "slots 1"),
        ({"max_num_seqs": 65535, "max_num_batched_tokens": 10**9}, "prefill 10"),
    ],
)
def test_what_does_not_fit_is_one_line(options: dict[str, int], part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the host's memory ran out, for minutes, and a process was killed without a word. Told before anything is taken,
    with what it is needed for."""
    monkeypatch.setattr(build, "free_memory", lambda device: GIB)
    with pytest.raises(ConfigError) as caught:
        build.build_runner(EngineConfig(device="cpu", **options))
    text = str(caught.value)
    assert text.startswith(
        f"max_num_seqs 65535 and max_num_batched_tokens {options.get('max_num_batched_tokens', 8192)} "
    )
    assert part in text and text.endswith("but only 1.00 GiB are free") and "\n" not in text


def test_the_kv_cache_gets_a_share_of_what_is_left() -> None:
    """Less where more runs beside it."""
    spec, cpu = read_spec("demo"), torch.device("cpu")
    plans = [
        plan_memory(EngineConfig(max_num_seqs=width), spec, spec.default_layout, cpu, 2 * GIB)
        for width in (4096, 65535)
    ]
    beside = [beside_kv(EngineConfig(max_num_seqs=width), spec, cpu).total for width in (4096, 65535)]
    assert plans[0].total_bytes > plans[1].total_bytes
    assert all(plan.total_bytes <= 0.4 * (2 * GIB - size) for plan, size in zip(plans, beside, strict=True))


def test_too_many_threads_are_refused() -> None:
    """Bug: libgomp ended the process, "Out of memory allocating 21601344 bytes"."""
    with pytest.raises(ConfigError, match="threads 100000: this machine has"):
        set_threads(100_000)


def test_a_scheduler_without_memory_for_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated device has as much memory as is asked for; its scheduler has not. One line of the user's, no fault."""
    config = EngineConfig(device="simulated:h100-ouro-1.4b", kv_blocks=1 << 31)
    with pytest.raises(ConfigError, match="kv-blocks 2147483649: their numbers have 31 bits"):
        SchedulerConfig.resolve(config, build_device(config, no_progress)[1])
    config = EngineConfig(device="simulated:h100-ouro-1.4b", kv_blocks=1 << 20)

    def no_memory(config: SchedulerConfig) -> None:
        raise MemoryError

    monkeypatch.setattr(process, "Scheduler", no_memory)
    scheduler = process.SchedulerProcess.__new__(process.SchedulerProcess)
    scheduler._options, scheduler.core = config, None
    scheduler.worker = SimpleNamespace(take=lambda *_: None)
    with pytest.raises(ConfigError, match="no memory for its tables of 1048576 KV blocks and max_num_seqs 64"):
        scheduler._take_worker(b"", WorkerReady(1, build_device(config, no_progress)[1], WIRE_VERSION))
