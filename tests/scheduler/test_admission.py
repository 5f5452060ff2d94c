"""Who is let in, when, and what is refused with numbers; limits at, below and above; scarce KV without thrash."""

from dataclasses import replace

import numpy as np
import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import EngineInfo, RequestParams, StageResult, Submit
from depthbatch.frontend.live_requests import LiveRequest, LiveRequests
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.requests import PrefillLimit
from depthbatch.scheduler.validation import make_request
from fakes.paged_lockstep import Lockstep
from fakes.small_engine import BASE, submit

# --- limits


@pytest.mark.parametrize(
    ("prompt", "tokens", "served"), [(63, 1, 1), (63, 5, 1), (62, 2, 2), (60, 4, 4), (60, 9, 4), (64, 1, 0)]
)
def test_length_limits_at_below_and_above(prompt: int, tokens: int, served: int) -> None:
    """prompt + output may reach max_model_len (64) and not pass it: longer outputs end with "length", a prompt that
    leaves no room is refused. Never a hang: run() fails when something is left."""
    harness = Lockstep(BASE)
    assert harness.submit(submit(1, prompt, tokens)) == (served > 0)
    harness.run()
    if served:
        assert len(harness.answers[1].tokens) == served and harness.answers[1].finish_reason == "length"
    else:
        assert "64 tokens" in harness.rejected[1] and "max-model-len 64" in harness.rejected[1]


@pytest.mark.parametrize("preemption", ["off", "recompute"])
@pytest.mark.parametrize(("blocks", "fits"), [(7, False), (8, True)])
def test_what_can_never_fit_is_refused_with_the_numbers(preemption: str, blocks: int, fits: bool) -> None:
    """30 prompt + 3 output tokens write 32 positions, 8 blocks of 4: with 7 it is refused, with 8 it runs, although
    headroom asks for free blocks (nothing else runs that could use them)."""
    config = replace(BASE, num_blocks=blocks + 1, preemption=preemption, kv_headroom=0.5)
    harness = Lockstep(config)
    assert harness.submit(submit(1, 30, 3)) == fits
    harness.run()
    if fits:
        assert len(harness.answers[1].tokens) == 3
    else:
        assert "need 8 KV blocks of 4 tokens, the cache has 7" in harness.rejected[1]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": list(range(64))}, "prompt"),
        ({"prompt": 10, "tokens": 60}, "max_tokens"),
    ],
)
def test_what_cannot_fit_is_refused_and_names_the_field(change: dict, param: str) -> None:
    """What only the scheduler knows: each is a Rejected naming its field, and the next request is served."""
    harness = Lockstep(replace(BASE, num_blocks=11))
    refusal = harness.scheduler.submit(submit(1, **change))
    assert refusal is not None and refusal.param == param and "\n" not in refusal.reason
    assert harness.submit(submit(2))
    harness.run()


@pytest.mark.parametrize(("data", "param"), [(b"\1\0\0", "prompt"), (b"\1\0\0\0\x28", "prompt"), (b"", "prompt")])
def test_bad_prompt_bytes_are_refused(data: bytes, param: str) -> None:
    """Half a token, one and a quarter, none."""
    refusal = Scheduler(BASE).submit(Submit(1, data, RequestParams(max_tokens=1, max_loops=1)))
    assert refusal is not None and refusal.param == param


def test_an_id_in_use_is_refused_and_its_owner_unharmed() -> None:
    """The same id twice must not swap or end the first."""
    harness = Lockstep(BASE)
    harness.submit(submit(1))
    refusal = harness.scheduler.submit(submit(1, 9))
    assert refusal is not None and refusal.param == "request_id"
    harness.run()
    assert len(harness.answers[1].tokens) == 4


# --- resubmission


@pytest.mark.parametrize(("generated", "left", "reason"), [(0, 6, "length"), (3, 3, "length"), (6, 0, "length")])
def test_resubmitted_requests_continue_where_they_were(generated: int, left: int, reason: str) -> None:
    """After a crash the frontend sends the tokens it has: only the rest comes, the same as without the crash, and a
    request that was complete ends at once."""
    whole = Lockstep(BASE)
    whole.submit(submit(1, tokens=6))
    whole.run()
    tokens, depths = whole.answers[1].tokens, whole.answers[1].depths
    again = Lockstep(BASE)
    first = submit(1, tokens=6)
    said = np.asarray(tokens[:generated], np.int32).tobytes()
    again.submit(Submit(1, first.prompt, first.params, said, bytes(depths[:generated])))
    again.run()
    assert (again.answers[1].tokens, again.answers[1].depths) == (tokens, depths)
    assert again.answers[1].finish_reason == reason
    assert again.scheduler.counters.generation_tokens == left


