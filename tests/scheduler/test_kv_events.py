"""What the scheduler tells routers of its prefix cache is what is in it, in vLLM's bytes."""

import json
import random
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.kv_events import KvEventsConfig, binds
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import EngineReady, RequestParams, Submit
from depthbatch.scheduler.kv_blocks import prefix_keys
from depthbatch.scheduler.kv_events import (
    END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventPublisher,
    KvEvents,
    block_hash,
)
from fakes.paged_lockstep import Lockstep
from fakes.paged_model import plain_decode
from fakes.scheduler_process import OPTIONS, Engine, FakeWorker, engine_info
from fakes.small_engine import BASE
from fakes.strategies import prompt_of

SIZE = 4
CONFIG = replace(
    BASE,
    max_num_seqs=2,
    max_num_batched_tokens=6,
    r_max=2,
    block_size=SIZE,
    num_blocks=12,
    max_model_len=32,
    buckets=(2,),
    kv_layout=KVLayout.LAST_EXITED,
    prefix_caching=True,
    kv_events=True,
)


def request(number: int, prompt: list[int], seed: int, **params: object) -> Submit:
    data = np.asarray(prompt, np.int32).tobytes()
    return Submit(number, data, RequestParams(max_tokens=7, max_loops=2, seed=seed, **params))  # type: ignore[arg-type]


class Router:
    """What a router makes of events: the whole prefix behind each block hash."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}

    def hear(self, events: tuple) -> None:
        for event in events:
            match event:
                case BlockStored(hashes, parent, token_ids, size):
                    assert size == SIZE and len(token_ids) == SIZE * len(hashes)
                    before = () if parent is None else self.prefixes[parent]
                    for number, name in enumerate(hashes):
                        assert name not in self.prefixes, "stored twice"
                        before += token_ids[number * SIZE : (number + 1) * SIZE]
                        self.prefixes[name] = before
                case BlockRemoved(hashes):
                    for name in hashes:
                        del self.prefixes[name]  # known, and gone once
                case AllBlocksCleared():
                    self.prefixes.clear()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    seeded=st.booleans(),
    generated=st.booleans(),
    preemption=st.sampled_from(["recompute", "offload"]),
    drafts=st.sampled_from([0, 0, 2]),
)
def test_a_router_that_listens_knows_what_is_cached(
    seed: int, seeded: bool, generated: bool, preemption: str, drafts: int
) -> None:
    """Prompts that begin alike, further turns of conversations, more of them than the cache holds, aborts, sequences that
    lose their slots, lost workers: after every step the blocks that the events leave are those of the pool, parents are told
    before their children, and each block's tokens hash to its name. What is found there gives the plain loop's tokens."""
    rng = random.Random(seed)
    config = replace(CONFIG, seeded_state=seeded, generated_prefixes=generated, preemption=preemption)
    config = replace(config, host_blocks=8 if preemption == "offload" else 0, max_num_seqs=3, buckets=(9,))
    harness, router = Lockstep(replace(config, draft_lanes=drafts), acceptance=0.5), Router()
    for number in range(12):
        whole = {} if rng.randrange(4) else {"presence_penalty": 0.5}
        harness.submit(request(number, next_prompt(rng, harness), rng.randrange(2), **whole))
        for _ in range(rng.randrange(24)):
            if not rng.randrange(24):
                harness.lose_worker()
            elif not rng.randrange(24):
                harness.abort(rng.randrange(number + 1))
            elif not rng.randrange(12):
                preempt_any(rng, harness)
            elif harness.dispatch() is None:
                harness.complete()
            router.hear(harness.scheduler.drain_kv_events())
            assert set(router.prefixes) == set(map(block_hash, harness.scheduler.admission.prefixes.pool._block_of))
    harness.run()
    router.hear(harness.scheduler.drain_kv_events())
    for name, tokens in router.prefixes.items():
        salts = [n.to_bytes(8, "little") for n in range(2)] if seeded else [b""]
        keys = [prefix_keys(np.array(tokens, np.int32), SIZE, salt)[-1] for salt in salts]
        assert name in map(block_hash, keys)
    for number, answer in harness.answers.items():
        submit = harness.submits[number]
        expected = plain_decode(prompt_of(submit), submit.params, config)
        assert answer.tokens == expected.tokens[: len(answer.tokens)]


def next_prompt(rng: random.Random, harness: Lockstep) -> list[int]:
    """A new one, or a further turn of what has been answered."""
    spoken = [number for number, answer in harness.answers.items() if len(answer.tokens) > 1]
    if not spoken or rng.randrange(2):
        return [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
    number = rng.choice(spoken)
    turn = [*prompt_of(harness.submits[number]), *harness.answers[number].tokens, rng.randrange(2)]
    return turn[:24]


def preempt_any(rng: random.Random, harness: Lockstep) -> None:
    """A sequence loses its slot, whatever it is doing."""
    scheduler = harness.scheduler
    active = [each for each in scheduler.admission.rows.request if each is not None]
    if active:
        scheduler._requests.preempt(rng.choice(active), may_offload=True)


def test_seeded_states_are_named_beside_the_tokens() -> None:
    """Equal tokens under another seed are another block: the first one says so, as vLLM's extra keys do."""
    harness = Lockstep(replace(CONFIG, seeded_state=True, max_num_batched_tokens=16))
    harness.submit(request(0, list(range(9)), seed=5))
    harness.run()
    (event,) = harness.scheduler.drain_kv_events()
    assert event.extra_keys == (((5).to_bytes(8, "little").hex(),), None)


