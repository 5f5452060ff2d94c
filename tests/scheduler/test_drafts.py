"""Speculation by depth: with drafts right or wrong, requests get what the plain loop gives, and nothing is leaked.

The worker of these tests (fakes.paged_worker) keeps every plane of every lane, and raises at any read of what is not
written, not filled, or written by a token that was dropped.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthbatch.common.frames import BAD_SEQUENCE_TOKENS, ROW_AUX, Stage
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams, Submit
from depthbatch.scheduler.config import DraftLimit, SchedulerConfig
from depthbatch.scheduler.policy.drafts import FixedDrafts
from depthbatch.scheduler.policy.fixed import Refill
from depthbatch.scheduler.policy.view import Decision, Policy, QueueView, RetiredStage
from fakes.draft_policies import CoreFirst, OneCodaEach
from fakes.paged_lockstep import Lockstep
from fakes.paged_model import plain_decode
from fakes.small_engine import BASE
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
        limit = DraftLimit(rng.randint(0, config.draft_lanes), rng.randint(1, config.r_max))
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
    awaits = (lambda: rng.random() < 0.5) if data.draw(st.booleans()) else None
    return Lockstep(config, acceptance=data.draw(ACCEPTANCE), policy=policy, awaits=awaits), rng


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
        logprobs=rng.random() < 0.3,
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
        if request_id not in harness.blamed and answer.finish_reason != "abort":
            assert (count, answer.finish_reason) == (len(expected.tokens), expected.finish_reason)


@settings(QUICK, max_examples=100)
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


@settings(QUICK, max_examples=100)
@given(st.data())
def test_any_interleaving_ends_with_every_request_answered_once(data: st.DataObject) -> None:
    """Submits and aborts at any time, chains cut in every state, blocks scarce, worker and scheduler lost with drafts
    in flight: each request ends exactly once, with the plain loop's tokens, and no lane, slot or block is left."""
    harness, rng = drafting(data)
    config = harness.config
    requests = data.draw(workloads(config, gates=config.gates, drafts=True))
    aborted = harness.interleave(requests, rng)
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
    config = replace(
        BASE,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        r_max=6,
        num_blocks=16 if scarce else 60,
        max_model_len=40,
        buckets=(1, 2, 4, 7) if scarce else (4, 20),
        async_scheduling=mode,
        kv_layout=KVLayout.LAST_EXITED,
        draft_lanes=4,
        coda_layers=coda_layers,
    )
    harness = Lockstep(
        config, verify_every=5, acceptance=0.8, policy=AnyOrder(config, rng), awaits=lambda: rng.random() < 0.5
    )
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


def build(**changes: object) -> SchedulerConfig:
    """Four sequences of at most four lanes, four loops, nothing scarce."""
    four = replace(BASE, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=90, max_model_len=60, buckets=(16,))
    return replace(four, **{"kv_layout": KVLayout.LAST_EXITED, "draft_lanes": 3} | changes)


def request(request_id: int = 0, depths: Sequence[int] = (), max_tokens: int = 20, **params: object) -> Submit:
    """A prompt of three tokens; full depth unless depths are given."""
    values = {"gate": Gate.REPLAY, "exit_depths": bytes(depths), "max_loops": 4, "seed": request_id} | params
    prompt = np.array([request_id, 2, 3], np.int32).tobytes()
    return Submit(request_id, prompt, RequestParams(max_tokens=max_tokens, **values))


def served(
    config: SchedulerConfig, *submits: Submit, acceptance: float = 1.0, policy: Policy | None = None
) -> Lockstep:
    harness = Lockstep(config, acceptance=acceptance, policy=policy)
    for submit in submits:
        assert harness.submit(submit), harness.rejected
    harness.run()
    same_as_plain(harness)
    return harness


def test_right_drafts_shorten_the_way_as_calculated() -> None:
    """20 tokens of four loops: one after the other they take 19 core steps of four loops. With every draft right after
    one loop, a chain of four starts a token each step, so that the 19 take 19 + 3. A chain that stalls takes longer."""
    alone = served(build(draft_lanes=0), request())
    chain = served(build(), request())
    steps = [harness.scheduler.stats().stages["core"].steps for harness in (alone, chain)]
    assert steps == [19 * 4, 19 + 3]
    assert (chain.answers[0].accepted_drafts, chain.answers[0].rejected_drafts) == (18, 0)


def test_a_full_chain_goes_on_in_the_coda_that_reads_its_oldest_row() -> None:
    """Bug: that row counted as one of the chain until its token was known, so that the draft of the last row took a coda and a
    prelude of its own, in every core step: fixed drafts had five stages a core step, and ``auto``, which runs none in between,
    started each token a core step late."""
    harness = served(build(), request())
    stages = harness.scheduler.stats().stages
    assert harness.worker.longest_chain == 4
    assert stages["coda"].steps == stages["core"].steps == 22  # some read drafts alone
    assert stages["prelude"].steps <= 20


