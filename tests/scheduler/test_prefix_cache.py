"""The prefix cache's books: who holds a block, which prefix it holds, what is evicted first."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import Stage
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import EngineInfo, RequestParams, Submit
from depthbatch.common.stats import PrefixCacheStats
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.kv_blocks import PrefixCachingPool, prefix_keys
from depthbatch.scheduler.kv_events import block_hash
from fakes.paged_lockstep import Lockstep
from fakes.paged_model import plain_decode
from fakes.small_engine import BASE
from fakes.strategies import prompt_of

SIZE = 4


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_key_covers_every_token_before_its_end() -> None:
    """Equal second blocks behind different first blocks must not be taken for each other; a part block has no key."""
    one = prefix_keys(tokens(1, 2, 3, 4, 5, 6, 7, 8, 9), SIZE)
    same = prefix_keys(tokens(1, 2, 3, 4, 5, 6, 7, 8), SIZE)
    other = prefix_keys(tokens(0, 2, 3, 4, 5, 6, 7, 8), SIZE)
    assert len(one) == 2 and one == same
    assert not set(one) & set(other)
    assert not set(one) & set(prefix_keys(tokens(1, 2, 3, 4, 5, 6, 7, 8), SIZE, salt=b"x"))
    assert prefix_keys(tokens(1, 2, 3), SIZE) == ()


def published(pool: PrefixCachingPool, *values: int) -> tuple[tuple[bytes, ...], np.ndarray]:
    """Blocks taken and published for a prompt."""
    keys = prefix_keys(tokens(*values), SIZE)
    blocks = pool.take(len(keys))
    pool.publish(keys, blocks.tolist())
    return keys, blocks


def test_a_prefix_outlives_its_owner_and_is_shared() -> None:
    pool = PrefixCachingPool(6)
    keys, blocks = published(pool, *range(8))
    assert pool.free == 3
    pool.give(blocks)
    assert pool.free == 5 and pool.num_idle(blocks.tolist()) == 2
    hit = pool.lookup([*keys, b"unknown"])
    assert hit == blocks.tolist()
    pool.share(hit)
    pool.share(hit)
    assert pool.free == 3
    pool.give(blocks)
    assert pool.free == 3  # the other owner still reads them
    pool.give(blocks)
    assert pool.free == 5


def test_the_end_of_the_least_recently_used_prefix_goes_first() -> None:
    """Evicting a prefix's first block first would make all its others unreachable."""
    pool = PrefixCachingPool(5)
    old, old_blocks = published(pool, 1, 2, 3, 4, 5, 6, 7, 8)
    new, new_blocks = published(pool, 9, 9, 9, 9)
    pool.give(old_blocks)
    pool.give(new_blocks)
    pool.take(2)  # one unused block, one evicted
    assert pool.lookup(old) == old_blocks[:1].tolist() and pool.lookup(new) == new_blocks.tolist()
    pool.take(1)
    assert pool.lookup(old) == [] and pool.lookup(new) == new_blocks.tolist()
    with pytest.raises(ValueError, match="2 blocks asked, 1 free"):
        pool.take(2)


def test_a_lost_device_takes_the_cache_with_it() -> None:
    pool = PrefixCachingPool(6)
    keys, blocks = published(pool, *range(8))
    other, idle = published(pool, *range(8, 12))
    pool.give(idle)
    pool.clear()
    assert pool.lookup(keys) == [] and pool.lookup(other) == []
    assert pool.free == 3
    pool.give(blocks)
    assert pool.free == 5 and sorted(pool.free_blocks().tolist()) == [1, 2, 3, 4, 5]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["admit", "leave", "clear"]), st.integers(0, 9)), max_size=60))
def test_books_balance_under_any_order(operations: list[tuple[str, int]]) -> None:
    """Every block is free or held; a hit holds what the model says its prefix is."""
    pool = PrefixCachingPool(12)
    content: dict[int, bytes] = {}  # what the device would hold
    held: list[np.ndarray] = []
    for verb, n in operations:
        if verb == "admit":
            keys = prefix_keys(np.repeat(np.array([n % 3, n % 2, n], np.int32), SIZE)[: SIZE * (1 + n % 3)], SIZE)
            hit = pool.lookup(keys)
            assert all(content[block] == key for block, key in zip(hit, keys, strict=False))
            if len(keys) - len(hit) > pool.free - pool.num_idle(hit):
                continue
            blocks = np.concatenate([pool.share(hit), pool.take(len(keys) - len(hit))])
            content |= dict(zip(blocks.tolist(), keys, strict=True))
            pool.publish(keys, blocks.tolist())
            held.append(blocks)
        elif verb == "leave" and held:
            pool.give(held.pop(n % len(held)))
        elif verb == "clear":
            pool.clear()
        owned = np.concatenate([*held, np.zeros(0, np.int32)])
        free = pool.free_blocks()
        assert free.size == pool.free and np.unique(free).size == free.size
        assert set(free.tolist()) | set(owned.tolist()) == set(range(1, 12)) and not set(free) & set(owned)
        for block in range(1, 12):
            assert pool.owners(np.array([block]))[0] == np.count_nonzero(owned == block)


