"""Prefill as captured pieces: equal to the eager one, and its captures hold what a CUDA graph holds.

Pieces and decode stages are captured on tapes (tape_accelerator.py), which replay operators over fixed addresses and
run none of the captured Python again; the attention of both paths is the Triton backend with its twin.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import PLAIN
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.attention.paged import TritonAttention
from depthbatch.worker.build import BuiltRunner, assemble
from depthbatch.worker.device import resolve_device
from depthbatch.worker.models.loader import load_model
from depthbatch.worker.runner.overlapped import OverlappedRunner
from depthbatch.worker.runner.prefill_graphs import TOKEN_COUNTS, PiecewisePrefill, token_counts
from depthbatch.worker.runner.stage_tensors import PrefillInput
from fakes.overlapped_serving import configure, requests, serve, warm
from fakes.tape_accelerator import TapeAccelerator

FIDELITY = Path(__file__).parent.parent / "data" / "fidelity"


pytestmark = pytest.mark.usefixtures("torch_operators")


def built(model: str, layout: str, mode: str = "off", **options: object) -> BuiltRunner:
    config = configure(model, mode, layout, **options)
    device = resolve_device("cpu")
    loaded = load_model(config.model, dtype="float32", device=device, load_format="auto", seed=0, r_max=4)
    return assemble(config, loaded, device, "triton")


def caches(made: BuiltRunner) -> list[torch.Tensor]:
    backend = made.runner.stages.backend
    assert isinstance(backend, TritonAttention)
    return [*backend.k_cache, *backend.v_cache]


def prompts(lengths: tuple[int, ...], starts: tuple[int, ...], seed: int) -> PrefillInput:
    """Chunks of slots 1, 2, ..., with the blocks they need."""
    rng = np.random.default_rng(seed)
    slots = range(1, len(lengths) + 1)
    blocks = [
        (s, c, 1 + 8 * (s - 1) + c)
        for s, n, at in zip(slots, lengths, starts, strict=True)
        for c in range((at + n + 15) // 16)
    ]
    frame = [*slots, *starts, *lengths, *[1] * len(lengths), *rng.integers(0, 290, sum(lengths))]
    frame += [value for block in blocks for value in block]
    return PrefillInput.upload(np.array(frame, np.int32), len(lengths), sum(lengths), len(blocks), torch.device("cpu"))


def pieces_of(made: BuiltRunner, max_tokens: int, accelerator: TapeAccelerator) -> PiecewisePrefill:
    stages = made.runner.stages

    def trial(context: object) -> object:
        return stages.prefill(PrefillInput.dummy(1, torch.device("cpu")), PLAIN, context)  # type: ignore[arg-type]

    width = stages.model.spec.hidden_size
    with torch.inference_mode():
        return PiecewisePrefill(trial, stages.backend.geometry, width, max_tokens, accelerator.capture)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("ouro-tiny", KVLayout.DEPTH_INDEXED),
        ("ouro-tiny", KVLayout.FIRST_THEN_SHARED),
        ("huginn-tiny", KVLayout.LAST_EXITED),
        ("huginn-tiny", KVLayout.SINGLE),
    ],
)
def test_pieces_equal_eager(model: str, layout: KVLayout) -> None:
    """Tokens, prompt logprobs' input (through the tokens) and every K and V equal those of the eager prefill: whole
    prompts, then chunks behind them, at sizes on and between the captured ones. The rows past the real tokens start
    as NaN, so one row that leaks into another shows; that pieces ran, and for a larger prompt did not, is counted."""
    eager, pieced = built(model, layout), built(model, layout)
    accelerator = TapeAccelerator(0)
    pieces = pieces_of(pieced, 80, accelerator)
    replays = 0

    def counting(replay: object) -> object:
        def run() -> None:
            nonlocal replays
            replays += 1
            replay()  # type: ignore[operator]

        return run

    pieces._pieces = {key: [counting(piece) for piece in made] for key, made in pieces._pieces.items()}  # type: ignore[misc]
    stages = pieced.runner.stages
    blocks = [len(stack.blocks) for stack in pieces._stacks]
    loops = [1] * len(blocks) if len(blocks) == 1 else [1, stages.r_max, 1]
    a_prefill = sum((n + 1) * (stages.r_max if len(blocks) == 1 else r) for n, r in zip(blocks, loops, strict=True))
    for lengths, starts, runs in (
        ((64,), (0,), 1),
        ((3, 40, 1), (0, 0, 0), 1),
        ((5, 20), (3, 40), 1),
        ((90,), (0,), 0),
    ):
        before, chunks = replays, prompts(lengths, starts, sum(lengths))
        with torch.inference_mode():
            pieces._buffers.x.fill_(torch.nan)
            pieces._buffers.attended.fill_(torch.nan)
            want = eager.runner.stages.prefill(chunks, PLAIN)
            got = stages.prefill(chunks, PLAIN, pieces.context)
        assert replays - before == runs * a_prefill
        assert torch.equal(got.sampled.tokens, want.sampled.tokens)
        for mine, theirs in zip(caches(pieced), caches(eager), strict=True):
            torch.testing.assert_close(mine[1:], theirs[1:], atol=2e-5, rtol=2e-5)
    assert all(cache[1:].count_nonzero() for cache in caches(pieced))


@pytest.mark.parametrize("model", ["ouro-tiny", "huginn-tiny"])
def test_pieces_take_every_token_to_its_own_depth(model: str) -> None:
    """A rebuilt sequence's prefill through captured pieces: every K and V equals the eager one's, and the decode steps'
    behind it are not those of full depth. No row that has left may be written by a piece, whose rows are static."""
    layout = KVLayout.LAST_EXITED
    eager, pieced, full = (built(model, layout) for _ in range(3))
    pieces = pieces_of(pieced, 80, TapeAccelerator(0))
    r_max = eager.runner.stages.r_max
    for lengths, starts in (((3, 40), (0, 0)), ((20, 7), (3, 40))):
        chunks = prompts(lengths, starts, sum(lengths))
        depths = np.random.default_rng(5).integers(1, r_max + 1, sum(lengths)).astype(np.int32)
        forced = torch.tensor([[1, 7], [2, 9]], dtype=torch.int32)
        rebuilt = chunks._replace(sampled=chunks.sampled[:0], depths=torch.tensor(depths), forced=forced)
        with torch.inference_mode():
            eager.runner.stages.prefill(rebuilt, PLAIN)
            pieced.runner.stages.prefill(rebuilt, PLAIN, pieces.context)
            full.runner.stages.prefill(chunks, PLAIN)
        assert pieced.runner.stages.slots.token[1:3].tolist() == [7, 9]
        planes = 2 * eager.runner.stages.backend.geometry.planes
        for first, mine, theirs in zip(planes, caches(pieced), caches(eager), strict=True):
            torch.testing.assert_close(mine[first:], theirs[first:], atol=2e-5, rtol=2e-5)
    assert max((a - b)[r_max:].abs().max() for a, b in zip(caches(full), caches(eager), strict=True)) > 0.01


@pytest.mark.parametrize(
    ("model", "layout", "gate"),
    [("ouro-tiny", "last_exited", Gate.DELAYED), ("huginn-tiny", "single", Gate.CONVERGENCE)],
)
def test_tapes_equal_plain(model: str, layout: str, gate: Gate) -> None:
    """The whole engine on captures that keep only operators and addresses gives the plain runner's tokens and depths:
    nothing a stage needs is decided by Python at replay, or was read from the device at capture."""
    plain = built(model, layout)
    submits = requests(gate, plain.info.r_max)
    want, _ = serve(
        Scheduler(SchedulerConfig.resolve(configure(model, "off", layout), plain.info)), plain.runner, submits
    )
    taped = built(model, layout, "lookahead")
    accelerator = TapeAccelerator(1)
    runner = OverlappedRunner(taped.runner.stages, taped.runner.limits, accelerator, 48)
    scheduler = Scheduler(SchedulerConfig.resolve(configure(model, "lookahead", layout), taped.info))
    got, _ = serve(scheduler, runner, submits)
    assert got == want
    assert min(len(tape.entries) for tape in accelerator.tapes) > 1
    assert any(depth < plain.info.r_max for answer in got.values() for depth in answer[1][1:])


@pytest.mark.parametrize(("model", "gate"), [("ouro-tiny", Gate.DELAYED), ("huginn-tiny", Gate.CONVERGENCE)])
def test_tapes_with_drafts_equal_plain_without(model: str, gate: Gate) -> None:
    """Captured stages gather and scatter by lane at fixed addresses, whatever the rows: tokens and depths are those of
    the plain runner without speculation."""
    plain, options = built(model, "last_exited"), {"speculation": 2, "max_num_seqs": 2}
    submits = warm(requests(gate, plain.info.r_max))[:5]
    want, _ = serve(
        Scheduler(SchedulerConfig.resolve(configure(model, "off", "last_exited"), plain.info)), plain.runner, submits
    )
    taped = built(model, "last_exited", "lookahead", **options)
    runner = OverlappedRunner(taped.runner.stages, taped.runner.limits, TapeAccelerator(1), 48)
    config = configure(model, "lookahead", "last_exited", **options)
    scheduler = Scheduler(SchedulerConfig.resolve(config, taped.info))
    got, _ = serve(scheduler, runner, submits)
    assert {key: answer[:2] for key, answer in got.items()} == {key: answer[:2] for key, answer in want.items()}
    chains = scheduler.admission.chains
    assert chains is not None and chains.right.sum() > 3 and chains.wrong.sum() > 3


def test_a_tape_sees_what_a_graph_cannot_hold() -> None:
    """A host read raises; a number read before stays as it was: so equal tokens above mean that there is none."""
    accelerator, x = TapeAccelerator(0), torch.ones(3)
    with pytest.raises(AssertionError, match="waits for the device"):
        accelerator.capture(lambda: x.sum().item())
    y = torch.zeros(3)
    host = [2.0]
    replay = accelerator.capture(lambda: y.copy_(x * host[0]))
    host[0] = 3.0
    x.fill_(5.0)
    replay()
    assert y.tolist() == [10.0] * 3


def test_token_counts() -> None:
    """Never more than can come, always enough for what comes, never beyond what is worth capturing."""
    assert token_counts(48) == (48,)
    assert token_counts(64) == (64,)
    assert token_counts(200) == (64, 128, 192, 200)
    assert token_counts(8192) == TOKEN_COUNTS