def test_wrong_drafts_cost_no_step() -> None:
    """Each token is started anew when the one before it is known, as without drafts; none of them is told as accepted."""
    harness = served(build(), request(), acceptance=0.0)
    assert harness.scheduler.stats().stages["core"].steps == 19 * 4
    assert harness.answers[0].accepted_drafts == 0 and harness.answers[0].rejected_drafts == 18


@pytest.mark.parametrize(
    "changes",
    [
        {"speculation": False},
        {"presence_penalty": 0.5},
        {"logit_bias": np.array([1, 0], np.int32).tobytes()},
        {"bad_sequences": np.zeros((1, BAD_SEQUENCE_TOKENS), np.int32).tobytes()},
        {"min_tokens": 3, "stop_token_ids": (1,)},
        {"grammar": "{}"},
    ],
)
def test_requests_that_may_have_none_run_without_drafts(changes: dict) -> None:
    """A draft of such a request would not be drawn as the token is, or is not wanted; others have theirs beside it."""
    submits = request(0), Submit(1, *msgspec.structs.astuple(request(1, **changes))[1:3])
    harness = served(build(), *submits)
    assert harness.answers[0].accepted_drafts == 18 and harness.answers[1].accepted_drafts == 0
    assert harness.answers[1].rejected_drafts == 0


