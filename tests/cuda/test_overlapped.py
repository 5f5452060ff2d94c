"""The overlapped runner (graphs, staging ring, three streams) against the plain one, on an adverse accelerator."""

import select
from threading import Event

import msgspec
import numpy as np
import pytest
import torch

from depthbatch.common.frames import Stage
from depthbatch.common.gates import Gate
from depthbatch.common.messages import StageBatch, StageExtra
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.build import assemble
from depthbatch.worker.device import resolve_device
from depthbatch.worker.host_kv import HostKV
from depthbatch.worker.models.loader import load_model
from depthbatch.worker.runner.accelerator import CompletionWatch, Lane
from depthbatch.worker.runner.overlapped import OverlappedRunner
from fakes.adverse_accelerator import AdverseAccelerator
from fakes.overlapped_serving import configure, longer, requests, serve, warm


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("model", "layout", "gate"),
    [("ouro-tiny", "last_exited", Gate.DELAYED), ("huginn-tiny", "single", Gate.CONVERGENCE)],
)
def test_overlapped_equals_plain(model: str, layout: str, gate: Gate, seed: int) -> None:
    """Tokens and depths under lookahead on three adversely interleaved lanes equal the plain runner's in lock-step.
    Not luck: without the waits between lanes, or with a staging entry reused early, stages read other stages' frames."""
    device = resolve_device("cpu")
    plain_config = configure(model, "off", layout)
    loaded = load_model(plain_config.model, dtype="float32", device=device, load_format="auto", seed=0)
    plain = assemble(plain_config, loaded, device, "sdpa")
    submits = requests(gate, plain.info.r_max)
    want, alone = serve(Scheduler(SchedulerConfig.resolve(plain_config, plain.info)), plain.runner, submits)
    config = configure(model, "lookahead", layout)
    built = assemble(config, loaded, device, "sdpa")
    overlapped = OverlappedRunner(built.runner.stages, built.runner.limits, AdverseAccelerator(seed), 48)
    got, deepest = serve(Scheduler(SchedulerConfig.resolve(config, built.info)), overlapped, submits)
    assert {key: answer[:2] for key, answer in got.items()} == {key: answer[:2] for key, answer in want.items()}
    for key, answer in want.items():
        np.testing.assert_allclose(got[key][2], answer[2], atol=1e-4)
        assert bool(answer[2]) == (key % 3 == 1 or key % 4 == 0)
    assert alone == 1 and deepest > 2
    assert any(depth < plain.info.r_max for _, depths, _ in got.values() for depth in depths[1:])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("model", "layout", "gate"),
    [("ouro-tiny", "last_exited", Gate.DELAYED), ("huginn-tiny", "single", Gate.CONVERGENCE)],
)
def test_k_and_v_that_went_to_the_host_and_back(model: str, layout: str, gate: Gate, seed: int) -> None:
    """Blocks for a third of the batch: victims' K/V are copied on a lane of their own. Tokens are those of the plain runner
    with enough blocks. Not luck: without the wait before the copies they take what is not written yet, and without the
    one behind them stages write over what is still to be copied, or read what has not come back."""
    device = resolve_device("cpu")
    plain_config = configure(model, "off", layout)
    loaded = load_model(plain_config.model, dtype="float32", device=device, load_format="auto", seed=0)
    plain = assemble(plain_config, loaded, device, "sdpa")
    submits = longer(requests(gate, plain.info.r_max))
    want, _ = serve(Scheduler(SchedulerConfig.resolve(plain_config, plain.info)), plain.runner, submits)
    config = configure(model, "lookahead", layout, preemption="offload", kv_blocks=44, max_model_len=88, block_size=2)
    built = assemble(config, loaded, device, "sdpa")
    stages, limits = built.runner.stages, built.runner.limits
    host_kv = HostKV(stages.backend, built.info.host_blocks)
    overlapped = OverlappedRunner(stages, limits, AdverseAccelerator(seed), 48, host_kv=host_kv)
    scheduler = Scheduler(SchedulerConfig.resolve(config, built.info))
    got, _ = serve(scheduler, overlapped, submits)
    assert {key: answer[:2] for key, answer in got.items()} == {key: answer[:2] for key, answer in want.items()}
    assert scheduler.admission.offload is not None and scheduler.admission.offload.restored_blocks > 3


