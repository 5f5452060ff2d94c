"""The ZeroMQ layer: nothing lost, nothing decoded that is no message, peers that have gone noticed, run directories."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from depthbatch.common.endpoints import check_endpoint
from depthbatch.common.errors import ConfigError, DecodeError
from depthbatch.common.messages import (
    WIRE_VERSION,
    Abort,
    FrontendMessage,
    GetStats,
    Hello,
    MessageDecoder,
    SchedulerMessage,
    SchedulerStats,
    WorkerCommand,
    WorkerMessage,
)
from depthbatch.common.run_dir import FixedRunDir, RunDir, open_run_dir
from depthbatch.common.transport import Dealer, Received, Router, endpoint
from depthbatch.frontend.zmq_api import ApiRequest

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return endpoint(tmp_path, "s")


def receive(link: Router | Dealer) -> Received:
    """The next message, waited for."""
    for _ in range(100):
        received = link.receive()
        if received is not None:
            return received
        link.socket.poll(100)
    raise AssertionError("nothing came")


def test_both_ways_with_frames(context: Context, address: str) -> None:
    """Frames arrive bit by bit as they were sent, and only after their header."""
    dealer = Dealer(context, address, SchedulerMessage)
    dealer.send(Hello(WIRE_VERSION))  # before anyone has bound: it must wait, not get lost
    router = Router(context, address, FrontendMessage)
    frame = np.arange(6, dtype=np.int32)
    dealer.send(Abort(5), frame, b"raw")
    hello, abort = receive(router), receive(router)
    assert hello.message == Hello(WIRE_VERSION) and not hello.frames
    assert abort.message == Abort(5) and abort.frames == [frame.tobytes(), b"raw"]
    assert router.send(abort.peer, SchedulerStats(verb_seconds={"a": 1.0}))
    assert receive(dealer).message == SchedulerStats(verb_seconds={"a": 1.0})


def test_nothing_is_dropped(context: Context, address: str) -> None:
    """20,000 messages to a reader that sleeps: beyond any default high-water mark, all arrive, in order."""
    router = Router(context, address, FrontendMessage)
    dealer = Dealer(context, address, SchedulerMessage)
    dealer.send(Hello(WIRE_VERSION))
    peer = receive(router).peer
    for i in range(20_000):
        assert router.send(peer, SchedulerStats(decode_errors=i))
    for i in range(20_000):
        assert receive(dealer).message == SchedulerStats(decode_errors=i)


@given(parts=st.lists(st.binary(max_size=40), min_size=1, max_size=3))
@example(parts=[pickle.dumps(GetStats)])
@example(parts=[b"c__builtin__\nexec\n"])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_counted_and_skipped(parts: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Row "pickle over ZMQ, type names from the wire, 0.0.0.0 binds": whatever comes, receive neither raises
    nor loses the good message behind it; what it lets through is a message."""
    context: Context = zmq.Context.instance()
    address = f"inproc://{os.urandom(8).hex()}"
    router = Router(context, address, FrontendMessage)
    dealer = Dealer(context, address, SchedulerMessage)
    dealer.socket.send_multipart(parts)
    dealer.send(GetStats())
    first = receive(router)
    if first.message != GetStats():
        assert isinstance(first.message, FrontendMessage)
        assert receive(router).message == GetStats()
    else:
        assert router.decode_errors == 1
    dealer.close(0)
    router.close(0)