def test_a_chain_is_as_long_as_it_may_be_and_no_draft_is_read_too_early() -> None:
    """Draft lanes and draft depth of the engine, and of a decision that asks for less."""
    for lanes, depth in ((1, 1), (2, 1), (3, 1), (1, 2), (3, 3)):
        harness = served(build(draft_lanes=3), request(), policy=Refill(1, FixedDrafts(DraftLimit(lanes, depth))))
        started = harness.scheduler.admission.chains.started
        assert harness.worker.longest_chain == min(1 + lanes, -(-4 // depth))
        assert started[depth] >= 9 and not started[:depth].any()


def test_drafts_end_with_the_last_token() -> None:
    """No lane beyond max_tokens: every draft that is right becomes a token, so none is dropped at the end."""
    harness = served(build(), request(max_tokens=5))
    chains = harness.scheduler.admission.chains
    assert chains.started.sum() == chains.right.sum() == 3


def test_nothing_is_chosen_before_a_chain_is_known_to_be_right() -> None:
    """As long as nothing is known of how long that takes, a coda that reads a row for good whose successor is under way blocks the
    next choice, however far ahead stages may be chosen; one that only reads drafts does not."""
    config = build(async_scheduling="lookahead")
    harness = Lockstep(config, acceptance=1.0, policy=Refill(1, FixedDrafts(DraftLimit(3, 1))))
    harness.submit(request())
    ahead = {True: 0, False: 0}  # stages chosen right after a coda, by whether it reads for good
    while not harness.answers[0].finish_reason:
        stage = harness.dispatch()
        if stage is None:
            harness.complete()
        elif stage.header.stage is Stage.CODA:
            ahead[bool((stage.frame[ROW_AUX, : stage.header.rows] > 0).any())] += harness.dispatch() is not None
    assert ahead[False] > 0 == ahead[True]


def test_rows_that_are_few_go_to_the_oldest_requests() -> None:
    """The largest bucket leaves two draft rows: they are those of the two requests that are served first."""
    submits = [request(index, priority=index) for index in range(4)]
    harness = served(build(buckets=(6,)), *submits)
    accepted = [harness.answers[index].accepted_drafts for index in range(4)]
    assert accepted[3] + accepted[2] > 15 and accepted[3] > accepted[0] and sum(accepted[:2]) < sum(accepted[2:])


def test_rows_that_are_read_for_good_make_room_for_drafts() -> None:
    """Two draft rows for four sequences whose drafts are right: a row that leaves with a coda is free for a draft of that
    coda, so that every core step is full. Where it counts until its result is known, every other one has a row less."""
    harness = Lockstep(build(buckets=(6,)), acceptance=1.0, policy=OneCodaEach(DraftLimit(3, 1)))
    harness.keep_stages = True
    for index in range(4):
        harness.submit(request(index))
    harness.run()
    same_as_plain(harness)
    rows = [rows for stage, rows, *_ in harness.stages if stage == Stage.CORE]
    assert max(rows) == 6 and np.mean(rows[2:20]) > 5.9, rows


def test_drafts_preempt_nobody() -> None:
    """Blocks for two sequences' whole lives and none to spare: with drafts nothing is preempted, either."""
    config = build(max_num_seqs=2, block_size=1, num_blocks=1 + 2 * 9, max_model_len=9, preemption="recompute")
    harness = served(config, *[request(index, max_tokens=6) for index in range(2)])
    assert harness.scheduler.counters.preemptions == 0
    assert sum(answer.accepted_drafts for answer in harness.answers.values()) > 0


def test_a_successor_without_a_block_preempts_nobody() -> None:
    """A guess that is read for good has a successor at once, and no one has looked whether there is a block for it. It gives
    up its row where there is none; had it not, the younger request would be preempted for a draft."""
    config = build(max_num_seqs=2, block_size=1, num_blocks=1 + 12, max_model_len=20, preemption="recompute")
    lives = (9, [4, 1, 1, 4, 2, 2, 4, 2, 1, 1]), (4, [2, 2, 1, 1, 1])
    submits = [request(index, depths, tokens) for index, (tokens, depths) in enumerate(lives)]
    plain, drafted = (served(replace(config, draft_lanes=lanes), *submits) for lanes in (0, 3))
    assert plain.scheduler.counters.preemptions == drafted.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("usable", [14, 16, 18, 20])
def test_early_blocks_of_drafts_are_spare_ones(usable: int) -> None:
    """Three sequences that cannot all grow to their end: with drafts no more of them are preempted than without. A block
    that a draft takes early must not be one that a sequence needs next; without that rule there are more, or no end."""
    config = build(max_num_seqs=3, block_size=1, num_blocks=1 + usable, max_model_len=20, preemption="recompute")
    lengths = ((4, [4] * 20), (12, [2] * 20), (9, [2] * 20))
    submits = [request(index, depths, tokens) for index, (tokens, depths) in enumerate(lengths)]
    plain, drafted = (served(replace(config, draft_lanes=lanes), *submits) for lanes in (0, 3))
    assert drafted.scheduler.counters.preemptions <= plain.scheduler.counters.preemptions
    assert sum(answer.accepted_drafts for answer in drafted.answers.values()) > 0


def test_a_held_row_is_filled_so_that_those_behind_it_go_on() -> None:
    """With coda layers a token that has exited before the one ahead is held back. The next coda fills its planes, so its
    successors run on: the second token exits after one loop here, long before the first."""
    harness = served(build(coda_layers=2), request(depths=[4, 1, 4] * 7))
    assert harness.scheduler.stats().stages["core"].steps <= 45


@pytest.mark.parametrize(
    ("coda_layers", "depths", "codas"),
    [(0, [3, 6, 6], 0), (0, [4, 1, 6], 2), (2, [6, 2, 6], 0)],
    ids=["exited", "exited, beyond one that is filled", "held"],
)
def test_a_row_never_passes_one_whose_planes_are_not_filled(coda_layers: int, depths: list[int], codas: int) -> None:
    """The third token catches up with one that has exited and waits for coda: with the one ahead, with the first one
    across a second that is filled already, or with one that is held. The fake raises if it reads what is not written."""
    config = build(coda_layers=coda_layers, r_max=6)
    served(config, request(depths=depths, max_loops=6, max_tokens=6), policy=CoreFirst(DraftLimit(2, 1), codas))


def test_what_comes_back_for_a_dropped_row_is_void() -> None:
    """A request is aborted while a coda reads rows of its chain for good; the next one has its slot, and its own tokens."""
    harness = Lockstep(build(max_num_seqs=1, async_scheduling="lookahead"), acceptance=1.0)
    assert harness.submit(request()) and harness.submit(request(1))
    while not any(
        step.chained is not None and step.chained.final.any() for step in harness.scheduler._in_flight._steps
    ):
        if harness.dispatch() is None:
            harness.complete()
    harness.abort(0)
    harness.run()
    same_as_plain(harness)
    assert len(harness.answers[1].tokens) == 20


def test_what_a_policy_observes_of_a_coda_is_final_readouts() -> None:
    """A draft's depth is no exit depth: learned exits would be too shallow. Tokens of drafts are not counted, either."""

    class Observer(Refill):
        learns = True

        def observe(self, retired: RetiredStage) -> None:
            if retired.stage is Stage.CODA:
                assert len(retired.slots) == len(retired.depths)
                seen.extend(retired.depths)

    seen: list[int] = []
    harness = served(build(), request(), policy=Observer(1, FixedDrafts(DraftLimit(3, 1))))
    assert seen == [4] * 19
    stats = harness.scheduler.stats()
    assert (stats.generation_tokens, stats.dropped_tokens) == (20, 0) and stats.exit_depth.sum == 20 * 4


def test_a_draft_says_after_how_many_loops_it_was_read() -> None:
    """Counted by depth: started, right and wrong; a final readout that starts a successor is no draft."""
    harness = served(build(draft_depth=2), request(depths=[4, 1] * 10), acceptance=1.0)
    drafts = harness.scheduler.stats().drafts
    assert set(drafts) <= {"2", "3", "4"} and all(each.right <= each.started for each in drafts.values())
    assert sum(each.right for each in drafts.values()) == harness.answers[0].accepted_drafts > 0


@pytest.mark.parametrize(("exited", "asks", "due"), [(2, 0, False), (3, 0, True), (0, 1, True), (0, 0, False)])
def test_exited_rows_wait_for_k_of_them_beside_drafts(exited: int, asks: int, due: bool) -> None:
    """Bug: with drafts a coda ran as soon as one row had exited, so --min-coda-batch was accepted and ignored."""
    view = SimpleNamespace(q_c=exited, q_d=0, q_r=4, can_prefill=lambda: False, asks_for_coda=lambda limit: asks)
    decision = Refill(3, FixedDrafts(DraftLimit(2, 1), 3)).choose(view, 0.0)
    assert decision is not None and (decision.stage is Stage.CODA) == due
