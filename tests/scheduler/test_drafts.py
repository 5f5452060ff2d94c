"""Speculation by depth: with drafts right or wrong, requests get what the plain loop gives, and nothing is leaked.

The worker of these tests (fakes.paged_worker) keeps every plane of every lane, and raises at any read of what is not
written, not filled, or written by a token that was dropped.
"""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthbatch.common.frames import Stage
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams, Submit
from depthbatch.scheduler.config import DraftLimit, SchedulerConfig
from depthbatch.scheduler.policy.view import Decision, QueueView, RetiredStage
from fakes.paged_lockstep import Lockstep
from fakes.paged_model import plain_decode
from fakes.strategies import VOCAB, drafting_configs, prompt_of, workloads

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
ACCEPTANCE = st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0])


class AnyOrder:
    """Any stage that may run, in any order, with any drafts: no policy can do worse."""

    full_depth = learns = False

    def __init__(self, config: SchedulerConfig, rng: random.Random) -> None:
        self._config, self._rng = config, rng

    def choose(self, view: QueueView, now: float) -> Decision | None:
        rng, config = self._rng, self._config
        limit = DraftLimit(rng.randint(0, config.draft_lanes), rng.randint(1, config.r_max), rng.random() < 0.5)
        options = [Decision(stage) for stage, rows in ((Stage.PRELUDE, view.q_d), (Stage.CORE, view.q_r)) if rows]
        if view.q_c or view.asks_for_coda(limit):
            options.append(Decision(Stage.CODA, drafts=limit))
        if view.can_prefill():
            options.append(Decision(Stage.PREFILL))
        return rng.choice(options) if options else None

    def observe(self, retired: RetiredStage) -> None:
        """Never called: learns is False."""


def drafting(data: st.DataObject) -> tuple[Lockstep, random.Random]:
    """An engine under one of its policies, or under none that makes sense."""
    config = data.draw(drafting_configs())
    rng = random.Random(data.draw(st.integers(0, 1000)))
    policy = AnyOrder(config, rng) if data.draw(st.booleans()) else None
    return Lockstep(config, acceptance=data.draw(ACCEPTANCE), policy=policy), rng


def submits_of(rng: random.Random, config: SchedulerConfig, request_id: int) -> Submit:
    """A request that runs deep more often than not, with any gate."""
    gate = rng.choice(config.gates)
    max_loops = rng.choice([config.r_max, config.r_max, rng.randint(1, config.r_max)])
    params = RequestParams(
        max_tokens=rng.randint(1, 24),
        min_tokens=rng.choice([0, 0, 0, 0, 4]),
        stop_token_ids=(1, 2) if rng.random() < 0.5 else (),
        temperature=rng.choice([0.0, 0.7]),
        seed=request_id,
        gate=gate,
        exit_threshold=0.5,
        min_loops=max_loops if gate is Gate.FIXED else rng.randint(1, max_loops),
        max_loops=max_loops,
        exit_depths=bytes(rng.randint(1, config.r_max) for _ in range(24)),
        priority=rng.choice([0, 0, 1]),
        speculation=rng.random() < 0.9,
    )
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
    return Submit(request_id, np.asarray(prompt, dtype=np.int32).tobytes(), params)


def same_as_plain(harness: Lockstep) -> None:
    """What every request has got is what the plain loop gives, as far as it got."""
    for request_id, answer in harness.answers.items():
        submit = harness.submits[request_id]
        expected = plain_decode(prompt_of(submit), submit.params, harness.config)
        count = len(answer.tokens)
        assert (answer.tokens, answer.depths) == (expected.tokens[:count], expected.depths[:count])
        assert answer.finish_reason in ("abort", expected.finish_reason)
        assert answer.finish_reason == "abort" or count == len(expected.tokens)


