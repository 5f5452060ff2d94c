"""The CUDA path with every attention backend on fake ``cuda`` tensors: no host read, no mix of devices, no CPU kernel.

FlashAttention 2 and 3 and the Triton decode are twins that check their call contracts. Nothing is computed here; numbers
are compared in test_paged_backends.py (backends) and test_piecewise.py (captured prefill).
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from depthbatch.common.frames import MAX_LOGPROBS, logprob_fields
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import PLAIN, Variant
from depthbatch.worker.attention import triton_decode
from depthbatch.worker.runner.overlapped import FULL, forms_of
from depthbatch.worker.runner.prefill_graphs import PiecewisePrefill
from depthbatch.worker.runner.stage_tensors import DecodeBuffers, PrefillInput
from depthbatch.worker.runner.stages import PrefillAttention
from fakes import triton_twin
from fakes.fake_cuda import fake_cuda
from fakes.fake_stages import BACKENDS, BUCKET, CUDA, FRAME, HOST, fake_stages, like_cuda, on_cuda, one_layer_each

EVERYTHING = FULL | Variant.CONSTRAIN
MODELS = ("ouro-tiny", "huginn-tiny", "retro-llama-tiny", "dory-tiny")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: one_layer_each(name, tmp_path_factory.mktemp(name)) for name in MODELS}


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
