"""Speculation by depth: with drafts right or wrong, requests get what the plain loop gives, and nothing is leaked.

The worker of these tests (fakes.paged_worker) keeps every plane of every lane, and raises at any read of what is not
written, not filled, or written by a token that was dropped.
"""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthbatch.common.frames import Stage
from depthbatch.scheduler.config import DraftLimit, SchedulerConfig
from depthbatch.scheduler.policy.view import Decision, QueueView, RetiredStage
from fakes.paged_lockstep import Lockstep
from fakes.paged_model import plain_decode
from fakes.strategies import drafting_configs, prompt_of, workloads

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
    for submit in requests:
        if submit.request_id in harness.rejected:
            continue
        answer = harness.answers[submit.request_id]
        expected = plain_decode(prompt_of(submit), submit.params, config)
        assert (answer.tokens, answer.depths) == (expected.tokens, expected.depths)
        assert answer.finish_reason == expected.finish_reason


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
    for submit in requests:
        if submit.request_id in harness.rejected:
            continue
        answer = harness.answers[submit.request_id]
        expected = plain_decode(prompt_of(submit), submit.params, config)
        count = len(answer.tokens)
        assert (answer.tokens, answer.depths) == (expected.tokens[:count], expected.depths[:count])
        if submit.request_id in aborted:
            assert answer.finish_reason == "abort"
        else:
            assert (count, answer.finish_reason) == (len(expected.tokens), expected.finish_reason)
    stats = harness.scheduler.stats()
    assert stats.kv_usage == 0.0 and stats.running == 0
