"""Errors a user can cause. Each carries one line that names the thing that is wrong."""


class DepthbatchError(Exception):
    """Base of every error with a message fit for a user; the command line prints it and exits with 2."""


class ConfigError(DepthbatchError):
    """A bad option, TOML key, environment value or combination of them."""


class ModelError(DepthbatchError):
    """A missing, broken or unsupported model directory."""


class RequestError(DepthbatchError):
    """A request that can never be served. ``param`` names the field at fault, if one is."""

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


class EngineDeadError(DepthbatchError):
    """A process of the engine has died; the message names it."""
