"""The CUDA path with every attention backend on fake ``cuda`` tensors: no host read, no mix of devices, no CPU kernel.

FlashAttention 2 and 3 and the Triton decode are twins that check their call contracts. Nothing is computed here; numbers
are compared in test_paged_backends.py (backends) and test_piecewise.py (captured prefill).
"""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.bias
from torch._subclasses.fake_tensor import DataDependentOutputException

from depthbatch.common.frames import MAX_LOGPROBS, logprob_fields, split_prefill_frame
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import PLAIN, Variant
from depthbatch.worker.attention import triton_decode
from depthbatch.worker.attention.backend import AttentionBackend, CacheGeometry
from depthbatch.worker.attention.flash_library import FlashAttention2, FlashAttention3
from depthbatch.worker.attention.paged import FlashAttention, TritonAttention
from depthbatch.worker.attention.sdpa import SdpaAttention
from depthbatch.worker.layers.linear import BlockedProduct, PackedProduct
from depthbatch.worker.models.loader import load_model
from depthbatch.worker.runner.overlapped import FULL, forms_of
from depthbatch.worker.runner.prefill_graphs import PiecewisePrefill
from depthbatch.worker.runner.stage_tensors import DecodeBuffers, PrefillInput
from depthbatch.worker.runner.stages import PrefillAttention, Stages
from depthbatch.worker.slots import SlotState
from fakes import triton_twin
from fakes.fake_cuda import fake_cuda
from fakes.flash_twin import flash2_varlen, flash2_with_kvcache, flash3_with_kvcache

CUDA = torch.device("cuda")
FIDELITY = Path(__file__).parent.parent / "data" / "fidelity"
BUCKET = 8
# Two sequences: a chunk behind a cached prefix, and a whole prompt; both end their prompts.
FRAME = np.array([1, 2, 16, 0, 3, 2, 1, 1, *range(5), 1, 0, 3, 2, 1, 4], np.int32)
HOST = split_prefill_frame(FRAME, 2, 5, 2)
EVERYTHING = FULL | Variant.CONSTRAIN


def triton_with_twin(geometry: CacheGeometry) -> AttentionBackend:
    """Its prefill mask is a tensor subclass that fake mode cannot make; test_paged_backends.py runs the real one."""
    backend = TritonAttention(geometry)
    backend._kernels = triton_twin
    return backend


BACKENDS: dict[str, tuple[Callable[[CacheGeometry], AttentionBackend], int]] = {
    "flash2": (lambda g: FlashAttention(g, FlashAttention2(flash2_with_kvcache, flash2_varlen)), 256),
    "flash3": (lambda g: FlashAttention(g, FlashAttention3(flash3_with_kvcache)), 16),
    "triton": (triton_with_twin, 16),
    "sdpa": (SdpaAttention, 16),
}


