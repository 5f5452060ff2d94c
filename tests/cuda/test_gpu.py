"""What only a device can show: real streams, events and graphs, compiled Triton, FlashAttention where it is installed.

The same comparisons run on the CPU with stand-ins (test_overlapped.py, test_piecewise.py, test_paged_backends.py).
"""

import time

import msgspec
import numpy as np
import pytest
import torch

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import PLAIN
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry, DecodeRows, PrefillRows
from depthbatch.worker.attention.flash_library import find_flash_library
from depthbatch.worker.attention.paged import FlashAttention, TritonAttention
from depthbatch.worker.attention.sdpa import SdpaAttention
from depthbatch.worker.build import assemble
from depthbatch.worker.layers import ops_triton
from depthbatch.worker.layers.ops import small_ops
from depthbatch.worker.models.loader import load_model
from depthbatch.worker.runner.accelerator import CudaAccelerator, Lane
from depthbatch.worker.runner.overlapped import OverlappedRunner
from depthbatch.worker.runner.stage_tensors import DecodeBuffers, PrefillInput
from depthbatch.worker.runner.stages import PrefillAttention
from fakes.overlapped_serving import configure, requests, serve
from fakes.paged_rows import MAX_BLOCKS, SEQUENCES, heads, prefill_rows, shuffled_tables
from fakes.small_op_cases import cases

pytestmark = pytest.mark.gpu
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("model", ["ouro-tiny", "huginn-tiny"])
def test_graphs_equal_the_cpu(model: str, layout: KVLayout, backend: str) -> None:
    """Tokens and depths of captured fp32 stages under lookahead equal those of the plain CPU runner in lock-step,
    for greedy, sampled, penalised and scored requests that exit early where the layout allows it."""
    own = Gate.DELAYED if model == "ouro-tiny" else Gate.CONVERGENCE
    gate = own if layout.allows_early_exit else Gate.NONE
    plain_config, config = (configure(model, mode, layout) for mode in ("off", "lookahead"))
    plain = assemble(plain_config, load_model(plain_config.model, "float32", CPU), CPU, "sdpa")
    submits = requests(gate, plain.info.r_max)
    want, _ = serve(Scheduler(SchedulerConfig.resolve(plain_config, plain.info)), plain.runner, submits)
    config = msgspec.structs.replace(config, block_size=16)
    built = assemble(config, load_model(config.model, "float32", CUDA), CUDA, backend)
    assert isinstance(built.runner, OverlappedRunner)
    got, deepest = serve(Scheduler(SchedulerConfig.resolve(config, built.info)), built.runner, submits)
    assert deepest > 2
    for key in want:
        assert got[key][:2] == want[key][:2]


def test_pieces_equal_eager() -> None:
    """Prefill through graphs gives the tokens and the cache of the eager one, at a captured count and below it."""
    config = configure("huginn-tiny", "off", KVLayout.SINGLE)
    runners = [assemble(config, load_model(config.model, "float32", CUDA), CUDA, "triton").runner for _ in range(2)]
    for tokens in (48, 7):
        results = []
        for runner, pieced in zip(runners, (True, False), strict=True):
            assert isinstance(runner, OverlappedRunner)
            context = runner._pieces.context if pieced else PrefillAttention
            with torch.inference_mode():
                done = runner.stages.prefill(PrefillInput.dummy(tokens, CUDA), PLAIN, context)
            backend = runner.stages.backend
            assert isinstance(backend, TritonAttention)
            results.append((done.sampled.tokens, *(cache[0, : min(tokens, 16)] for cache in backend.k_cache)))
        torch.cuda.synchronize()
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def backends(dtype: torch.dtype) -> list[tuple[type, int]]:
    library = find_flash_library() if dtype is torch.bfloat16 else None
    return [(TritonAttention, 16)] + ([(FlashAttention, library.block_size)] if library else [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(4, 128), (2, 96), (4, 24)])
