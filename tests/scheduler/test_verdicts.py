"""Whether a coda that says which guesses are right is awaited: by what that costs, and with the same output either way."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import Stage
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams, StageResult, Submit
from depthbatch.scheduler.config import DraftLimit, SchedulerConfig
from depthbatch.scheduler.inflight import InFlightStep
from depthbatch.scheduler.lanes import Chains
from depthbatch.scheduler.policy.drafts import FixedDrafts
from depthbatch.scheduler.policy.fixed import Refill
from depthbatch.scheduler.policy.observed import Observed
from depthbatch.scheduler.policy.view import RetiredStage
from depthbatch.scheduler.verdicts import Verdicts
from depthbatch.worker.simulated import find_profile, simulated_info
from fakes.paged_lockstep import GivenVerdicts, Lockstep
from fakes.paged_model import plain_decode
from fakes.small_engine import BASE
from fakes.strategies import prompt_of

CORE_S, CODA_S = 4e-3, 1e-3


def learned(standstill_s: float, right: int, wrong: int) -> Verdicts:
    """After a hundred core steps, each with an awaited coda behind it."""
    chains = SimpleNamespace(right=np.array([0, right]), wrong=np.array([0, wrong]))
    verdicts, now = Verdicts(cast(Chains, chains)), 0.0
    core = SimpleNamespace(stage=Stage.CORE, chained=None, blocks_next=False)
    coda = SimpleNamespace(stage=Stage.CODA, chained=object(), blocks_next=True)
    for _ in range(100):
        for step, seconds in ((core, CORE_S), (coda, CODA_S)):
            step.header = SimpleNamespace(after_no_work=False)
            verdicts.observe(cast(InFlightStep, step), StageResult(0, now, now + seconds))
            now += seconds
        now += standstill_s
    return verdicts


@pytest.mark.parametrize(
    ("standstill_s", "wrong", "sequences", "awaited"),
    [
        (0.0, 0, 1, True),  # as in virtual time
        (0.3e-3, 10, 1, True),  # 0.1 of a core step is more
        (0.5e-3, 10, 1, False),
        (0.3e-3, 10, 4, True),
        (0.3e-3, 10, 2, False),  # of four active ones two are in the coda
        (0.3e-3, 50, 2, True),
    ],
)
def test_the_shorter_loss_is_chosen(standstill_s: float, wrong: int, sequences: int, awaited: bool) -> None:
    """Core steps of 4 ms: waiting costs all sequences the standstill, going on costs those that are wrong a core step."""
    verdicts = learned(standstill_s, 100 - wrong, wrong)
    active = 1 if sequences == 1 else 4
    assert verdicts.awaited(sequences, active) == awaited


def test_what_is_not_waited_for_is_measured_now_and_then() -> None:
    """Each sixteenth such coda is awaited: otherwise one long standstill would be believed for ever."""
    verdicts = learned(2e-3, 95, 5)
    waits = [verdicts.awaited(1, 1) for _ in range(64)]
    assert sum(waits) == 4


def test_an_interrupted_machine_is_no_wait() -> None:
    """A standstill of seconds counts as a core step, so that the mean forgets it within some codas."""
    assert learned(3.0, 90, 10)._standstill_s <= CORE_S


@pytest.mark.parametrize("due", [False, True])
@pytest.mark.parametrize("acceptance", [0.0, 0.8, 1.0])
def test_nothing_is_waited_for_and_the_output_is_the_same(
    acceptance: float, due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages are chosen as far ahead as they may be, so that chains run on behind guesses that turn out to be wrong: tokens
    and depths are those of the plain loop, and the fake worker raises at any read of what is not final. A result that is
    ``due`` behind a core step is behind one, not two."""
    config = replace(
        BASE,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        num_blocks=90,
        max_model_len=60,
        buckets=(12,),
        async_scheduling="lookahead",
        kv_layout=KVLayout.LAST_EXITED,
        draft_lanes=3,
    )
    policy = Refill(1, FixedDrafts(DraftLimit(3, 1)))
    monkeypatch.setattr(GivenVerdicts, "due_behind_a_core_step", due)
    harness = Lockstep(config, acceptance=acceptance, policy=policy, awaits=lambda: False)
    for index in range(5):
        params = RequestParams(max_tokens=24, max_loops=4, seed=index, stop_token_ids=(index % 3,))
        assert harness.submit(Submit(index, np.array([index, 2, 3], np.int32).tobytes(), params))
    ahead = {0}  # core steps behind a coda that is not answered
    while any(answer.finish_reason is None for answer in harness.answers.values()):
        if harness.dispatch() is None:
            harness.complete()
        steps = list(harness.scheduler._in_flight._steps)
        unheard = [at for at, step in enumerate(steps) if step.chained is not None and step.chained.final.any()]
        if unheard:
            ahead.add(sum(step.stage is Stage.CORE for step in steps[unheard[0] :]))
    harness.run()
    assert max(ahead) == (1 if due else 2)
    for request_id, answer in harness.answers.items():
        submit = harness.submits[request_id]
        assert answer.tokens == plain_decode(prompt_of(submit), submit.params, config).tokens


@pytest.mark.parametrize(("mode", "expected_s"), [("lookahead", 0.3e-3), ("off", 0.0)])
def test_what_is_lost_with_a_result_is_a_cost_of_drafts(mode: str, expected_s: float) -> None:
    """The smaller of both losses, of codas that say anything: a policy that took the standstill where nothing waits would run too
    few drafts. One stage at a time every stage is waited for, and the wait is in its own cost."""
    options = EngineConfig(kv_layout="last_exited", speculation="auto", async_scheduling=mode)
    config = SchedulerConfig.resolve(options, simulated_info(options, find_profile("h100-ouro-1.4b")))
    observed, verdicts = Observed(config), learned(2e-3, 100, 0)
    verdicts.awaited(1, 1)
    assert 0.0 < verdicts.loss_s < 0.1 * CORE_S
    slots = np.array([1])
    for loss_s in [0.3e-3, None] * 100:
        observed.add(RetiredStage(Stage.CODA, 1, slots, (4,), 0, (), False, 0.0, CODA_S, verdict_s=loss_s))
    assert observed.wait_s == pytest.approx(expected_s, rel=0.01)