def serve(config: SchedulerConfig, *requests: Submit) -> Lockstep:
    """One request after the other, each answered before the next comes."""
    harness = Lockstep(config)
    for request in requests:
        assert harness.submit(request)
        harness.run()
        expected = plain_decode(prompt_of(request), request.params, config)
        assert harness.answers[request.request_id].tokens == expected.tokens
    return harness


def request(request_id: int, prompt: list[int], **params: object) -> Submit:
    data = np.asarray(prompt, np.int32).tobytes()
    return Submit(request_id, data, RequestParams(**{"max_tokens": 3, "max_loops": 2} | params))  # type: ignore[arg-type]


CONFIG = replace(
    BASE,
    max_num_seqs=2,
    r_max=2,
    block_size=SIZE,
    num_blocks=12,
    max_model_len=32,
    buckets=(2,),
    kv_layout=KVLayout.LAST_EXITED,
    prefix_caching=True,
)


def test_a_prompt_starts_behind_the_blocks_it_shares() -> None:
    """Whole blocks of the prompt, never all of it: the last token must run, for it yields the first output token."""
    shared = list(range(8))
    harness = serve(CONFIG, request(0, [*shared, 20]), request(1, [*shared, 30, 31]), request(2, shared))
    assert harness.worker.adopted == 8 + 4
    stats = harness.scheduler.stats()
    assert stats.prefix_cache == PrefixCacheStats(queries=9 + 10 + 8, hits=12)
    assert stats.prompt_tokens == 9 + 2 + 4


def test_without_the_option_nothing_is_shared() -> None:
    harness = serve(replace(CONFIG, prefix_caching=False), request(0, list(range(9))), request(1, list(range(9))))
    assert harness.worker.adopted == 0 and harness.scheduler.stats().prefix_cache is None


@pytest.mark.parametrize("field", [{"presence_penalty": 0.5}, {"prompt_logprobs": True}])
def test_a_prompt_that_must_run_whole_does(field: dict[str, object]) -> None:
    """A penalty counts the prompt's tokens and prompt logprobs need their logits: both come from prefill alone."""
    scheduler = serve(CONFIG, request(0, list(range(9)))).scheduler
    assert scheduler.submit(request(1, list(range(9)), **field)) is None
    stage = scheduler.next_stage(0.0)
    assert stage is not None and stage.header.stage == Stage.PREFILL and stage.header.n_tokens == 9


def test_a_dead_worker_takes_the_cache_with_it() -> None:
    harness = serve(CONFIG, request(0, list(range(9))))
    harness.lose_worker()
    assert harness.submit(request(1, list(range(9))))
    harness.run()
    assert harness.worker.adopted == 0


def test_seeded_states_share_within_a_seed_only() -> None:
    """With seeded initial states the K/V of a prompt are a function of its request's seed too."""
    config = replace(CONFIG, seeded_state=True)
    prompt = list(range(9))
    harness = serve(config, request(0, prompt, seed=1), request(1, prompt, seed=2), request(2, prompt, seed=1))
    assert harness.worker.adopted == 8


def together(config: SchedulerConfig, *requests: Submit) -> Lockstep:
    """Submitted before any stage; each gets the tokens of the plain loop."""
    harness = Lockstep(config)
    for each in requests:
        assert harness.submit(each)
    harness.run()
    for each in requests:
        expected = plain_decode(prompt_of(each), each.params, config)
        assert harness.answers[each.request_id].tokens == expected.tokens
    return harness


def cached(harness: Lockstep) -> list[int]:
    """Prompt tokens that each request was told to be cached."""
    return [answer.cached_tokens for _, answer in sorted(harness.answers.items())]