NESTED = 100_000
HOSTILE = {
    "lists in a field of any type": b"\x84\xa4verb\xa6submit\xa2id\x01\xa6prompt\xa1x\xa6params\x81\xa1a"
    + b"\x91" * NESTED,
    "maps in a field of any type": b"\x84\xa4verb\xa6submit\xa2id\x01\xa6prompt\xa1x\xa6params" + b"\x81\xa1a" * NESTED,
    "lists": b"\x91" * NESTED,
    "maps as keys": b"\x81" * NESTED,
    "lists in a field there is none of": b"\x82\xa4verb\xa5stats\xa1z" + b"\x91" * NESTED,
    "a list of four billion": b"\xdd\xff\xff\xff\xff",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "a text of four billion": b"\xdb\xff\xff\xff\xff",
    "bytes that are no UTF-8": b"\x82\xa4verb\xa5abort\xa2id\xa3\xed\xa0\x80",
    "a time out of range": b"\xc7\x0c\xff" + b"\xff" * 12,
    "an extension": b"\xc7\x03\x05abc",
    "no type": b"\xc1",
    "two verbs, one unknown": b"\x82\xa4verb\xa5stats\xa4verb\xa3fly",
    "a number for a list": b"\x83\xa4verb\xa6submit\xa2id\x01\xa6prompt\x01",
}


@pytest.mark.parametrize("union", [FrontendMessage, SchedulerMessage, WorkerCommand, WorkerMessage, ApiRequest])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_a_decode_error(name: str, union: object) -> None:
    """Bug: 3 kB of nested lists ended the frontend, by a RecursionError that was taken for a failure of its own."""
    with pytest.raises(DecodeError, match="bad message") as caught:
        MessageDecoder(union).decode(HOSTILE[name])
    assert len(str(caught.value)) < 300


def test_gone_peer_is_reported(context: Context, address: str) -> None:
    """A ROUTER would discard in silence; the scheduler would decode for nobody."""
    router = Router(context, address, FrontendMessage)
    dealer = Dealer(context, address, SchedulerMessage)
    dealer.send(Hello(WIRE_VERSION))
    peer = receive(router).peer
    assert router.send(peer, SchedulerStats())
    dealer.close(0)
    deadline = time.monotonic() + 10
    while router.send(peer, SchedulerStats()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_address_in_use_is_a_config_error(context: Context, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot bind"):
        Router(context, endpoint(tmp_path / "missing", "s"), FrontendMessage)


# --- run directories


def test_run_dir_is_private_and_removed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "base")
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert run_dir.path.parent.stat().st_mode & 0o777 == 0o700
    other = RunDir(tmp_path / "base")
    assert other.path != run_dir.path and run_dir.path.exists()  # a second engine does not take the first one's
    run_dir.remove()
    run_dir.remove()
    other.remove()
    assert not run_dir.path.exists()


def test_stale_run_dir_is_removed(tmp_path: Path) -> None:
    """A process that is killed leaves its directory; the next engine removes it, but not one that is in use."""
    code = "import sys, os, signal; from depthbatch.common.run_dir import FixedRunDir, RunDir, open_run_dir; d = RunDir(sys.argv[1])\n"
    code += "print(d.path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    stale = Path(killed.stdout.strip())
    assert stale.is_dir()
    in_use = RunDir(tmp_path)
    assert not stale.exists() and in_use.stale_removed == 1
    assert RunDir(tmp_path).stale_removed == 0 and in_use.path.exists()


def test_a_fixed_run_dir_is_one_engines(tmp_path: Path) -> None:
    """Made where the option says, locked, and left empty, also by an engine that was killed."""
    run_dir = FixedRunDir(tmp_path / "run")
    assert run_dir.path == tmp_path / "run" and run_dir.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="run is in use by another engine"):
        open_run_dir(str(tmp_path / "run"))
    (run_dir.path / "api").touch()
    run_dir.remove()
    run_dir.remove()
    assert run_dir.path.is_dir() and not (run_dir.path / "api").exists()
    code = "import sys, os, signal; from depthbatch.common.run_dir import FixedRunDir; d = FixedRunDir(sys.argv[1])\n"
    code += "(d.path / 'old').mkdir(); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code, str(run_dir.path)], check=False)
    assert (run_dir.path / "old").exists()
    again = open_run_dir(str(run_dir.path))
    assert not (run_dir.path / "old").exists()
    again.remove()