def config_of(**fields: object) -> str:
    return json.dumps({"enable_kv_cache_events": True, **fields})


def test_an_event_is_of_blocks_that_follow_each_other() -> None:
    """A block between them that is known already ends the event; the next one's parent is that block."""
    prompt, events = np.arange(16, dtype=np.int32), KvEvents(SIZE)
    keys = prefix_keys(prompt, SIZE)
    events.stored(keys, prompt, b"", [0, 2, 3])
    names = list(map(block_hash, keys))
    first, second = events.take()
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ((names[0],), None, tuple(range(4)))
    assert (second.block_hashes, second.parent_block_hash) == (tuple(names[2:]), names[1])
    assert second.token_ids == tuple(range(8, 16)) and events.take() == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON is malformed|truncated"),
        (config_of(), "endpoint is missing"),
        (config_of(endpoint="localhost:5557"), "endpoint must begin with tcp:// or ipc://, not 'localhost:5557'"),
        (config_of(endpoint="tcp://*:70000"), "endpoint must be tcp://ADDRESS:PORT with a port from 1 to 65535"),
        (config_of(endpoint="ipc://x", replay_endpoint="tcp://*:-1"), "replay_endpoint must be .* from 1 to 65535"),
        (config_of(endpoint="ipc://x", publisher="kafka"), "publisher must be zmq, not 'kafka'"),
        (config_of(endpoint="ipc://x", max_queue_size=1), "max_queue_size"),
        (config_of(endpoint="ipc://x", hwm=-1), "hwm must be from 0 to 1000000000, not -1"),
        (config_of(endpoint="ipc://x", buffer_steps=1 << 31), "buffer_steps must be from 0 to 1000000000"),
    ],
)
def test_a_bad_configuration_is_refused_by_its_field(text: str, words: str) -> None:
    """At the edge, in one line; what vLLM has and this engine does not is refused, too.

    Bug: port 70000 was taken modulo 65536, and numbers that ZeroMQ cannot hold ended the scheduler."""
    with pytest.raises(ConfigError, match=f"kv_events_config: .*({words})"):
        EngineConfig(kv_events_config=text, prefix_caching="on")


def test_without_a_cache_there_is_nothing_to_tell() -> None:
    with pytest.raises(ConfigError, match="needs prefix_caching"):
        EngineConfig(kv_events_config=config_of(endpoint="ipc://x"), prefix_caching="off")
    off = EngineConfig(kv_events_config='{"enable_kv_cache_events": false}', prefix_caching="off")
    assert off.kv_events is None


def test_what_binds_and_what_connects_is_vllms_rule() -> None:
    """A router connects to each server, or, as with llm-d, every server connects to the router."""
    assert binds("tcp://*:5557") and binds("ipc:///x") and binds("tcp://[::]:5557")
    assert not binds("tcp://router:5557")
    assert END == b"\xff" * 8


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because a UNIX socket's path must fit into 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="dbs") as path:
        yield Path(path)


