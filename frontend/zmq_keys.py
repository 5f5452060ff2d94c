"""CURVE keys of the native API over tcp, in certificate files as pyzmq writes and reads them (``zmq.auth``)."""

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from depthbatch.common.endpoints import check_endpoint
from depthbatch.common.errors import ConfigError

LOOPBACK = re.compile(r"tcp://(127(\.\d{1,3}){3}|localhost|\[::1\]):\d+")
PRIVATE_UMASK = 0o077


class ServerKeys(NamedTuple):
    """What a server shows to its clients, and whom it lets in."""

    public: bytes
    secret: bytes
    clients: Path  # directory of their public certificates

    @classmethod
    def load(cls, secret_file: str, clients: str) -> "ServerKeys":
        """Raises ConfigError naming the file."""
        public, secret = load_secret(secret_file)
        directory = Path(clients)
        try:
            _refuse_strangers(directory, stat.S_IWGRP | stat.S_IWOTH, "be written by")
            found = zmq.auth.load_certificates(directory)
        except (OSError, ValueError) as error:
            raise ConfigError(f"zmq_client_keys: {directory}: {_reason(error)}") from None
        if not found:
            raise ConfigError(f"zmq_client_keys: {directory} holds no client's public key (*.key)")
        return cls(public, secret, directory)

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> ThreadAuthenticator:
        """Makes a socket that is not bound yet a CURVE server. The authenticator is to be stopped before the context ends."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="*", location=self.clients)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        return authenticator


def load_secret(path: str | Path) -> tuple[bytes, bytes]:
    """Public and secret key of a certificate that nobody else can read. Raises ConfigError."""
    try:
        _refuse_strangers(Path(path), PRIVATE_UMASK, "be read or written by")
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"key file {path}: {_reason(error)}") from None
    if secret is None:
        raise ConfigError(f"key file {path} holds no secret key: the one that does ends with .key_secret")
    return public, secret


def check_address(address: str, with_keys: bool) -> None:
    """Raises ConfigError unless the native API may be bound there."""
    try:
        check_endpoint(address, bind=True, schemes=("tcp",))
    except ValueError as error:
        raise ConfigError(f"zmq_bind {error}") from None
    if not with_keys and not LOOPBACK.fullmatch(address):
        raise ConfigError(f"zmq_bind {address} reaches other machines: it needs zmq_server_key and zmq_client_keys")


def make_certificate(directory: str | Path, name: str) -> tuple[Path, Path]:
    """A new public and a new secret certificate file, the latter with mode 0600. Raises ConfigError where one is there."""
    public, secret = (Path(directory) / f"{name}{suffix}" for suffix in (".key", ".key_secret"))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{name!r} is no name of a key: letters, digits and . _ - only")
    for path in (public, secret):
        if path.exists():
            raise ConfigError(f"{path} exists; nothing is written over a key")
    former = os.umask(PRIVATE_UMASK)
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        zmq.auth.create_certificates(directory, name)
    except OSError as error:
        raise ConfigError(f"cannot write keys to {directory}: {_reason(error)}") from None
    finally:
        os.umask(former)
    return public, secret


def _refuse_strangers(path: Path, bits: int, what: str) -> None:
    """Raises OSError, or ValueError where the owner is another user or ``bits`` of the mode are set."""
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise ValueError("it belongs to another user")
    if found.st_mode & bits:
        raise ValueError(f"mode {stat.S_IMODE(found.st_mode):04o} lets it {what} others; chmod go-rwx it")


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