MODELS = ("ouro-tiny", "huginn-tiny", "retro-llama-tiny", "dory-tiny")
LAYERS = (
    "num_hidden_layers",
    "n_layers_in_prelude",
    "n_layers_in_recurrent_block",
    "n_layers_in_coda",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Configurations with one layer where there are more: every layer runs the same operators."""
    made = {}
    for name in MODELS:
        config = json.loads((FIDELITY / name / "config.json").read_text())
        made[name] = tmp_path_factory.mktemp(name)
        if "hybrid_layer_pattern" not in config:  # there a layer of each kind is needed
            config.update({key: 1 for key in LAYERS if key in config})
        (made[name] / "config.json").write_text(json.dumps(config))
    return made


def fake_stages(model: Path, layout: KVLayout, backend: str) -> Stages:
    """Everything the worker keeps on the device, as fake tensors; called inside the fake mode."""
    loaded = load_model(str(model), dtype="bfloat16", device=CUDA, load_format="dummy", r_max=2, state_init="seeded")
    spec = loaded.spec
    make, block_size = BACKENDS[backend]
    shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.planes_per_layer(layout))
    geometry = CacheGeometry(20, block_size, *shape, spec.dtype, CUDA, spec.windows)
    return Stages(loaded, make(geometry), SlotState(8, 4, spec, CUDA), layout)


def lower_right(length: int, context: int) -> torch.Tensor:
    return torch.ones(length, context, dtype=torch.bool, device=CUDA).tril(context - length)


@contextmanager
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products over weights reordered for a CPU fail to be made; the mask that fake mode cannot make is another."""

    def refuse(*args: Any) -> None:
        raise AssertionError("a CPU product on a cuda model")

    with monkeypatch.context() as patch:
        patch.setattr(PackedProduct, "__init__", refuse)
        patch.setattr(BlockedProduct, "__init__", refuse)
        patch.setattr(torch.nn.attention.bias, "causal_lower_right", lower_right)
        yield


def on_cuda(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cuda" for tensor in tensors)


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_every_form_runs_on_fake_cuda_tensors(
    models: dict[str, Path], model: str, backend: str, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a worker captures (every form of prelude, core and coda; the pieces of prefill) and all that it runs
    uncaptured (prefill, greedy and with all that can be asked for, and that of rebuilt sequences). A host read or a mix of devices raises, as the last test shows."""
    with fake_cuda(), torch.no_grad(), like_cuda(monkeypatch):
        stages = fake_stages(models[model], layout, backend)
        columns = logprob_fields(MAX_LOGPROBS)
        on_device, sampled, targets = (
            torch.empty(shape, dtype=torch.int32, device=CUDA) for shape in (FRAME.size, 2, (4, 2))
        )
        chunks = PrefillInput.from_frame(HOST, on_device, sampled, targets)
        geometry, width = stages.backend.geometry, stages.model.spec.hidden_size

        def trial(context: Any) -> object:
            return stages.prefill(PrefillInput.dummy(1, CUDA), PLAIN, context)

        pieces = PiecewisePrefill(trial, geometry, width, 8, lambda work: work() or work)
        done = stages.prefill(chunks, EVERYTHING, pieces.context)
        assert on_cuda(done.sampled.tokens, done.sampled.logprobs, done.prompt_logprobs)
        assert done.sampled.tokens.shape == (2,) and done.prompt_logprobs.shape == (4, columns)
        depths, forced = (torch.empty(shape, dtype=torch.int32, device=CUDA) for shape in (5, (2, 2)))
        rebuilt = PrefillInput.from_frame(HOST, on_device, sampled[:0], depths=depths, forced=forced)
        for context in (pieces.context, PrefillAttention):
            done = stages.prefill(rebuilt, EVERYTHING, context)
            assert on_cuda(done.sampled.tokens) and done.sampled.tokens.shape == (0,)
        stages.force_tokens(forced)
        buffers = DecodeBuffers(BUCKET, CUDA, columns)
        for form in forms_of(stages.model.spec):
            stages.decode(form.stage, buffers, form.variant)
        assert on_cuda(*buffers.tensors(), *stages.slots.tensors())


def test_the_method_sees_mistakes(models: dict[str, Path]) -> None:
    """What must raise does: a host read inside a backend, a table on another device, a 64-bit position."""
    with fake_cuda(), torch.no_grad():
        stages = fake_stages(models["ouro-tiny"], KVLayout.SINGLE, "triton")
        buffers = DecodeBuffers(BUCKET, CUDA)
        rows = stages.attention(buffers)._rows
        heads = (BUCKET, stages.model.spec.num_heads, stages.model.spec.head_dim)
        q = torch.zeros(heads, dtype=torch.bfloat16, device=CUDA)
        k = q[:, : stages.model.spec.num_kv_heads]
        decode = stages.backend.decode
        assert on_cuda(decode(0, q, k, k, rows))
        with pytest.raises(AssertionError):
            decode(0, q, k, k, rows._replace(positions=rows.positions.long()))
        with pytest.raises((AssertionError, RuntimeError)):
            decode(0, q, k, k, rows._replace(block_tables=torch.zeros(9, 4, dtype=torch.int32)))
        with pytest.raises(DataDependentOutputException):
            rows.positions.sum().item()


@pytest.mark.parametrize("call", ["append_kv", "decode_attention"])
def test_the_twin_takes_what_triton_takes(call: str) -> None:
    """Same parameter names in the same order: a changed call of the kernels cannot pass on the old twin."""
    names = [list(inspect.signature(getattr(module, call)).parameters) for module in (triton_twin, triton_decode)]
    assert names[0] == names[1]