def test_resubmitted_request_that_had_stopped_ends_with_stop() -> None:
    """Its last token is a stop token: it must not decode on."""
    harness = Lockstep(BASE)
    one = submit(1, tokens=9, stop_token_ids=(7,))
    harness.submit(Submit(1, one.prompt, one.params, np.asarray([3, 7], np.int32).tobytes(), b"\4\2"))
    answer = harness.answers[1]
    assert (answer.tokens, answer.finish_reason, answer.stop_reason) == ([3, 7], "stop", 7)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"generated_depths": b"\4"}, "generated_depths"),
        ({"generated_depths": b"\4\2\1"}, "generated_depths"),
        ({"generated_depths": b"\4\0"}, "generated_depths"),
        ({"generated_depths": b"\4\5"}, "generated_depths"),
        ({"generated": np.array([3, 40], np.int32).tobytes()}, "generated"),
        ({"generated": np.array([3, -1], np.int32).tobytes()}, "generated"),
        ({"generated": b"\1\0\0\0\1"}, "generated"),
        ({"cuts": b"\5\0\0"}, "cuts"),
        ({"cuts": np.array([4], np.int32).tobytes()}, "cuts"),
        ({"cuts": np.array([6, -1], np.int32).tobytes()}, "cuts"),
        ({"cuts": np.array([5], np.int32).tobytes()}, None),
    ],
)
def test_what_is_said_of_a_resubmitted_request_is_checked(changes: dict, param: str | None) -> None:
    """A depth that is missing or out of range would be a wrong K/V, or a row that never leaves the core."""
    one = submit(1)
    fields = {"generated": np.array([3, 7], np.int32).tobytes(), "generated_depths": b"\4\2"} | changes
    refusal = Scheduler(BASE).submit(Submit(1, one.prompt, one.params, **fields))
    assert (refusal and refusal.param) == param


@pytest.mark.parametrize(
    ("layout", "batches"),
    [
        (KVLayout.SINGLE, [[9, 7], [9], [16], [4]]),
        (KVLayout.FIRST_THEN_SHARED, [[9, 7], [9], [16], [4]]),
        (KVLayout.LAST_EXITED, [[9, 7], [9, 7], [13]]),
    ],
)
def test_what_else_is_in_the_batch_does_not_cut_a_prompt(layout: KVLayout, batches: list[list[int]]) -> None:
    """Bug: where loops share a plane a prompt's K/V depend on where it is cut, and it was cut where the batch of M = 16 was
    full, so that what a request said depended on who was beside it. There it is cut every M tokens and nowhere else; what
    does not fit waits for the next batch, and no policy's limit cuts it. Elsewhere batches are full."""
    config = replace(BASE, kv_layout=layout)
    admission = Scheduler(config).admission
    for request_id, length in enumerate((9, 7, 9, 20)):
        admission.waiting.push(make_request(submit(request_id, length), config, False, request_id))
    assert [[chunk.length for chunk in admission.pack()] for _ in batches] == batches
    admission.waiting.push(make_request(submit(5, 12), config, False, 5))
    [chunk] = admission.pack(PrefillLimit(tokens=8, prompts=1))
    assert chunk.length == (8 if layout is KVLayout.LAST_EXITED else 12)


def test_a_prompt_is_cut_where_it_was_after_the_scheduler_has_died() -> None:
    """Bug: what the next scheduler is told of a prompt did not say where it had been cut. Behind two prompts that now go
    first there is room for 14 of its 15 tokens: cut there, its K/V in a shared plane are others than those that its output
    was decoded with. The fake worker remembers how each prompt was cut."""
    harness = Lockstep(replace(BASE, kv_layout=KVLayout.SINGLE))
    harness.submit(submit(1, 15, 6))
    while not harness.answers[1].tokens:
        harness.dispatch()
        harness.complete()
    harness.submit(submit(2, 1, 2, priority=1))
    harness.submit(submit(3, 1, 2, priority=1))
    harness.lose_scheduler()
    harness.run()
    assert harness.worker.rebuilt == 1
    assert [len(harness.answers[index].tokens) for index in (1, 2, 3)] == [6, 2, 2]


# --- order


