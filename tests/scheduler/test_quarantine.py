"""Requests that kill workers: each fails alone, after few deaths, and whatever ran beside it gets all of its tokens."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthbatch.common.config import POLICIES
from depthbatch.common.frames import ROW_POSITION, ROW_SLOT, Stage, split_prefill_frame
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams, Submit
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.stage_batch import ScheduledStage
from fakes.paged_lockstep import Lockstep
from fakes.paged_model import plain_decode
from fakes.small_engine import BASE
from fakes.strategies import configs, drafting_configs, prompt_of, workloads

QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck))
CONFIG = replace(BASE, max_num_batched_tokens=64, num_blocks=100, buckets=(1, 2, 4, 8), async_scheduling="lookahead")


class Deadly:
    """A Lockstep whose worker dies of stages in which a killer runs at, or beyond, its position; never for good."""

    def __init__(self, config: SchedulerConfig, killers: dict[int, int], rng: random.Random) -> None:
        """``killers``: the position by request (whose seed is its id)."""
        self.harness = Lockstep(config, verify_every=3)
        self.killers = killers
        self.deaths = 0
        self._rng = rng

    def run(self) -> None:
        harness, rng = self.harness, self._rng
        while harness.scheduler.num_unfinished or harness.results:
            if harness.results and rng.random() < 0.5:
                harness.complete()
                continue
            stage = harness.dispatch()
            if stage is not None and self._kills(stage):
                for _ in range(rng.randrange(3)):  # it runs ahead of a worker that is dead
                    harness.dispatch()
                answered = rng.randrange(1 + [r.step_id for r in harness.results].index(stage.header.step_id))
                for _ in range(answered):
                    harness.complete()
                harness.lose_worker()
                self.deaths += 1
                assert self.deaths < 30, "killers are not found"
            elif stage is None and not harness.complete():
                raise AssertionError("nothing can run, yet requests are unanswered")

    def _kills(self, stage: ScheduledStage) -> bool:
        header = stage.header
        if header.stage == Stage.PREFILL:
            frame = split_prefill_frame(stage.frame, header.rows, header.n_tokens, header.n_updates)
            reached = zip(frame.slots.tolist(), (frame.starts + frame.lengths - 1).tolist(), strict=True)
        else:
            reached = zip(*stage.frame[[ROW_SLOT, ROW_POSITION], : header.rows].tolist(), strict=True)
        return any(
            position >= self.killers.get(self.harness.worker.slots[slot].seed, 1 << 30) for slot, position in reached
        )

    def check(self, requests: list[Submit], most_deaths: int) -> None:
        """Killers that got as far as their position have failed; all others are answered as by the plain loop."""
        assert self.deaths <= most_deaths
        config, failed = self.harness.config, 0
        for submit in requests:
            if submit.request_id in self.harness.rejected:
                continue
            answer = self.harness.answers[submit.request_id]
            params = submit.params
            if config.policy == "cb" and params.gate.may_exit_early:
                params = RequestParams(
                    **{n: getattr(params, n) for n in params.__struct_fields__} | {"gate": Gate.NONE}
                )
            expected = plain_decode(prompt_of(submit), params, config)
            if answer.finish_reason == "error":
                failed += 1
                assert submit.request_id in self.killers
                count = len(answer.tokens)
                assert (answer.tokens, answer.depths) == (expected.tokens[:count], expected.depths[:count])
            else:
                assert (answer.tokens, answer.depths) == (expected.tokens, expected.depths)
                assert answer.finish_reason == expected.finish_reason
        assert bool(failed) == bool(self.deaths)
        assert self.harness.scheduler.stats().kv_usage == 0.0 and not self.harness.scheduler._requests.quarantine


def submit(request_id: int, prompt: int = 5, tokens: int = 12, **fields: object) -> Submit:
    params = RequestParams(max_tokens=tokens, seed=request_id, max_loops=4, gate=Gate.NONE, **fields)
    return Submit(request_id, np.arange(prompt, dtype=np.int32).tobytes(), params)


@pytest.mark.parametrize(("beside", "deaths"), [(0, 2), (7, 3), (20, 3)])
@pytest.mark.parametrize("position", [0, 4, 9])
@pytest.mark.parametrize("layout", [KVLayout.LAST_EXITED, KVLayout.SINGLE])
def test_a_killer_fails_alone(beside: int, deaths: int, position: int, layout: KVLayout) -> None:
    """Rows "one request kills the device" and "it comes back with every restart, and takes all others with it for ever". In its
    prefill or at a later token: two deaths where it runs alone, three where others run beside it, which get all of
    their tokens. The error says so."""
    deadly = Deadly(replace(CONFIG, kv_layout=layout), {1: position}, random.Random(position))
    requests = [submit(i) for i in range(1, 2 + beside)]
    failures = []
    scheduler = deadly.harness.scheduler
    drain = scheduler.drain_events
    scheduler.drain_events = lambda: [failures.append(e.failure) or e if e.kills_worker else e for e in drain()]
    for request in requests:
        deadly.harness.submit(request)
    deadly.run()
    deadly.check(requests, deaths)
    assert deadly.deaths == deaths and failures == [
        f"the worker died {'twice' if deaths == 2 else '3 times'} while running this request"
    ]


def test_deaths_of_other_causes_fail_nobody() -> None:
    """Workers that die again and again of something else, while every request gets on between two deaths: none is ever
    a suspect for long, and all are answered."""
    harness, rng = Lockstep(CONFIG), random.Random(3)
    requests = [submit(i, tokens=40) for i in range(8)]
    for request in requests:
        harness.submit(request)
    deaths = 0
    while harness.scheduler.num_unfinished:
        least = min(len(harness.answers[i].tokens) for i in range(8))
        if harness.dispatch() is None or rng.random() < 0.3:
            harness.complete()
        if deaths < 12 and least >= 3 * (deaths + 1):
            harness.lose_worker()
            deaths += 1
    assert deaths == 12 and all(answer.finish_reason == "length" for answer in harness.answers.values())


def test_a_cleared_suspect_makes_room_and_comes_back() -> None:
    """Suspects run one at a time: while one is tried nothing else is in flight, not even what waits with a higher
    priority, and the first one to be cleared is set aside for the next."""
    harness = Lockstep(CONFIG)
    for i in range(3):
        harness.submit(submit(i, tokens=20))
    for _ in range(2):
        while harness.dispatch() is not None:
            pass
        harness.lose_worker()
    harness.submit(submit(9, priority=1))
    order: list[int] = []
    waiting = harness.scheduler.admission.waiting
    while waiting.has_suspects or waiting.alone is not None:
        stage = harness.dispatch()
        if stage is None:
            harness.complete()
            continue
        rows = stage.frame[: stage.header.rows] if stage.header.stage == Stage.PREFILL else stage.frame[0, :1]
        assert stage.header.rows == 1 and harness.scheduler.num_running <= 1
        [seed] = {harness.worker.slots[slot].seed for slot in rows.tolist()}
        if order[-1:] != [seed]:
            order.append(seed)
    assert order == [0, 1, 2]
    harness.run()
    assert all(answer.finish_reason == "length" for answer in harness.answers.values())


@settings(QUICK, max_examples=75)
@given(st.data())
def test_any_killers_in_any_engine(data: st.DataObject) -> None:
    """Every policy, mode, layout and limit, with speculation and scarce blocks; up to three killers at any position."""
    config = data.draw(st.one_of(configs(policies=POLICIES), drafting_configs()))
    gates = config.gates if config.draft_lanes else tuple(Gate)  # depth_indexed has no early exits
    requests = data.draw(workloads(config, gates, drafts=bool(config.draft_lanes)))
    ids = [request.request_id for request in requests]
    killers = data.draw(st.dictionaries(st.sampled_from(ids), st.integers(0, 20), min_size=1, max_size=3))
    deadly = Deadly(config, killers, random.Random(data.draw(st.integers(0, 1000))))
    for request in requests:
        deadly.harness.submit(request)
    deadly.run()
    deadly.check(requests, 3 * len(killers))


def test_who_takes_the_slot_of_an_aborted_killer_is_not_blamed() -> None:
    """Bug: a request that was implicated once, and had been given the slot of one that was aborted with its stage in flight,
    was taken for what alone was in flight, and failed."""
    harness = Lockstep(replace(CONFIG, max_num_seqs=1, buckets=(1,)))
    harness.submit(submit(1))
    harness.dispatch()
    harness.lose_worker()
    harness.submit(submit(2, priority=1))
    harness.dispatch()
    harness.abort(2)
    harness.dispatch()
    assert len(harness.results) == 2
    harness.lose_worker()
    assert not harness.blamed
    harness.run()
    assert harness.answers[1].tokens == plain_decode(list(range(5)), submit(1).params, harness.config).tokens


def test_who_was_preempted_with_a_stage_in_flight_is_implicated() -> None:
    """Bug: the slots of stages in flight were looked at, so that a killer which had lost its slot since was not among those
    who may have killed the worker, and whoever had its slot now was."""
    harness = Lockstep(CONFIG)
    harness.submit(submit(1))
    requests = harness.scheduler._requests
    for blamed in (set(), {1}):
        harness.dispatch()
        requests.preempt(requests.get(1))
        harness.lose_worker()
        assert harness.blamed == blamed
