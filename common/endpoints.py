"""Addresses of ZeroMQ sockets that users write down, checked before anything is opened.

libzmq takes a port modulo 2**16 (70000 is 4464, -1 is 65535) and ignores what follows its digits, so a wrong address may
open another port without a word. A port that the system is to choose is refused, too: nobody is told which it was.
"""

import ipaddress
import os
import re

from depthbatch.common.errors import shown

MAX_IPC_PATH_BYTES = 107  # sun_path of a UNIX socket, without its final NUL
MAX_PORT = 65535
_TCP = re.compile(r"tcp://(\[[^\[\]]+\]|[^\[\]:/;]*):([1-9][0-9]{0,4})")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9_])?")  # of a host or an interface
_NUMBERS = re.compile(r"[0-9.]*")


def check_endpoint(address: str, bind: bool, schemes: tuple[str, ...] = ("tcp", "ipc")) -> None:
    """Raises ValueError, with what is wrong and the address, unless a socket could be bound (or connected) there.

    ``tcp://ADDRESS:PORT``: ADDRESS is *, an IPv4 address, an IPv6 one in brackets, or a name. ``ipc://PATH``.
    """
    scheme = address.partition("://")[0]
    if scheme not in schemes or "://" not in address:
        raise ValueError(f"must begin with {' or '.join(f'{each}://' for each in schemes)}, not {shown(address)}")
    if scheme == "ipc":
        _check_path(address)
        return
    found = _TCP.fullmatch(address)
    if found is None or int(found[2]) > MAX_PORT:
        brackets = " and an IPv6 address in brackets" if address.count(":") > 2 and "[" not in address else ""
        raise ValueError(f"must be tcp://ADDRESS:PORT with a port from 1 to {MAX_PORT}{brackets}, not {shown(address)}")
    host = found[1]
    if host == "*" and not bind:
        raise ValueError(f"must name a host to connect to, not {shown(address)}")
    if host != "*" and not _is_host(host):
        raise ValueError(f"must be tcp://ADDRESS:PORT: {host[:80]!r} is no address and no name")


def is_ipv6(address: str) -> bool:
    """Whether the socket needs the option IPV6 for it."""
    return address.startswith("tcp://[")


def _check_path(address: str) -> None:
    path = address.removeprefix("ipc://")
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError:
        size = 0
    if not size or not path.isprintable() or path == "*":
        raise ValueError(f"must be ipc://PATH, not {shown(address)}")
    if size > MAX_IPC_PATH_BYTES:
        raise ValueError(f"has a path of {size} bytes, more than {MAX_IPC_PATH_BYTES}: {shown(address)}")


def _is_host(host: str) -> bool:
    try:
        if host.startswith("["):
            return ipaddress.ip_address(host[1:-1]).version == 6
        if _NUMBERS.fullmatch(host):
            return bool(ipaddress.IPv4Address(host))
    except ValueError:
        return False
    return _NAME.fullmatch(host) is not None