def prefill_order(harness: Lockstep) -> list[int]:
    """Prompt length of each sequence in order of its first chunk (lengths tell the requests apart)."""
    order: list[int] = []
    while harness.scheduler.num_unfinished:
        stage = harness.dispatch()
        if stage is not None and stage.header.stage == 0:
            starts = stage.frame[stage.header.rows : 2 * stage.header.rows]
            slots = stage.frame[: stage.header.rows]
            order += [
                harness.scheduler.admission.rows.request[slot].prompt.size  # type: ignore[union-attr]
                for slot, start in zip(slots.tolist(), starts.tolist(), strict=True)
                if start == 0 and harness.scheduler.admission.rows.request[slot] is not None
            ]
        harness.complete()
    return order


def test_priority_first_then_arrival() -> None:
    """Higher priority is prefilled first, equals in order of arrival, preempted ones not after newcomers."""
    harness = Lockstep(replace(BASE, max_num_seqs=1, buckets=(1,)))
    for request_id, (prompt, priority) in enumerate([(3, 0), (4, 0), (5, 2), (6, 1), (7, 2), (8, -1)]):
        harness.submit(submit(request_id, prompt, priority=priority))
    assert prefill_order(harness) == [5, 7, 6, 3, 4, 8]


def test_one_huge_prompt_is_chunked_and_short_requests_wait_a_bounded_time() -> None:
    """Row "one huge prompt blocks everyone": a prompt of 60 tokens under M = 16 goes through in 4 prefills; a short one
    behind it starts in the last of them, at most ceil(60 / 16) stages later."""
    harness = Lockstep(BASE)
    harness.keep_stages = True
    harness.submit(submit(1, 60))
    harness.submit(submit(2, 4))
    while not harness.answers[2].tokens:
        harness.dispatch()
        harness.complete()
    assert [rows for _, rows, _, _ in harness.stages] == [1, 1, 1, 2]
    harness.run()


def test_min_free_slots_gates_new_prompts_only() -> None:
    """With S = 4 of 8 slots, nothing is prefilled while fewer are free, except the rest of a prompt that has begun."""
    layout = KVLayout.LAST_EXITED  # under which prompts are cut where a batch is full
    harness = Lockstep(replace(BASE, min_free_slots=4, max_num_batched_tokens=40, kv_layout=layout))
    for request_id in range(5):
        harness.submit(submit(request_id, 7, tokens=20))
    harness.submit(submit(9, 30, tokens=1))
    kinds = []
    for _ in range(8):
        stage = harness.dispatch()
        assert stage is not None
        kinds.append(int(stage.header.stage))
        harness.complete()
    assert harness.scheduler.admission.slots.free == 3
    assert kinds[0] == 0 and kinds.count(0) == 2  # the prompt of 30 is cut at 5 tokens and goes on at once
    harness.submit(submit(10, 3))
    for _ in range(5):
        stage = harness.dispatch()
        assert stage is not None and stage.header.stage != 0
        harness.complete()
    harness.run()


def test_headroom_keeps_blocks_free_at_admission() -> None:
    """Admission stops where the free share would fall below the headroom."""
    for headroom, admitted in ((0.0, 8), (0.5, 5)):
        harness = Lockstep(
            replace(BASE, num_blocks=21, kv_headroom=headroom, preemption="off", max_num_batched_tokens=64)
        )
        for request_id in range(8):
            harness.submit(submit(request_id, 5, tokens=4))
        harness.dispatch()
        assert harness.scheduler.num_running == admitted
        harness.run()


# --- worker loss


@pytest.mark.parametrize("lost_after", [1, 3, 8, 20, 50])
def test_recovery_rebuilds_every_sequence(lost_after: int) -> None:
    """The worker vanishes with results unanswered: the books balance at once, late answers of the old worker are
    counted and dropped, and a fresh worker (which checks that each sequence is prefilled anew) brings all tokens."""
    whole, harness = (Lockstep(replace(BASE, async_scheduling="lookahead")) for _ in range(2))
    requests = [submit(i, 3 + i, tokens=10, gate=Gate.LOOKAHEAD, exit_threshold=0.5) for i in range(12)]
    for request in requests:
        whole.submit(request)
        harness.submit(request)
    whole.run()
    while harness.dispatched < lost_after:
        if harness.dispatch() is None:
            harness.complete()
    late = list(harness.results)
    harness.results.clear()
    harness.scheduler.recover()
    harness.scheduler.verify()
    last = harness.worker.last_step_id
    harness.worker = type(harness.worker)(harness.config)
    harness.worker.last_step_id = last
    for result in late:
        assert harness.scheduler.complete(result, 0.0) == []
    assert harness.scheduler.counters.stale_results == len(late) > 0
    harness.run()
    assert {i: a.tokens for i, a in harness.answers.items()} == {i: a.tokens for i, a in whole.answers.items()}