@pytest.mark.parametrize("max_tokens", [64, 16])
def test_prompts_of_one_stage_share_blocks(max_tokens: int) -> None:
    """Bug: only prompts of later stages found a prefix, so that the n siblings of a request, which come together, each
    prefilled the whole prompt. The first of four prefills it, the others their last token, in the same stage."""
    config = replace(CONFIG, max_num_seqs=4, buckets=(4,), num_blocks=40, max_num_batched_tokens=max_tokens)
    prompt = list(range(17))
    harness = together(config, *(request(i, prompt) for i in range(4)))
    assert cached(harness) == [0, 16, 16, 16]
    assert harness.scheduler.stats().prompt_tokens == 17 + 3
    assert harness.scheduler.stats().stages["prefill"].steps == (1 if max_tokens == 64 else 2)


def test_what_a_request_is_told_counts_its_first_prefill_alone() -> None:
    """A sequence that is preempted finds its own prompt again; that is no saving."""
    harness = Lockstep(replace(CONFIG, max_num_seqs=1, buckets=(1,)))
    harness.submit(request(0, list(range(9)), max_tokens=6))
    while len(harness.answers[0].tokens) < 3:
        harness.dispatch()
        harness.complete()
    first = harness.scheduler.admission.rows.request[1]
    assert first is not None
    harness.scheduler._requests.preempt(first)
    harness.run()
    assert harness.worker.adopted == 8 and cached(harness) == [0]


def test_salts_keep_prefixes_apart() -> None:
    """Requests of one salt share, those of another or of none do not see them."""
    prompt = list(range(9))
    harness = serve(
        CONFIG, *(request(i, prompt, cache_salt=salt) for i, salt in enumerate(("", "a", "b", "a", "", "b")))
    )
    assert cached(harness) == [0, 0, 0, 8, 8, 8]


CHAT = replace(CONFIG, num_blocks=40, max_num_batched_tokens=64)


@pytest.mark.parametrize(("generated", "found"), [(False, 8), (True, 16)])
def test_outputs_are_shared_by_option(generated: bool, found: int) -> None:
    """The second turn of a conversation begins with the first one's prompt and output. Of 10 and 9 tokens 18 are in the
    cache, 4 blocks. At full depth nothing changes."""
    config = replace(CHAT, generated_prefixes=generated)
    harness = serve(config, request(0, list(range(10)), max_tokens=9))
    turn = [*range(10), *harness.answers[0].tokens, 7, 8]
    harness.submit(request(1, turn))
    harness.run()
    assert cached(harness) == [0, found]
    assert harness.answers[1].tokens == plain_decode(turn, request(1, turn).params, config).tokens


@pytest.mark.parametrize(
    ("layout", "gate", "found"),
    [
        (KVLayout.LAST_EXITED, Gate.REPLAY, 16),
        (KVLayout.DEPTH_INDEXED, Gate.FIXED, 8),
        (KVLayout.DEPTH_INDEXED, Gate.NONE, 16),
    ],
)
def test_outputs_with_holes_are_not_shared(layout: KVLayout, gate: Gate, found: int) -> None:
    """Output of one loop of two: where its K/V are copied into the plane that it did not reach they can be shared, and
    the next turn may say something else than after a prefill; where they are not, a deeper token would read nothing."""
    config = replace(CHAT, kv_layout=layout, generated_prefixes=True)
    harness = Lockstep(config)
    shallow = {"max_loops": 1, "min_loops": 1} if gate is Gate.FIXED else {}
    harness.submit(request(0, list(range(10)), max_tokens=9, gate=gate, exit_depths=b"\1" * 8, **shallow))
    harness.run()
    harness.submit(request(1, [*range(10), *harness.answers[0].tokens, 7, 8]))
    harness.run()
    assert cached(harness) == [0, found]


GENERATED = replace(CHAT, generated_prefixes=True)


def until_tokens(harness: Lockstep, request_id: int, count: int) -> None:
    """Runs until the request has so many tokens."""
    while len(harness.answers[request_id].tokens) < count:
        harness.dispatch()
        harness.complete()


def next_turn(harness: Lockstep, first: Submit) -> int:
    """Goes on with a conversation after its first turn; tokens of it that were cached. Its answer is the plain loop's, and
    the fake worker raises where a cached block holds nothing."""
    turn = request(99, [*prompt_of(first), *harness.answers[first.request_id].tokens, 7, 8])
    assert harness.submit(turn)
    harness.run()
    assert harness.answers[99].tokens == plain_decode(prompt_of(turn), turn.params, harness.config).tokens
    return harness.answers[99].cached_tokens