@settings(QUICK, max_examples=200)
@given(st.data())
def test_drafts_change_no_token_and_no_depth(data: st.DataObject) -> None:
    """The whole contract at once: chains of every length, drafts read at every depth and right by any share, every gate,
    with coda layers and without, late results, preemption: tokens, depths and finish reasons are those of the plain loop."""
    harness, rng = drafting(data)
    config = harness.config
    requests = data.draw(workloads(config, gates=config.gates, drafts=True))
    for submit in requests:
        harness.submit(submit)
    harness.run(hold=lambda: rng.random() < 0.6)
    same_as_plain(harness)


@settings(QUICK, max_examples=200)
@given(st.data())
def test_any_interleaving_ends_with_every_request_answered_once(data: st.DataObject) -> None:
    """Submits and aborts at any time, chains cut in every state, blocks scarce, worker and scheduler lost with drafts
    in flight: each request ends exactly once, with the plain loop's tokens, and no lane, slot or block is left."""
    harness, rng = drafting(data)
    config = harness.config
    requests = data.draw(workloads(config, gates=config.gates, drafts=True))
    todo, aborted = list(requests), set()
    while todo:
        match rng.randrange(8):
            case 0:
                harness.submit(todo.pop())
            case 1 if harness.answers:
                victim = rng.choice(sorted(harness.answers))
                if rng.random() < 0.4 and harness.abort(victim):
                    aborted.add(victim)
            case 2 | 3 | 4:
                harness.dispatch()
            case 5:
                if rng.random() < 0.3:
                    rng.choice((harness.lose_worker, harness.lose_scheduler))()
            case _:
                harness.complete()
    harness.run(hold=lambda: rng.random() < 0.5)
    assert set(harness.answers) | set(harness.rejected) == {submit.request_id for submit in requests}
    same_as_plain(harness)
    assert aborted == {each for each, answer in harness.answers.items() if answer.finish_reason == "abort"}
    stats = harness.scheduler.stats()
    assert stats.kv_usage == 0.0 and stats.running == 0


@pytest.mark.parametrize("coda_layers", [0, 2])
@pytest.mark.parametrize("scarce", [False, True])
@pytest.mark.parametrize("mode", ["off", "async", "lookahead"])
def test_thousands_of_random_operations_under_long_chains(mode: str, scarce: bool, coda_layers: int) -> None:
    """Chains of five over six loops, read at any depth, in any order of stages: what hypothesis' small cases rarely
    reach, as rows that catch up with one that has exited, or a draft that comes back after its chain was cut."""
    rng = random.Random(11)
    config = SchedulerConfig(
        policy="refill",
        max_num_seqs=4,
        max_num_batched_tokens=24,
        min_free_slots=1,
        min_coda_batch=1,
        r_max=6,
        block_size=4,
        num_blocks=16 if scarce else 60,
        max_model_len=40,
        buckets=(1, 2, 4, 8, 16) if scarce else (4, 20),
        vocab_size=VOCAB,
        async_scheduling=mode,
        kv_layout=KVLayout.LAST_EXITED,
        draft_lanes=4,
        coda_layers=coda_layers,
    )
    harness = Lockstep(config, verify_every=5, acceptance=0.8, policy=AnyOrder(config, rng))
    ids = 0
    for _ in range(6_000):
        draw = rng.random()
        if draw < 0.06:
            harness.submit(submits_of(rng, config, ids))
            ids += 1
        elif draw < 0.07 and ids:
            harness.abort(rng.randrange(ids + 2))
        elif draw < 0.072:
            harness.lose_worker()
        elif draw < 0.6:
            harness.dispatch()
        else:
            harness.complete()
    harness.run()
    same_as_plain(harness)
    scheduler, worker = harness.scheduler, harness.worker
    drafts = scheduler.admission.chains
    assert scheduler.admission.blocks.free == config.usable_blocks and scheduler.admission.slots.free == 4
    assert (drafts.right[1:6] > 0).all() and drafts.wrong.sum() > 20 and drafts.started.sum() > drafts.right.sum()
    assert worker.longest_chain >= 3 and (scheduler.counters.preemptions > 5) == scarce
