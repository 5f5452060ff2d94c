"""Preempted K/V in host memory: who is copied, when copying is cheaper than computing again, and what the books say."""

from dataclasses import replace

import numpy as np
import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import Stage
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import StageBatch, StageResult
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.inflight import InFlightStep
from depthbatch.scheduler.offload import MoveCosts
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.validation import make_request
from fakes.paged_lockstep import Lockstep
from fakes.paged_model import plain_decode
from fakes.small_engine import BASE, submit

CONFIG = replace(
    BASE,
    max_num_batched_tokens=64,
    num_blocks=21,
    kv_layout=KVLayout.LAST_EXITED,
    preemption="offload",
    host_blocks=100,
    block_bytes=1000,
)


def run(config: SchedulerConfig, **params: object) -> Lockstep:
    """Twelve requests whose tokens are those of the plain loop, on blocks for half of what runs."""
    harness = Lockstep(config)
    for request_id in range(12):
        harness.submit(submit(request_id, tokens=40, **params))
    harness.run()
    assert all(len(answer.tokens) == 40 for answer in harness.answers.values())
    assert harness.scheduler.counters.preemptions > 10
    return harness


@pytest.mark.parametrize("layout", [KVLayout.SINGLE, KVLayout.LAST_EXITED])
def test_victims_get_their_k_and_v_back(layout: KVLayout) -> None:
    """No token is computed a second time but by victims that had none yet, and every block that has gone out comes back
    (but for the last one of a victim whose next token would have been the first in it)."""
    harness = run(replace(CONFIG, kv_layout=layout))
    stats = harness.scheduler.stats()
    assert harness.worker.restored > 10 and harness.worker.forced == 0
    assert stats.recomputed_tokens == 0
    assert stats.restored_bytes % 1000 == 0
    assert 0.8 * stats.offloaded_bytes <= stats.restored_bytes <= stats.offloaded_bytes


@pytest.mark.parametrize(
    "params", [{"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"allow_list": b"\xff" * 8}]
)
def test_who_needs_more_of_its_prefill_than_k_and_v_is_computed_again(params: dict[str, object]) -> None:
    """Penalties count the tokens that a prefill runs over, and bad words look at the last of them."""
    harness = run(CONFIG, **params)
    assert harness.worker.restored == 0 and harness.worker.rebuilt > 10
    assert harness.scheduler.stats().offloaded_bytes == 0


def test_what_the_host_has_no_room_for_is_computed_again() -> None:
    """Four blocks of host memory hold one short victim."""
    harness = run(replace(CONFIG, host_blocks=4))
    assert 0 < harness.worker.restored < harness.worker.rebuilt
    assert harness.scheduler.stats().recomputed_tokens > 0


def test_an_abort_gives_the_hosts_blocks_back() -> None:
    """A victim is aborted while its K/V are out: the idle check wants every block of the host free."""
    harness = Lockstep(CONFIG)
    for request_id in range(12):
        harness.submit(submit(request_id, tokens=40))
    host = harness.scheduler.admission.offload.host  # type: ignore[union-attr]
    while host.free == host.total:
        if harness.dispatch() is None:
            harness.complete()
    [out] = [r.request_id for r in harness.scheduler._requests._live.values() if r.host_blocks is not None]
    harness.abort(out)
    assert host.free == host.total
    harness.run()


@pytest.mark.parametrize("layout", [KVLayout.SINGLE, KVLayout.LAST_EXITED])
def test_who_is_preempted_in_the_middle_of_its_rebuild_is_computed_again(layout: KVLayout) -> None:
    """Bug: a sequence whose prefill had run in part only was copied to the host as if its K/V were whole, and went on with
    them. It loses its worker, is prefilled again in chunks of 4, and loses its slot after the first."""
    harness = Lockstep(replace(CONFIG, kv_layout=layout, max_num_batched_tokens=4))
    harness.submit(submit(1, 10, 12))
    while len(harness.answers[1].tokens) < 8:
        harness.dispatch()
        harness.complete()
    harness.lose_worker()
    harness.dispatch()
    scheduler = harness.scheduler
    partial = scheduler.admission.partial
    assert partial is not None and partial.output
    scheduler._requests.preempt(partial, may_offload=True)
    assert partial.host_blocks is None
    harness.run()
    expected = plain_decode(list(range(10)), harness.submits[1].params, harness.config)
    assert harness.answers[1].tokens == expected.tokens and harness.worker.rebuilt == 1


# --- the choice


def observed(stage: Stage, seconds: float, rows: int = 1, tokens: int = 0, blocks: int = 0) -> tuple:
    header = StageBatch(1, stage, 0, rows)
    step = InFlightStep(header, stage, np.zeros(rows, np.intp), 0.0, np.zeros(rows, np.intp), np.zeros(rows, np.int64))
    step.tokens, step.moved_blocks = tokens, blocks
    return step, StageResult(1, 0.0, seconds, moved_s=1e-3 * blocks)


def victim(layout: KVLayout, prompt: int, output: int) -> Request:
    config = replace(CONFIG, kv_layout=layout, max_model_len=2000, num_blocks=1000)
    request = make_request(submit(1, prompt, 1000), config, False, 0)
    request.output, request.depths = [1] * output, bytearray([4] * output)
    return request


@pytest.mark.parametrize(
    ("layout", "prompt", "output", "pays"),
    [
        (KVLayout.LAST_EXITED, 450, 50, False),  # 2 x 50 blocks at 1 ms against 0.2 ms x 499
        (KVLayout.LAST_EXITED, 450, 60, True),  # against 0.2 ms x 509
        (KVLayout.SINGLE, 100, 100, True),  # against 0.2 ms x 100 + 0.5 ms x 4 x 99
        (KVLayout.SINGLE, 196, 4, False),  # against 0.2 ms x 196 + 0.5 ms x 12
    ],
)
def test_the_cheaper_way_is_taken(layout: KVLayout, prompt: int, output: int, pays: bool) -> None:
    """By costs that were seen: 1 ms a block each way, prefill of 10 ms and 0.2 ms a token, core steps of 0.5 ms a row. Where
    loops share a plane the output would be decoded again, row by row. The 10 ms are paid either way. Before costs are
    known, copying is tried."""
    costs, request = MoveCosts(), victim(layout, prompt, output)
    assert costs.copy_pays(request, 50)
    for tokens in (100, 200, 300, 400):
        costs.observe(*observed(Stage.PREFILL, 0.01 + 2e-4 * tokens, tokens=tokens, blocks=tokens // 10))
        costs.observe(*observed(Stage.CORE, 4e-3, rows=8))
    assert costs.copy_pays(request, 50) == pays
    assert costs.copy_pays(request, 1) and not costs.copy_pays(request, 100_000)


def test_swap_space_is_offloads() -> None:
    """It is refused where nothing uses it, and has a default where something does."""
    with pytest.raises(ConfigError, match="swap_space 2 needs preemption offload, not recompute"):
        EngineConfig(swap_space=2.0)
    assert EngineConfig(preemption="offload").swap_bytes == 4 << 30
    assert EngineConfig(preemption="offload", swap_space=0.5).swap_bytes == 1 << 29
    assert EngineConfig().swap_bytes == 0
