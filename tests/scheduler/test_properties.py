"""Any mix of requests, aborts, sizes and policies: answered once, nothing leaked, the tokens of the plain loop.

The worker of these tests (scheduler_fakes.paged_worker) checks every frame and every read of every row, and the
scheduler's full self-check runs after every operation; a pass means thousands of frames were right.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthbatch.common.config import POLICIES
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams, Submit
from depthbatch.scheduler.config import SchedulerConfig
from fakes.paged_lockstep import Lockstep
from fakes.paged_model import plain_decode
from fakes.small_engine import BASE
from fakes.strategies import EARLY_GATES, VOCAB, configs, prompt_of, workloads

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def served_gate(submit: Submit, config: SchedulerConfig) -> Submit:
    """cb runs requests whose depth may vary at full depth."""
    if config.policy == "cb" and submit.params.gate.may_exit_early:
        fields = {name: getattr(submit.params, name) for name in submit.params.__struct_fields__}
        return Submit(submit.request_id, submit.prompt, RequestParams(**fields | {"gate": Gate.NONE}))
    return submit


@settings(QUICK, max_examples=120)
@given(st.data())
def test_every_request_gets_the_tokens_of_the_plain_loop(data: st.DataObject) -> None:
    """The whole contract at once: tokens, exit depths and finish reason of every request are those of a batch-1 loop,
    in every policy and async mode, for every gate and layout, with results held back at random and sequences preempted
    and rebuilt. The fake cache remembers depths, so an exit one loop off changes all later tokens."""
    config = data.draw(configs(policies=POLICIES))
    harness = Lockstep(config)
    rng = random.Random(data.draw(st.integers(0, 1000)))
    requests = data.draw(workloads(config))
    for submit in requests:
        harness.submit(submit)
    harness.run(hold=lambda: rng.random() < 0.6)
    for submit in requests:
        if submit.request_id in harness.rejected:
            continue
        answer = harness.answers[submit.request_id]
        expected = plain_decode(prompt_of(submit), served_gate(submit, config).params, config)
        assert (answer.tokens, answer.depths) == (expected.tokens, expected.depths)
        assert answer.finish_reason == expected.finish_reason
        assert answer.stop_reason == (answer.tokens[-1] if answer.finish_reason == "stop" else None)


@settings(QUICK, max_examples=100)
@given(st.data())
def test_any_interleaving_ends_with_every_request_answered_once(data: st.DataObject) -> None:
    """Submits and aborts at any time, results late, blocks scarce (preemption), worker and scheduler lost: each request
    ends exactly once, unaborted ones with all the tokens and depths of the plain loop (but for one under which workers died
    twice), and nothing is left in a queue, a slot or a block."""
    config = data.draw(configs(policies=POLICIES))
    harness = Lockstep(config)
    rng = random.Random(data.draw(st.integers(0, 1000)))
    requests = data.draw(workloads(config))
    aborted = harness.interleave(requests, rng)
    harness.run(hold=lambda: rng.random() < 0.5)
    assert set(harness.answers) | set(harness.rejected) == {submit.request_id for submit in requests}
    for submit in requests:
        if submit.request_id in harness.rejected:
            continue
        answer = harness.answers[submit.request_id]
        expected = plain_decode(prompt_of(submit), served_gate(submit, config).params, config)
        count = len(answer.tokens)
        assert (answer.tokens, answer.depths) == (expected.tokens[:count], expected.depths[:count])
        if submit.request_id in aborted:
            assert answer.finish_reason == "abort"
        elif submit.request_id in harness.blamed:
            assert answer.finish_reason == "error"
        else:
            assert (count, answer.finish_reason) == (len(expected.tokens), expected.finish_reason)
    stats = harness.scheduler.stats()
    assert stats.kv_usage == 0.0 and stats.running == 0


@settings(QUICK, max_examples=60)
@given(st.data())
def test_policies_agree_on_tokens_and_depths(data: st.DataObject) -> None:
    """The order of stages must not change what a request gets. cb is part of it where no depth varies."""
    config = data.draw(configs(preemption=("off",)))
    full_depth = data.draw(st.booleans())
    gates = (Gate.NONE, Gate.FIXED) if full_depth else EARLY_GATES
    requests = data.draw(workloads(config, gates=gates))
    answers = []
    for policy in POLICIES if full_depth else [policy for policy in POLICIES if policy != "cb"]:
        harness = Lockstep(replace(config, policy=policy))
        for submit in requests:
            harness.submit(submit)
        harness.run()
        answers.append(harness.answers)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(
    ("mode", "layout", "host_blocks"),
    [
        ("off", KVLayout.LAST_EXITED, 0),
        ("lookahead", KVLayout.LAST_EXITED, 12),
        ("lookahead", KVLayout.SINGLE, 0),
        ("lookahead", KVLayout.SINGLE, 12),
    ],
)
def test_ten_thousand_random_operations_end_with_everything_free(mode: str, layout: KVLayout, host_blocks: int) -> None:
    """Aborts in every state, twice, for unknown ids, with completions in flight; scarce blocks, all gates. The check
    that free + held is the total runs inside, on every idle; here the counts are compared once more. Rebuilt sequences,
    thousands of whose tokens are decoded a second time under the shared layout, say what the plain loop says, and so do
    those whose K/V wait in host memory, where there is room for a few."""
    rng = random.Random(7)
    config = replace(
        BASE,
        max_num_batched_tokens=24,
        min_coda_batch=3,
        num_blocks=26,
        max_model_len=40,
        buckets=(1, 2, 4, 8),
        async_scheduling=mode,
        kv_layout=layout,
        preemption="offload" if host_blocks else "recompute",
        host_blocks=host_blocks,
    )
    harness = Lockstep(config, verify_every=7)
    ids = 0
    for _ in range(10_000):
        draw = rng.random()
        if draw < 0.06:
            harness.submit(random_submit(rng, ids, config))
            ids += 1
        elif draw < 0.10 and ids:
            harness.abort(rng.randrange(ids + 2))
        elif draw < 0.55:
            harness.dispatch()
        else:
            harness.complete()
    harness.run()
    scheduler = harness.scheduler
    assert scheduler.admission.blocks.free == config.usable_blocks and scheduler.admission.slots.free == 8
    assert all(answer.finish_reason is not None for answer in harness.answers.values())
    assert scheduler.counters.preemptions > 10 and len(harness.answers) > 400 and harness.worker.mixed_depths >= 3
    assert harness.worker.rebuilt > 20 and (harness.worker.restored > 20) == (host_blocks > 0)
    if layout is not KVLayout.SINGLE:
        assert harness.worker.forced == 0
    elif not host_blocks:  # with host memory few sequences have to be decoded again
        assert harness.worker.forced > 20
    for request_id, answer in harness.answers.items():
        submit = harness.submits[request_id]
        expected = plain_decode(prompt_of(submit), submit.params, config)
        count = len(answer.tokens)
        assert (answer.tokens, answer.depths) == (expected.tokens[:count], expected.depths[:count])
    reasons = {answer.finish_reason for answer in harness.answers.values()}
    assert reasons == {"stop", "length", "abort"}


def random_submit(rng: random.Random, request_id: int, config: SchedulerConfig) -> Submit:
    gate = rng.choice(list(Gate))
    max_loops = rng.randint(1, config.r_max)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
    return Submit(
        request_id,
        np.asarray(prompt, dtype=np.int32).tobytes(),
        RequestParams(
            max_tokens=rng.randint(1, 24),
            stop_token_ids=(1, 2) if rng.random() < 0.5 else (),
            seed=request_id,
            gate=gate,
            exit_threshold=0.5,
            min_loops=max_loops if gate is Gate.FIXED else 1,
            max_loops=max_loops,
            exit_depths=bytes(rng.randint(1, 4) for _ in range(8)),
            priority=rng.choice([0, 0, 1]),
        ),
    )