def test_batches_on_the_wire_are_vllms(run_dir: Path) -> None:
    """Over sockets, read as any msgpack reader does: topic, number, [time, [events], rank]. What is asked for again comes
    again, byte for byte, and an end behind it; a new worker has an empty cache."""
    events, replays = f"ipc://{run_dir}/kv", f"ipc://{run_dir}/replay"
    text = json.dumps(
        {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replays, "topic": "kv@me@demo"}
    )
    options = msgspec.structs.replace(OPTIONS, prefix_caching="on", kv_events_config=text)
    info = engine_info(kv_layout="last_exited")
    engine = Engine(run_dir, options)
    subscriber, asker = engine.context.socket(zmq.SUB), engine.context.socket(zmq.DEALER)
    subscriber.connect(events)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@me")
    asker.connect(replays)
    try:
        worker = FakeWorker(run_dir, info=info)
        frontend = engine.frontend
        frontend.until(lambda: frontend.of(EngineReady))
        prompt = list(range(9))
        frontend.link.send(Submit(1, np.asarray(prompt, np.int32).tobytes(), RequestParams(max_tokens=2, max_loops=4)))
        topic, number, payload = receive(subscriber)
        assert (topic, number) == (b"kv@me@demo", bytes(8))
        sent_s, told, rank = msgpack.unpackb(payload)
        names = [block_hash(key) for key in prefix_keys(np.array(prompt, np.int32), 4)]
        (stored,) = told
        assert (stored["type"], stored["block_hashes"], stored["token_ids"]) == ("BlockStored", names, prompt[:8])
        assert stored["parent_block_hash"] is None and (stored["block_size"], stored["medium"]) == (4, "GPU")
        assert set(stored) - {"extra_keys"} == {
            *("type", "block_hashes", "parent_block_hash", "token_ids"),
            *("block_size", "lora_id", "medium", "lora_name"),
        }
        assert sent_s > 1e9 and rank == 0
        frontend.until(lambda: frontend.finished())
        worker.stop()
        other = FakeWorker(run_dir, pid=2, info=info)
        _, number, cleared = receive(subscriber)
        assert int.from_bytes(number, "big") == 1 and msgpack.unpackb(cleared)[1] == [{"type": "AllBlocksCleared"}]
        asker.send_multipart([b"", (1).to_bytes(8, "big")])
        assert [receive(asker)[1:], receive(asker)[1:]] == [[number, cleared], [END, b""]]
        other.stop()
    finally:
        subscriber.close(0)
        asker.close(0)
        engine.stop()


def until_end(asker: zmq.Socket) -> list[int]:
    """The numbers of the batches that come, up to END."""
    numbers = []
    while not numbers or numbers[-1] >= 0:
        _, number, _ = receive(asker)
        numbers.append(int.from_bytes(number, "big", signed=True))
    return numbers[:-1]


def test_a_client_that_reads_late_gets_all_batches_and_the_end(run_dir: Path) -> None:
    """Bug: of 9,000 batches that a client asked for and read later 2,000 came, and no END: the rest was dropped at ZeroMQ's
    own mark. Nothing is read before all is sent, twice; who asks on without reading takes memory for two answers at most."""
    kept = 5000
    text = config_of(endpoint=f"ipc://{run_dir}/kv", replay_endpoint=f"ipc://{run_dir}/replay", buffer_steps=kept)
    context = zmq.Context()
    publisher = KvEventPublisher(context, KvEventsConfig.parse(text))
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVHWM, 10)
    asker.connect(f"ipc://{run_dir}/replay")
    for _ in range(kept + 100):
        publisher.publish((AllBlocksCleared(),))
    for first in (0, 1000):
        ask(publisher, asker, first)
        assert until_end(asker) == list(range(max(100, first), kept + 100))
    for _ in range(5):
        ask(publisher, asker, 0)
    count = 0
    while asker.poll(500):
        asker.recv_multipart()
        count += 1
    assert kept < count < 4 * kept
    publisher.close()
    context.destroy(0)


def ask(publisher: KvEventPublisher, asker: zmq.Socket, first: int) -> None:
    """Returns when the answer has been sent."""
    asker.send_multipart([b"", first.to_bytes(8, "big")])
    assert publisher.replays is not None and publisher.replays.poll(10_000)
    publisher.answer_replays()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_events_are_published_under_ipv6_addresses() -> None:
    """Bug: tcp://[::]:PORT was bound as if it were an IPv4 address, which is no device."""
    context = zmq.Context()
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
    publisher = KvEventPublisher(context, KvEventsConfig.parse(config_of(endpoint=f"tcp://[::]:{port}")))
    publisher.close()
    context.destroy(0)


def receive(link: zmq.Socket) -> list[bytes]:
    assert link.poll(10_000)
    return link.recv_multipart()