def test_a_run_dir_with_other_files_is_refused(tmp_path: Path) -> None:
    """``--run-dir ~/thesis`` must not be emptied."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="holds files of something else"):
        FixedRunDir(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_base_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """Somebody else could put a socket there and be our worker."""
    base = tmp_path / "open"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(ConfigError, match="only this user can write"):
        RunDir(base)


def test_too_long_path_is_refused(tmp_path: Path) -> None:
    """The kernel would cut it at 107 bytes, or ZeroMQ fail with an error that does not say why."""
    with pytest.raises(ConfigError, match="107 bytes"):
        RunDir(tmp_path / ("x" * 100))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        *[
            (f"tcp://127.0.0.1{port}", "with a port from 1 to 65535, not 'tcp://127.0.0.1")
            for port in (
                "",
                ":",
                ":0",
                ":*",
                ":-1",
                ":65536",
                ":70000",
                ":+5",
                ": 5",
                ":5 ",
                ":5/x",
                ":05",
                ":١٢",
                ":5\n",
            )
        ],
        ("tcp://::1:5555", "65535 and an IPv6 address in brackets, not 'tcp://::1:5555'"),
        ("tcp://[::1]", "with a port from 1 to 65535"),
        ("tcp://[::g]:5555", r"'\[::g\]' is no address and no name"),
        ("tcp://[127.0.0.1]:5555", "no address and no name"),
        ("tcp://300.1.1.1:5555", "'300.1.1.1' is no address and no name"),
        ("tcp://127.1:5555", "no address and no name"),
        ("tcp://:5555", "'' is no address and no name"),
        ("tcp://a b:5555", "no address and no name"),
        ("tcp://user@host:5555", "no address and no name"),
        ("tcp://lo;127.0.0.1:5555", "with a port"),
        (f"tcp://{'a' * 1000}:5555", "'aaa[a]*' is no address"),
        ("udp://127.0.0.1:5555", "must begin with tcp:// or ipc://, not 'udp://127.0.0.1:5555'"),
        ("TCP://127.0.0.1:5555", "must begin with"),
        ("127.0.0.1:5555", "must begin with"),
        ("", "must begin with tcp:// or ipc://, not ''"),
        ("ipc://", "must be ipc://PATH"),
        ("ipc://*", "must be ipc://PATH"),
        ("ipc:///a\0b", "must be ipc://PATH"),
        ("ipc:///\ud800", "must be ipc://PATH"),
        ("ipc:///" + "ä" * 54, "has a path of 109 bytes, more than 107"),
    ],
)
def test_an_address_that_opens_something_else_is_refused(address: str, words: str) -> None:
    """Bug: port 70000 was taken for 4464, -1 for 65535 and "5 5" for 5, in silence; what else cannot be opened was an error
    of ZeroMQ after the model had been loaded, or none."""
    for bind in (True, False):
        with pytest.raises(ValueError, match=words) as found:
            check_endpoint(address, bind)
        assert len(str(found.value)) < 250 and str(found.value).isprintable()


def test_addresses_that_can_be_had() -> None:
    """The check refuses none of these, which is all that it is for; only to connect, a host has to be named."""
    for address in ("tcp://127.0.0.1:5555", "tcp://[::1]:1", "tcp://[fe80::1%lo]:65535", "tcp://localhost:5555"):
        for bind in (True, False):
            check_endpoint(address, bind)
    for address in ("tcp://some-host.example_1.org:5555", "ipc://x", "ipc:///" + "a" * 106, "ipc://@abstract"):
        check_endpoint(address, False)
    check_endpoint("tcp://*:5557", True)
    with pytest.raises(ValueError, match=r"must name a host to connect to, not 'tcp://\*:5557'"):
        check_endpoint("tcp://*:5557", False)
    with pytest.raises(ValueError, match="must begin with tcp://, not 'ipc://x'"):
        check_endpoint("ipc://x", True, ("tcp",))
