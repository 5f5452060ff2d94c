"""Scarce KV memory: who gives its blocks back, who passes a head that lacks some, and that nobody starves."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from depthbatch.common.gates import Gate
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.passing import tokens_to_wait
from depthbatch.scheduler.requests import Request, WaitingQueue
from depthbatch.scheduler.validation import make_request
from fakes.paged_lockstep import Lockstep
from fakes.small_engine import BASE, submit

# --- preemption


@pytest.mark.parametrize("policy", ["cb", "no-refill", "refill"])
@pytest.mark.parametrize(("prompt", "tokens"), [(8, 120), (64, 64), (120, 8)])
def test_twice_oversubscribed_kv_does_not_thrash(policy: str, prompt: int, tokens: int) -> None:
    """Row "preempt and resume thrash": 16 slots, blocks for 8 whole sequences. Ideal: as many slots as the blocks can
    hold, so that nothing is ever preempted. Every request finishes with its tokens, in at most 1.5 times the stages and
    1.5 times the core rows."""
    config = replace(
        BASE,
        policy=policy,
        max_num_seqs=16,
        buckets=(16,),
        max_num_batched_tokens=256,
        min_free_slots=2,
        max_model_len=128,
        num_blocks=1 + 8 * 32,
        preemption="recompute",
    )
    ideal = replace(config, max_num_seqs=8, min_free_slots=1)
    counts = []
    for one in (ideal, config):
        harness = Lockstep(one, verify_every=50)
        for request_id in range(48):
            length = max(1, prompt - request_id % 5)
            harness.submit(
                submit(request_id, length, tokens, gate=Gate.REPLAY, exit_depths=bytes([2, 3, 4, 2, 3] * 24))
            )
        harness.run()
        assert all(len(answer.tokens) == tokens for answer in harness.answers.values())
        counts.append((harness.dispatched, harness.worker.core_rows, harness.scheduler.counters.preemptions))
    assert counts[0][2] == 0
    assert counts[1][0] <= 1.5 * counts[0][0] and counts[1][1] <= 1.5 * counts[0][1]
    if (prompt, tokens) == (8, 120):
        assert counts[1][2] > 0  # else this tests nothing


@pytest.mark.parametrize(("preempted", "admitted"), [(False, 7), (True, 5)])
def test_a_block_stays_free_for_each_running_sequence_to_grow_into(preempted: bool, admitted: int) -> None:
    """Bug: a reserve of 0 passed all tests. Prompts of two blocks, 20 blocks: the seventh needs 2 and one for each of the 6
    that run, of the 8 that are left; an eighth would need 2 and 7 of 6. Those that come back need two for each that runs:
    the fifth 2 and 8 of 12, a sixth 2 and 10 of 10, and so would be thrown out again at once."""
    admission = Scheduler(replace(BASE, num_blocks=21, max_num_batched_tokens=64)).admission
    for request_id in range(8):
        request = make_request(submit(request_id), BASE, False, request_id)
        request.preemptions = int(preempted)
        admission.waiting.push(request)
    assert len(admission.pack()) == admitted


@pytest.mark.parametrize("policy", ["refill", "auto"])
def test_the_victim_is_who_is_served_last(policy: str) -> None:
    """Bug: the oldest as the victim passed all tests. Blocks for half of what runs: whenever one is missing, the sequence
    of the lowest priority gives its own back, of equals the one that came last; so the first of the highest priority is
    never thrown out, runs as if it were alone, and every other one gets there in its turn."""
    harness = Lockstep(replace(BASE, policy=policy, num_blocks=21, max_num_batched_tokens=64))
    for request_id in range(12):
        harness.submit(submit(request_id, 5, 40, priority=int(request_id in (4, 7))))
    requests, victims = harness.scheduler._requests, []
    preempt = requests.preempt

    def watched(victim: Request, may_offload: bool) -> None:
        running = [each for each in harness.scheduler.admission.rows.request if each is not None]
        assert victim.order == max(each.order for each in running)
        victims.append(victim.request_id)
        preempt(victim, may_offload)

    requests.preempt = watched  # type: ignore[method-assign]
    harness.run()
    assert len(victims) > 10 and 4 not in victims and 7 in victims
    assert all(len(answer.tokens) == 40 for answer in harness.answers.values())


# --- a head that lacks blocks

SCARCE = replace(BASE, preemption="off", max_model_len=300, max_num_batched_tokens=512)  # 100 blocks of 4 tokens


def stages_until(harness: Lockstep, holds: Callable[[], object], more: Callable[[], object] = lambda: None) -> int:
    """Runs until it ``holds``, with ``more`` before every stage; stages."""
    before = harness.dispatched
    while not holds():
        assert harness.dispatched - before < 20_000
        more()
        harness.dispatch()
        harness.complete()
    return harness.dispatched - before


@pytest.mark.parametrize("short", [0, 30])
@pytest.mark.parametrize("policy", ["no-refill", "refill"])
def test_short_requests_pass_a_head_that_lacks_blocks(policy: str, short: int) -> None:
    """Bug: half of the blocks are with a sequence of 195 tokens, the head needs more than the rest, and short requests
    behind it waited for 2,388 stages with 50 of 100 blocks free. They pass, and the head starts when it would have."""
    harness = Lockstep(replace(SCARCE, policy=policy))
    harness.submit(submit(1, 5, 195))
    stages_until(harness, lambda: harness.answers[1].tokens)
    harness.submit(submit(2, 5, 240))
    for request_id in range(3, 3 + short):
        harness.submit(submit(request_id, 5, 4, client=request_id))
    served = stages_until(harness, lambda: all(harness.answers[i].tokens for i in range(3, 3 + short)))
    assert served < 300 and not harness.answers[2].tokens
    stages_until(harness, lambda: harness.answers[2].tokens)
    assert len(harness.answers[1].tokens) == 195
    harness.run()


def test_the_head_is_passed_only_while_who_holds_its_blocks_runs() -> None:
    """Short requests without end, each of which fits beside what runs. The head is next as soon as the sequence it waits
    for has ended, and those that have passed it by then."""
    harness, ids = Lockstep(SCARCE, verify_every=50), iter(range(3, 10_000))
    harness.submit(submit(1, 5, 195))
    stages_until(harness, lambda: harness.answers[1].tokens)
    harness.submit(submit(2, 5, 240))

    def one_more() -> None:
        if harness.scheduler.num_waiting < 12:
            harness.submit(submit(next(ids), 5, 30))

    stages_until(harness, lambda: harness.answers[1].finish_reason, one_more)
    passed = sum(bool(answer.tokens) for answer in harness.answers.values())
    assert passed > 30
    stages_until(harness, lambda: harness.answers[2].tokens, one_more)
    late = sum(bool(answer.tokens) for answer in harness.answers.values()) - passed
    assert late <= 1 + BASE.max_num_seqs  # the head, and what is let in together with it
    harness.run()


def test_who_could_run_for_longer_than_the_head_waits_does_not_pass() -> None:
    """Of two that fit, the one whose limit lies beyond the end of the sequence that the head waits for stays behind."""
    harness = Lockstep(SCARCE)
    harness.submit(submit(1, 5, 195))
    stages_until(harness, lambda: len(harness.answers[1].tokens) == 100)
    harness.submit(submit(2, 5, 240))
    harness.submit(submit(3, 5, 110))
    harness.submit(submit(4, 5, 80))
    stages_until(harness, lambda: harness.answers[4].finish_reason)
    assert not harness.answers[3].tokens and not harness.answers[2].tokens
    harness.run()


@pytest.mark.parametrize(
    ("missing", "tokens"), [(10, 30), (30, 30), (31, 90), (50, 90), (60, 90), (-5, 0)], ids=lambda value: str(value)
)
def test_the_head_waits_for_old_sequences_alone(missing: int, tokens: int) -> None:
    """Old ones hold 30 blocks for 30 more tokens and 20 for 90; one that has passed holds 5 for 200. Blocks that only the
    last lacks are no reason to let more pass, else a slow one that passes would let in the next."""
    head, *running = (make_request(submit(i, 5, 59), BASE, False, i) for i in range(4))
    held = np.array([0, 30, 20, 5], np.int32)
    head.blocked_since = 2
    for slot, (request, left) in enumerate(zip(running, (30, 90, 200), strict=True), start=1):
        request.slot = request.admitted = slot
        request.limit = left
    assert tokens_to_wait(head, missing + 5, [None, *running], held) == tokens
    assert tokens_to_wait(head, missing + 5, [None, None, None, running[2]], held) == 0


def test_who_passes_takes_no_turn_from_its_clients_first_request() -> None:
    """A client's turn is over when its first request has been let in, not when a later one has passed it."""
    queue = WaitingQueue()
    requests = [make_request(submit(i, client=client), BASE, False, i) for i, client in enumerate((7, 7, 8, 8, 9))]
    for request in requests:
        queue.push(request)
    assert queue.behind_head(3) == [requests[i] for i in (2, 4, 1)]
    queue.remove(requests[1])
    assert queue.head() is requests[0]
    queue.remove(requests[0])
    assert queue.head() is requests[2] and queue.behind_head(9) == [requests[4], requests[3]]