@pytest.mark.parametrize("mode", ["async", "lookahead"])
@pytest.mark.parametrize(("model", "gate"), [("ouro-tiny", Gate.DELAYED), ("huginn-tiny", Gate.CONVERGENCE)])
def test_drafts_overlapped_equal_none_in_the_plain_runner(model: str, gate: Gate, mode: str) -> None:
    """A draft's token reaches its prelude on the device alone, and what it was is known later, on adversely interleaved
    lanes: tokens and depths are those of the plain runner without speculation."""
    device = resolve_device("cpu")
    plain_config = configure(model, "off", "last_exited")
    loaded = load_model(plain_config.model, dtype="float32", device=device, load_format="auto", seed=0)
    plain = assemble(plain_config, loaded, device, "sdpa")
    submits = warm(requests(gate, plain.info.r_max))
    want, _ = serve(Scheduler(SchedulerConfig.resolve(plain_config, plain.info)), plain.runner, submits)
    config = configure(model, mode, "last_exited", speculation=2)
    built = assemble(config, loaded, device, "sdpa")
    overlapped = OverlappedRunner(built.runner.stages, built.runner.limits, AdverseAccelerator(3), 48)
    scheduler = Scheduler(SchedulerConfig.resolve(config, built.info))
    got, deepest = serve(scheduler, overlapped, submits)
    chains = scheduler.admission.chains
    assert chains is not None and chains.right.sum() > 3 and chains.wrong.sum() > 3
    assert deepest > 2
    assert {key: answer[:2] for key, answer in got.items()} == {key: answer[:2] for key, answer in want.items()}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("model", "layout", "gate"),
    [
        ("ouro-tiny", "last_exited", Gate.DELAYED),
        ("huginn-tiny", "last_exited", Gate.CONVERGENCE),
        ("huginn-tiny", "single", Gate.CONVERGENCE),
    ],
)
def test_rebuilt_sequences_equal_undisturbed_ones(model: str, layout: str, gate: Gate, seed: int) -> None:
    """Everything in flight is given up three times, far enough apart that nobody is blamed for it (quarantine.py), while lanes are adversely interleaved: prefills at every token's own
    depth, and forced tokens put in place of sampled ones, must take their turn among captured stages. Tokens, depths and
    scores are those of the plain runner that nothing disturbs."""
    device = resolve_device("cpu")
    plain_config, config = (
        msgspec.structs.replace(configure(model, mode, layout), max_num_batched_tokens=512)
        for mode in ("off", "lookahead")
    )
    loaded = load_model(config.model, dtype="float32", device=device, load_format="auto", seed=0)
    plain = assemble(plain_config, loaded, device, "sdpa")
    submits = requests(gate, plain.info.r_max)
    want, _ = serve(Scheduler(SchedulerConfig.resolve(plain_config, plain.info)), plain.runner, submits)
    built = assemble(config, loaded, device, "sdpa")
    overlapped = OverlappedRunner(built.runner.stages, built.runner.limits, AdverseAccelerator(seed), 512)
    scheduler = Scheduler(SchedulerConfig.resolve(config, built.info))
    got, _ = serve(scheduler, overlapped, submits, lost_at=(20 + seed, 90, 180))
    assert scheduler.counters.stale_results > 3
    assert {key: answer[:2] for key, answer in got.items()} == {key: answer[:2] for key, answer in want.items()}
    for key, answer in want.items():
        np.testing.assert_allclose(got[key][2], answer[2], atol=1e-4)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_forced_token_takes_the_place_of_the_sampled_one(overlaps: bool) -> None:
    """A row that decodes again is fed what its client has seen, and its penalties count that, even where rounding has
    made it sample another token; which no run here shows, since all of them round alike. Row 2 keeps its own."""
    device = resolve_device("cpu")
    config = configure("huginn-tiny", "off", "single")
    loaded = load_model(config.model, dtype="float32", device=device, load_format="auto", seed=0)
    built = assemble(config, loaded, device, "sdpa")
    stages, runner = built.runner.stages, built.runner
    if overlaps:
        runner = OverlappedRunner(stages, built.runner.limits, AdverseAccelerator(0), 48)
    slots = stages.slots
    slots.token[1:3] = torch.tensor([7, 9], dtype=torch.int32)
    slots.shaping.counts[1, 7] = slots.shaping.counts[2, 9] = 1
    bucket = min(bucket for bucket in runner.limits.buckets if bucket >= 2)
    frame = np.zeros((4, bucket), np.int32)
    frame[:, :2] = [1, 2], [0, 0], [1, 2], [1, 2]
    extra = StageExtra(forced_tokens=np.array([[1, 42]], np.int32).tobytes())
    runner.read(runner.launch(StageBatch(1, Stage.PRELUDE, bucket, 2, extra=extra), frame))
    assert slots.token[1:3].tolist() == [42, 9]
    assert [slots.shaping.counts[row, token].item() for row, token in ((1, 7), (1, 42), (2, 9))] == [0, 1, 1]


def test_captures_every_form_of_every_bucket() -> None:
    """No stage may have to run uncaptured: each decode stage has a graph for each form at each bucket."""
    device = resolve_device("cpu")
    config = configure("ouro-tiny", "off", "single")
    loaded = load_model(config.model, dtype="float32", device=device, load_format="auto", seed=0)
    built = assemble(config, loaded, device, "sdpa")
    overlapped = OverlappedRunner(built.runner.stages, built.runner.limits, AdverseAccelerator(0), 48)
    captured = {(form.stage, bucket) for form, bucket in overlapped._graphs}
    assert captured == {(s, b) for s in (Stage.PRELUDE, Stage.CORE, Stage.CODA) for b in built.runner.limits.buckets}


def test_completions_wake_a_sleeping_loop() -> None:
    """The worker's loop sleeps on a descriptor while the device works: it becomes readable when a stage has finished,
    and only then is the stage called finished."""
    accelerator = AdverseAccelerator(1)
    watch = CompletionWatch(accelerator)
    gate = Event()
    accelerator._lanes[Lane.COMPUTE].append(("work", gate.wait))
    assert select.select([watch.descriptor], [], [], 0)[0] == []
    watch.add(7, accelerator.mark(Lane.COMPUTE))
    assert not watch.passed(7)
    gate.set()
    watch.wait(7)
    assert select.select([watch.descriptor], [], [], 5)[0] == [watch.descriptor]
    assert watch.passed(7) and not watch.passed(8)


def test_a_device_fault_reaches_whoever_reads() -> None:
    """An error of the device surfaces at the next read; it must not leave the loop waiting for ever."""
    accelerator = AdverseAccelerator(1)
    watch = CompletionWatch(accelerator)

    def fault() -> None:
        raise RuntimeError("illegal memory access")

    accelerator._lanes[Lane.COMPUTE].append(("work", fault))
    watch.add(1, accelerator.mark(Lane.COMPUTE))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        watch.wait(1)
