"""The native API over tcp: who gets in, and whose files are believed."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq.auth

from depthbatch.common.errors import ConfigError
from depthbatch.deploy.cli.main import main
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.client import Client
from depthbatch.frontend.http.settings import HttpConfig
from depthbatch.frontend.zmq_api import ZmqApi
from depthbatch.frontend.zmq_keys import ServerKeys, load_secret
from fakes.engine_processes import next_token
from fakes.serve_process import free_port

SILENCE_S = 0.7  # a client that is not let in hears nothing; one that is gets its answer in a hundredth of that


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """server, friend and stranger, made by the command; the server knows the friend."""
    for name in ("server", "friend", "stranger"):
        assert main(["keygen", name, "--output", str(tmp_path)]) == 0
    clients = tmp_path / "clients"
    clients.mkdir(0o700)
    (clients / "friend.key").write_bytes((tmp_path / "friend.key").read_bytes())
    return tmp_path


def serve(address: str, server_keys: ServerKeys | None, body: Callable[[], None]) -> None:
    async def run() -> None:
        async with AsyncEngine(quiet=True) as engine:
            api = ZmqApi(engine, address, keys=server_keys)
            try:
                await asyncio.wait_for(asyncio.to_thread(body), 60)
            finally:
                await api.close()

    asyncio.run(run())


def tokens(client: Client) -> list[int]:
    try:
        return [token for piece in client.generate([7], max_tokens=5) for token in piece.get("token_ids", ())]
    finally:
        client.close()


@pytest.mark.usefixtures("fake_engine")
def test_only_known_keys_get_in(keys: Path) -> None:
    """A client of a known key gets its tokens; one of another key, of none, and one that takes another for the server hear
    nothing, and what they send reaches no engine: the friend's request is the only one."""
    address = f"tcp://127.0.0.1:{free_port()}"
    server = str(keys / "server.key")
    config = HttpConfig(
        zmq_bind=address, zmq_server_key=str(keys / "server.key_secret"), zmq_client_keys=str(keys / "clients")
    )

    def body() -> None:
        for key, its_server in (("stranger", server), ("", ""), ("friend", str(keys / "stranger.key"))):
            files = (str(keys / f"{key}.key_secret"), its_server) if key else ()
            with pytest.raises(TimeoutError):
                tokens(Client(address, SILENCE_S, *files))
        friend = str(keys / "friend.key_secret")
        assert tokens(Client(address, 20, friend, server)) == [next_token([7], i) for i in range(5)]
        client = Client(address, 20, friend, server)
        assert client.ask("stats")["values"]["prompt_tokens_total"] == 1
        client.close()

    serve(address, config.load_zmq_keys(), body)


@pytest.mark.usefixtures("fake_engine")
def test_loopback_needs_no_keys() -> None:
    """Where only this machine reaches it, plain tcp is what ipc is."""
    address = f"tcp://127.0.0.1:{free_port()}"
    assert HttpConfig(zmq_bind=address).load_zmq_keys() is None
    serve(address, None, lambda: tokens(Client(address, 20)) and None)


def test_keygen_leaves_nothing_for_others(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The secret file is the owner's alone, whatever the umask; a key is never written over; a name is no path."""
    former = os.umask(0)
    try:
        assert main(["keygen", "open", "--output", str(keys / "new")]) == 0
    finally:
        os.umask(former)
    assert stat.S_IMODE((keys / "new" / "open.key_secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((keys / "new").stat().st_mode) == 0o700
    secret = (keys / "server.key_secret").read_bytes()
    for name in ("server", "../server", ""):
        assert main(["keygen", name, "--output", str(keys)]) == 2
    assert (keys / "server.key_secret").read_bytes() == secret
    assert "exists; nothing is written over a key" in capsys.readouterr().err


def test_a_client_is_told_which_key_is_missing(keys: Path) -> None:
    """Bug: a client without the server's key ended with an error about the file ''."""
    with pytest.raises(ValueError, match="server_key_file is missing"):
        Client("tcp://127.0.0.1:1", 1, key_file=str(keys / "friend.key_secret"))
    with pytest.raises(ValueError, match=r"^key_file is missing"):
        Client("tcp://127.0.0.1:1", 1, server_key_file=str(keys / "server.key"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_secret_that_others_reach_is_refused(keys: Path, mode: int) -> None:
    """On the server's side and on the client's, before anything is bound or sent."""
    path = keys / "server.key_secret"
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"server\.key_secret: mode {mode:04o} lets it be read or written by others"):
        load_secret(path)
    with pytest.raises(PermissionError, match=r"server\.key_secret"):
        Client("tcp://127.0.0.1:1", 1, str(path), str(keys / "friend.key"))


def test_what_is_wrong_with_the_files_is_said(keys: Path, tmp_path: Path) -> None:
    """A missing file, a public key for a secret one, no client at all, a directory into which others put keys."""
    secret, clients = keys / "server.key_secret", keys / "clients"
    for wrong, words in ((keys / "none", "No such file"), (keys / "server.key", "holds no secret key")):
        with pytest.raises(ConfigError, match=words):
            load_secret(wrong)
    with pytest.raises(ConfigError, match="clients: mode 0772 lets it be written by others"):
        clients.chmod(0o772)
        ServerKeys.load(str(secret), str(clients))
    clients.chmod(0o755)
    assert ServerKeys.load(str(secret), str(clients)).public == zmq.auth.load_certificate(keys / "server.key")[0]
    (clients / "friend.key").unlink()
    with pytest.raises(ConfigError, match="holds no client's public key"):
        ServerKeys.load(str(secret), str(clients))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zmq_bind": "tcp://0.0.0.0:5555"}, "reaches other machines: it needs zmq_server_key"),
        ({"zmq_bind": "tcp://*:5555"}, "reaches other machines"),
        ({"zmq_bind": "tcp://127.0.0.1.example.org:5555"}, "reaches other machines"),
        ({"zmq_bind": "tcp://[::]:5555"}, "reaches other machines"),
        ({"zmq_bind": "127.0.0.1:5555"}, "zmq_bind must begin with tcp://, not '127.0.0.1:5555'"),
        ({"zmq_bind": "ipc:///tmp/x"}, "zmq_bind must begin with tcp://"),
        ({"zmq_bind": "tcp://127.0.0.1:70000"}, "zmq_bind must be tcp://ADDRESS:PORT with a port from 1 to 65535"),
        ({"zmq_bind": "tcp://127.0.0.1:5555", "zmq_server_key": "x"}, "go together"),
        ({"zmq_server_key": "x", "zmq_client_keys": "y"}, "needs zmq_bind"),
    ],
)
def test_an_open_door_is_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HttpConfig(**options)