@pytest.mark.parametrize(("aborted", "found"), [(True, 0), (False, 16)])
def test_a_dead_workers_outputs_are_not_in_the_cache(aborted: bool, found: int) -> None:
    """Bug: with generated prefixes a lost worker's sequences gave back their slots after the cache had been cleared, and so
    published output that was in the dead worker's memory. A next turn then read blocks that hold nothing."""
    harness, first = Lockstep(GENERATED), request(0, list(range(10)), max_tokens=9)
    harness.submit(first)
    until_tokens(harness, 0, 7)
    harness.lose_worker()
    if aborted:
        harness.abort(0)
    harness.run()
    assert next_turn(harness, first) == found


def test_who_is_aborted_in_the_middle_of_its_rebuild_leaves_what_was_rebuilt() -> None:
    """Bug: a request that was aborted while its prompt and output were being prefilled again published all of them, although
    only the first chunk had run. Of that the prompt's full block is cached, and no more."""
    harness, first = Lockstep(replace(GENERATED, max_num_batched_tokens=6)), request(0, list(range(10)), max_tokens=9)
    harness.submit(first)
    until_tokens(harness, 0, 7)
    harness.lose_worker()
    harness.dispatch()
    assert harness.scheduler.admission.partial is not None
    harness.abort(0)
    harness.run()
    assert next_turn(harness, first) == 4


def test_outputs_are_found_though_a_prefix_of_theirs_was_evicted_meanwhile() -> None:
    """Bug: output was cached without the prompt before it. A prompt of two full blocks that is cached runs its second one
    again, for its last token must run; the cached one is evicted while it decodes. Its output was then in the cache behind a
    block that was not, so that nobody found it, and routers were told of a block whose parent they did not know."""
    harness, first = Lockstep(replace(GENERATED, kv_events=True)), request(1, list(range(8)), max_tokens=9)
    harness.submit(request(0, list(range(8)), max_tokens=1))
    harness.run()
    harness.submit(first)
    until_tokens(harness, 1, 2)
    pool = harness.scheduler.admission.blocks
    pool.give(pool.take(pool.free))  # others have needed all there is
    harness.scheduler.drain_kv_events()
    harness.run()
    [stored] = harness.scheduler.drain_kv_events()
    keys = prefix_keys(tokens(*range(8), *harness.answers[1].tokens), SIZE)
    assert stored.block_hashes == tuple(map(block_hash, keys[1:3]))
    assert stored.parent_block_hash == block_hash(keys[0])
    assert next_turn(harness, first) == 12


def test_a_prompt_that_runs_whole_is_found_though_its_beginning_was_evicted_meanwhile() -> None:
    """Bug: the same within a prompt. One that a penalty counts runs whole, beside cached blocks of the same tokens; those are
    evicted between its chunks, and its later blocks were cached behind blocks that were not."""
    harness, prompt = Lockstep(replace(CHAT, max_num_batched_tokens=8, kv_events=True)), list(range(17))
    harness.submit(request(0, prompt[:9], max_tokens=1))
    harness.run()
    harness.submit(request(1, prompt, presence_penalty=0.5))
    harness.dispatch()
    harness.complete()
    pool = harness.scheduler.admission.blocks
    pool.give(pool.take(pool.free))
    harness.scheduler.drain_kv_events()
    harness.run()
    keys = tuple(map(block_hash, prefix_keys(tokens(*prompt), SIZE)))
    told = [(event.parent_block_hash, event.block_hashes) for event in harness.scheduler.drain_kv_events()]
    assert told == [(None, keys)]
    harness.submit(request(2, prompt))
    harness.run()
    assert harness.answers[2].cached_tokens == 16


def test_layouts_that_share_planes_are_refused() -> None:
    """There a prompt sees a cached prefix at its last loop, and its own tokens at the loop that they are at. Without the
    option the cache is on where it changes nothing, and off there."""
    for layout in KVLayout:
        info = EngineInfo("fake", "fake", 40, 4, 1, Gate.NONE, tuple(Gate), 0.5, layout, 4, 60, 1, 64, 0, (64,), "", "")
        options = EngineConfig(prefix_caching="on")
        if layout in (KVLayout.LAST_EXITED, KVLayout.DEPTH_INDEXED):
            assert SchedulerConfig.resolve(options, info).prefix_caching
            assert SchedulerConfig.resolve(EngineConfig(), info).prefix_caching
            assert not SchedulerConfig.resolve(EngineConfig(prefix_caching="off"), info).prefix_caching
        else:
            assert not SchedulerConfig.resolve(EngineConfig(), info).prefix_caching
            with pytest.raises(ConfigError, match=f"prefix-caching needs a KV layout .* {layout} "):
                SchedulerConfig.resolve(options, info)
