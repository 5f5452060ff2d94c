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
from fakes.paged_lockstep import Lockstep
from fakes.paged_model import plain_decode
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


CONFIG = SchedulerConfig(
    policy="refill",
    max_num_seqs=2,
    max_num_batched_tokens=16,
    min_free_slots=1,
    min_coda_batch=1,
    r_max=2,
    block_size=SIZE,
    num_blocks=12,
    max_model_len=32,
    buckets=(2,),
    vocab_size=40,
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


def test_layouts_that_share_planes_are_refused() -> None:
    """There a prompt sees a cached prefix at its last loop, and its own tokens at the loop that they are at."""
    for layout in KVLayout:
        info = EngineInfo("fake", "fake", 40, 4, 1, Gate.NONE, tuple(Gate), 0.5, layout, 4, 60, 1, 64, 0, (64,), "", "")
        options = EngineConfig(prefix_caching="on")
        if layout in (KVLayout.LAST_EXITED, KVLayout.DEPTH_INDEXED):
            assert SchedulerConfig.resolve(options, info).prefix_caching
        else:
            with pytest.raises(ConfigError, match=f"prefix-caching needs a KV layout .* {layout} "):
                SchedulerConfig.resolve(options, info)
