"""Errors with one line for whoever runs the program, which names the thing that is wrong; and the exit codes of every
process and command that ends with one.
"""

import itertools
from typing import Any

SHOWN_CHARS = 80  # of a value
FAULT = 1  # whoever runs the program may start it again
USER_ERROR = 2  # the configuration is wrong: another start would end the same way


def shown(value: Any) -> str:
    """A value in an error's one line, however long it is."""
    text = repr(_first_of(value, [SHOWN_CHARS]))
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _first_of(value: Any, room: list[int]) -> Any:
    """At least as much of it as is shown: the repr of a list of millions takes a second, in which nothing else runs."""
    room[0] -= 1
    if isinstance(value, str | bytes):
        return value[:SHOWN_CHARS]
    if type(value) is list:
        return [_first_of(item, room) for item in itertools.takewhile(lambda _: room[0] >= 0, value)]
    if type(value) is dict:
        items = itertools.takewhile(lambda _: room[0] >= 0, value.items())
        return {_first_of(key, room): _first_of(item, room) for key, item in items}
    return value


class DepthbatchError(Exception):
    """Base of every error with a message fit for a user; the command line prints it and exits with ``exit_code``."""

    exit_code = FAULT


class ConfigError(DepthbatchError):
    """A bad option, TOML key, environment value or combination of them."""

    exit_code = USER_ERROR


class ModelError(DepthbatchError):
    """A missing, broken or unsupported model directory."""

    exit_code = USER_ERROR


class DownloadError(ModelError):
    """A model that may exist and could not be had now: the network, the disk, or the site it comes from."""

    exit_code = FAULT


class RequestError(DepthbatchError):
    """A request that can never be served. ``param`` names the field at fault, if one is."""

    exit_code = USER_ERROR

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OverloadedError(DepthbatchError):
    """A request that can be served, but not now: too many of its kind wait. It may come back after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DecodeError(DepthbatchError):
    """Bytes on a socket that are not a message of that socket's union; ``data`` are those bytes."""

    data: bytes = b""


class RequestKillsWorkerError(DepthbatchError):
    """A request that was running each time that its worker died: it is given up, so that others can go on."""


class EngineDeadError(DepthbatchError):
    """A process of the engine has died; the message names it."""
