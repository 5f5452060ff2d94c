"""The CUDA path without a GPU: every stage, model and layout on fake ``cuda`` tensors.

On fake tensors an operator that mixes devices raises, and so does every read of a value (``.item()``, a shape made of
data). Nothing is computed, so this says nothing about numbers; those are compared on the CPU.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from depthbatch.common.frames import MAX_LOGPROBS, logprob_fields, split_prefill_frame
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import PLAIN, Variant
from depthbatch.worker.attention.backend import CacheGeometry
from depthbatch.worker.attention.sdpa import SdpaAttention
from depthbatch.worker.models.loader import load_model
from depthbatch.worker.runner.overlapped import FULL, SAMPLED
from depthbatch.worker.runner.stage_tensors import DecodeBuffers, PrefillInput
from depthbatch.worker.runner.stages import Stages
from depthbatch.worker.slots import SlotState
from fakes.fake_cuda import fake_cuda
from reference.oracle import DORY, HUGINN, NANBEIGE, OURO, RETROFITTED

CUDA = torch.device("cuda")
BUCKET = 8
MODELS = [
    pytest.param(OURO, id="ouro"),
    pytest.param(HUGINN, id="huginn"),
    pytest.param(RETROFITTED[0], id="retrofitted"),
    pytest.param(NANBEIGE, id="nanbeige"),
    pytest.param(DORY, id="dory"),
]


def fake_stages(model_dir: Path, layout: KVLayout, lanes: int) -> Stages:
    """Everything the worker keeps on the device, as fake tensors; called inside the fake mode."""
    model = load_model(str(model_dir), dtype="bfloat16", device=CUDA, load_format="dummy", state_init="seeded")
    spec = model.spec
    geometry = CacheGeometry(
        num_blocks=20,
        block_size=16,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        planes=spec.planes_per_layer(layout),
        dtype=spec.dtype,
        device=CUDA,
        windows=spec.windows,
    )
    return Stages(model, SdpaAttention(geometry), SlotState(8, 4, spec, CUDA, lanes), layout)


@pytest.mark.parametrize(("layout", "lanes"), [*((layout, 1) for layout in KVLayout), (KVLayout.LAST_EXITED, 3)])
@pytest.mark.parametrize("model_dir", MODELS)
def test_every_stage_runs_on_fake_cuda_tensors(model_dir: Path, layout: KVLayout, lanes: int) -> None:
    """All four stages with all variants; outputs stay on the device, with the static buffers' shapes."""
    constrained = FULL | Variant.CONSTRAIN
    frame = np.array([1, 2, 0, 16, 3, 2, 1, 0, *range(5), 1, 0, 3, 2, 1, 4], np.int32)
    with fake_cuda(), torch.no_grad():
        stages = fake_stages(model_dir, layout, lanes)
        on_device = torch.empty(frame.size, dtype=torch.int32, device=CUDA)
        sampled = torch.empty(1, dtype=torch.int32, device=CUDA)
        targets = torch.empty(4, 2, dtype=torch.int32, device=CUDA)
        chunks = PrefillInput.from_frame(split_prefill_frame(frame, 2, 5, 2), on_device, sampled, targets)
        columns = logprob_fields(MAX_LOGPROBS)
        for variant in (SAMPLED, constrained):
            (tokens, logprobs), prompt_logprobs = stages.prefill(chunks, variant)
            assert tokens.device.type == logprobs.device.type == prompt_logprobs.device.type == "cuda"
            assert tokens.shape == (1,) and prompt_logprobs.shape == (4, columns)
        assert logprobs.shape == (1, columns)
        buffers = DecodeBuffers(BUCKET, CUDA, columns)
        stages.prelude(buffers)
        stages.core(buffers, Variant.GATES)
        for variant in (PLAIN, Variant.SAMPLE, SAMPLED, FULL, constrained):
            stages.coda(buffers, variant)
        assert all(tensor.device.type == "cuda" for tensor in buffers.tensors())
        assert all(tensor.device.type == "cuda" for tensor in stages.slots.tensors())


def test_the_method_sees_mistakes() -> None:
    """A host read and a mix of devices do raise, so the passes above mean something."""
    with fake_cuda():
        on_device = torch.zeros(3, device=CUDA)
        with pytest.raises(DataDependentOutputException):
            on_device.sum().item()
        with pytest.raises(RuntimeError, match="device"):
            on_device + torch.zeros(3)