# --- configuration


INFO = EngineInfo(
    model="m",
    architecture="ouro",
    vocab_size=40,
    r_max=4,
    r_min=1,
    default_gate=Gate.NONE,
    gates=tuple(Gate),
    default_threshold=1.0,
    kv_layout="last_exited",
    block_size=16,
    num_blocks=65,
    kv_bytes_per_token=1,
    max_model_len=256,
    boundary_layers=0,
    buckets=(1, 2, 4, 8, 16, 32, 64),
    device="cpu",
    dtype="float32",
)


def changed(info: EngineInfo, **changes: object) -> EngineInfo:
    return EngineInfo(**{name: getattr(info, name) for name in info.__struct_fields__} | changes)


def test_defaults_follow_the_model() -> None:
    """S = W // 8; K = 1 without boundary layers, W // 4 with them; both at least 1."""
    one = SchedulerConfig.resolve(EngineConfig(max_num_seqs=64), INFO)
    assert (one.min_free_slots, one.min_coda_batch, one.usable_blocks) == (8, 1, 64)
    assert SchedulerConfig.resolve(EngineConfig(max_num_seqs=64), changed(INFO, boundary_layers=4)).min_coda_batch == 16
    deep = changed(INFO, boundary_layers=4, draft_lanes=2, kv_layout="last_exited")
    for speculation, k in (("2", 64), ("auto", 16)):  # where drafts ask for codas, exited rows go with them
        options = EngineConfig(max_num_seqs=64, policy="refill", speculation=speculation)
        assert SchedulerConfig.resolve(options, deep).min_coda_batch == k
    tiny = SchedulerConfig.resolve(EngineConfig(max_num_seqs=2), changed(INFO, boundary_layers=4))
    assert (tiny.min_free_slots, tiny.min_coda_batch) == (1, 1)
    assert SchedulerConfig.resolve(EngineConfig(policy="refill", min_coda_batch=5), INFO).min_coda_batch == 5


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"buckets": (1, 2, 4)}, "largest bucket 4"),
        ({"buckets": ()}, "buckets"),
        ({"buckets": (4, 2, 64)}, "buckets"),
        ({"num_blocks": 1}, "kv-blocks"),
        ({"max_model_len": 1}, "max-model-len"),
        ({"kv_layout": "depth_indexed", "default_gate": Gate.LOOKAHEAD}, "depth_indexed cannot serve gate lookahead"),
    ],
)
def test_contradictions_are_config_errors(info: dict, says: str) -> None:
    """What only shows once the worker is known; the process turns it into exit code 2."""
    with pytest.raises(ConfigError, match=says):
        SchedulerConfig.resolve(EngineConfig(max_num_seqs=64), changed(INFO, **info))


def test_clients_take_turns_at_the_slots() -> None:
    """Bug: requests of a client who came later waited for all of one who had sent many. A client's number goes from the
    frontend's record of a request, a resubmitted one too, to the queue: with one slot, the second client's only request
    is second."""
    live, harness, finished = LiveRequests(1), Lockstep(replace(BASE, max_num_seqs=1, buckets=(1,))), []
    params = RequestParams(max_tokens=1, max_loops=4)
    for client in (7, 7, 7, 9):
        request_id = live.add(LiveRequest.begin([1, 2, 3], params, client))
        assert live.submit(request_id).client == client
        assert harness.submit(live.submit(request_id))
    while (stage := harness.scheduler.next_stage(0.0)) is not None:
        events = harness.scheduler.complete(StageResult(stage.header.step_id, 0.0, 1.0, b"\1\0\0\0"), 1.0)
        finished += [event.request_id for event in events]
    assert finished == [1, 4, 2, 3]


def test_waiting_tokens_are_of_all_that_wait() -> None:
    """What waits counts with its tokens, whatever its priority and client, until it has a slot."""
    core = Scheduler(replace(BASE, max_num_seqs=1, buckets=(1,)))
    for number, (prompt, priority) in enumerate([(5, 0), (7, 0), (11, 3)], 1):
        assert core.submit(submit(number, prompt, priority=priority), 0.0) is None
    assert (core.stats().waiting_tokens, core.stats().waiting) == (23, 3)
    assert core.next_stage(0.0) is not None
    assert (core.stats().waiting_tokens, core.stats().running) == (12, 1)