def test_compiled_attention_equals_oracle(kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Prefill of prompts and of chunks behind them, then decode at mixed planes, against gather + SDPA on the device."""
    torch.manual_seed(head_dim)
    for kind, size in backends(dtype):
        geometry = CacheGeometry(1 + MAX_BLOCKS * SEQUENCES, size, 4, kv_heads, head_dim, (1, 3), dtype, CUDA)
        library = find_flash_library()
        tested: AttentionBackend = kind(geometry, library) if kind is FlashAttention else kind(geometry)
        oracle, tables = SdpaAttention(geometry), shuffled_tables().to(CUDA)
        firsts, seconds = (size - 3, 5, 2 * size, 1), (7, 3, 1, size + 1)
        for layer, planes in enumerate(geometry.planes):
            for plane in range(planes):
                for starts, lengths in (((0,) * SEQUENCES, firsts), (firsts, seconds)):
                    q, k, v = (x.to(CUDA, dtype) for x in heads(sum(lengths), geometry))
                    rows = on_cuda(prefill_rows(starts, lengths, plane, shuffled_tables()))._replace(
                        block_tables=tables
                    )
                    close(tested.prefill(layer, q, k, v, rows), oracle.prefill(layer, q, k, v, rows), dtype)
            contexts = [0, *(a + b for a, b in zip(firsts, seconds, strict=True))]
            slots = torch.tensor([3, 1, 4, 2], dtype=torch.int32, device=CUDA)
            positions = torch.tensor(contexts, dtype=torch.int32, device=CUDA)[slots.long()] - 1
            plane_of = torch.tensor([0, 2, 1, 0], dtype=torch.int32, device=CUDA) % planes
            q, k, v = (x.to(CUDA, dtype) for x in heads(4, geometry))
            rows = DecodeRows(slots, positions, plane_of, tables)
            close(tested.decode(layer, q, k, v, rows), oracle.decode(layer, q, k, v, rows), dtype)


def on_cuda(rows: PrefillRows) -> PrefillRows:
    return PrefillRows(*(part.to(CUDA) if isinstance(part, torch.Tensor) else part for part in rows))


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    bound = 2e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.float(), want.float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_small_operators(dtype: torch.dtype) -> None:
    """As in test_small_ops.py, compiled; and they are what a CUDA tensor gets."""
    assert small_ops(torch.zeros(1, device=CUDA)) is ops_triton
    for case in cases(dtype, CUDA):
        case.check()


def test_a_frame_is_not_overwritten_before_it_is_copied() -> None:
    """Two fills while the device is busy: each is seen as it was. The warm-up fills like this, and a block number that
    a later frame brings would end up in the dummy slot's block table."""
    buffers = DecodeBuffers(2, CUDA)
    torch.cuda._sleep(100_000_000)
    buffers.fill(np.arange(6, dtype=np.int32))
    first = buffers.frame.clone()
    buffers.fill(np.full(6, 9, np.int32))
    assert first.flatten().tolist() == list(range(6))


def test_lanes_and_marks() -> None:
    """A lane waits for another's mark, marks carry times on the host's clock, and copies from the ring's memory do not
    block the host: 64 MB each way are submitted in less time than they take."""
    accelerator = CudaAccelerator(CUDA)
    words = 16 << 20
    host, device = accelerator.host_buffer(words), torch.zeros(words, dtype=torch.int32, device=CUDA)
    back = accelerator.host_buffer(words)
    torch.cuda.synchronize()
    host.numpy()[...] = np.arange(words, dtype=np.int32)
    began_s = time.monotonic()
    started = accelerator.mark(Lane.UPLOAD)
    accelerator.submit(Lane.UPLOAD, lambda: device.copy_(host, non_blocking=True))
    accelerator.wait_on_lane(Lane.COMPUTE, accelerator.mark(Lane.UPLOAD))
    accelerator.submit(Lane.COMPUTE, lambda: device.add_(1))
    accelerator.wait_on_lane(Lane.DOWNLOAD, accelerator.mark(Lane.COMPUTE))
    accelerator.submit(Lane.DOWNLOAD, lambda: back.copy_(device, non_blocking=True))
    ended = accelerator.mark(Lane.DOWNLOAD)
    accelerator.wait(ended)
    assert back[:3].tolist() == [1, 2, 3] and int(back[-1]) == words
    taken_s = accelerator.passed_s(ended) - accelerator.passed_s(started)
    assert 64e6 * 2 / 200e9 < taken_s < time.monotonic() - began_s + 1e-3
    assert abs(accelerator.passed_s(ended) - time.monotonic()) < 0.5
