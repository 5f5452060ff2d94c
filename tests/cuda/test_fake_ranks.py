"""The shares of ranks on fake ``cuda`` tensors and torch's own fake process group: what every form of every stage sums and
broadcasts, by shape and type, on each rank. Nothing is computed; test_ranked_graphs.py compares numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from depthbatch.common.frames import MAX_LOGPROBS, Stage, logprob_fields
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import PLAIN, Variant
from depthbatch.worker.models.loader import read_spec
from depthbatch.worker.models.tensor_parallel import TensorParallel
from depthbatch.worker.runner.accelerator import Work
from depthbatch.worker.runner.overlapped import FULL, forms_of
from depthbatch.worker.runner.prefill_graphs import PiecewisePrefill
from depthbatch.worker.runner.ranked import FollowingStages, LeadingStages, all_reduce
from depthbatch.worker.runner.stage_tensors import DecodeBuffers, PrefillInput
from depthbatch.worker.runner.stages import PrefillAttention, Stages
from fakes.fake_cuda import fake_cuda
from fakes.fake_stages import BACKENDS, BUCKET, CUDA, FRAME, HOST, fake_stages, like_cuda, on_cuda, one_layer_each

MODELS = ("ouro-tiny", "huginn-tiny", "nanbeige-tiny", "retro-llama-tiny")
SIZE, TOKENS = 2, 8


class Collective(NamedTuple):
    """One, as a rank calls it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def sums(count: int, rows: int, stages: Stages) -> list[Collective]:
    """Of ``count`` layers: attention and MLP."""
    spec = stages.model.spec
    return [Collective("allreduce_", (rows, spec.hidden_size), spec.dtype, "cuda")] * 2 * count


def tokens(rows: int) -> list[Collective]:
    """What rank 0 tells of a stage that samples."""
    return [Collective("broadcast_", (rows,), torch.int32, "cuda")]


class Heard(TorchDispatchMode):
    """Notes the collectives that pass."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: list[Collective] = []

    def take(self) -> list[Collective]:
        """Those since the last time."""
        heard, self._heard = self._heard, []
        return heard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            [x] = args[0]
            self._heard.append(Collective(func._schema.name.split("::")[1], tuple(x.shape), x.dtype, x.device.type))
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_rank(rank: int) -> Iterator[None]:
    """This process as a rank of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: one_layer_each(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def ranked_stages(model: Path, layout: KVLayout, backend: str, rank: int) -> Stages:
    kind = FollowingStages if rank else LeadingStages
    return fake_stages(model, layout, backend, TensorParallel(rank, SIZE, all_reduce), kind)


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("layout", [KVLayout.LAST_EXITED, KVLayout.SINGLE])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_what_each_rank_sums_and_broadcasts(
    models: dict[str, Path], model: str, backend: str, layout: KVLayout, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is captured (every form of prelude, core and coda, the pieces of prefill) and the prefill around them: on
    rank 0 and on the other, whatever the form, two sums of [rows, hidden] a layer and, where tokens are chosen, one int32
    vector behind them. So what one rank captures or runs meets the same on the other. K/V are a rank's half."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # which torch asks for a broadcast
    with fake_rank(rank), fake_cuda(), torch.no_grad(), like_cuda(monkeypatch), Heard() as heard:
        stages = ranked_stages(models[model], layout, backend, rank)
        spec, geometry = stages.model.spec, stages.backend.geometry
        whole = read_spec(str(models[model]), "bfloat16", "dummy", 2, 1)
        assert (spec.num_heads * SIZE, spec.num_kv_heads * SIZE) == (whole.num_heads, whole.num_kv_heads)
        assert geometry.num_kv_heads == spec.num_kv_heads and spec.hidden_size == whole.hidden_size

        buffers = DecodeBuffers(BUCKET, CUDA, logprob_fields(MAX_LOGPROBS))
        layers = {Stage.PRELUDE: spec.prelude_layers, Stage.CORE: spec.core_layers, Stage.CODA: spec.coda_layers}
        for form in forms_of(spec):
            stages.decode(form.stage, buffers, form.variant)
            expected = sums(layers[form.stage], BUCKET, stages) + (tokens(BUCKET) if form.stage is Stage.CODA else [])
            assert heard.take() == expected, form
        assert on_cuda(*buffers.tensors(), *stages.slots.tensors())

        captured: list[list[Collective]] = []

        def capture(work: Work) -> Work:
            heard.take()
            work()
            captured.append(heard.take())
            return work

        def trial(context: Any) -> object:
            return stages.prefill(PrefillInput.dummy(1, CUDA), PLAIN, context)

        pieces = PiecewisePrefill(trial, geometry, spec.hidden_size, TOKENS, capture)
        blocks = [len(stack.blocks) for stack in pieces._stacks]
        assert captured == [sums(piece > 0, TOKENS, stages) for count in blocks for piece in range(count + 1)]

        on_device, sampled, targets = (
            torch.empty(shape, dtype=torch.int32, device=CUDA) for shape in (FRAME.size, 2, (4, 2))
        )
        asked, variant = (targets, FULL | Variant.CONSTRAIN) if rank == 0 else (None, PLAIN)
        chunks = PrefillInput.from_frame(HOST, on_device, sampled, **({} if asked is None else {"targets": asked}))
        passes = spec.prelude_layers + 2 * spec.core_layers + spec.coda_layers
        for context, rows in ((pieces.context, TOKENS), (PrefillAttention, HOST.token_ids.size)):
            done = stages.prefill(chunks, variant, context)
            assert heard.take() == sums(passes, rows, stages) + tokens(2)
            assert on_cuda(done.sampled.tokens)


def test_the_group_is_torchs(models: dict[str, Path]) -> None:
    """What is noted has gone through torch.distributed: without a group it raises, so no rank can compute on its own."""
    with fake_cuda(), torch.no_grad():
        stages = ranked_stages(models["ouro-tiny"], KVLayout.SINGLE, "triton", 1)
        with pytest.raises(ValueError, match="process group has not been initialized"):
            stages.decode(Stage.CORE, DecodeBuffers(BUCKET, CUDA), PLAIN)
