"""Settings of the HTTP server: frozen, from the same four sources as the engine's. Knows nothing of the engine's own."""

import argparse
import os
import re
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from depthbatch.common.config import FIELDS as ENGINE_FIELDS
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.options import Natural, Options, check_environment, option, options_of, values_from_sources
from depthbatch.frontend.processes import MAX_FRONTENDS
from depthbatch.frontend.zmq_keys import ServerKeys, check_address

PAGE = ("on", "off")


class HttpConfig(Options, frozen=True):
    """Every option of ``depthbatch serve`` that is not the engine's."""

    host: Annotated[str, option("address to listen on")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], option("TCP port; 0 = any free one")] = 8000
    frontends: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_FRONTENDS)],
        option(
            "processes that serve HTTP on the port, over one scheduler and worker; the native API is the first one's"
        ),
    ] = 1
    zmq_bind: Annotated[
        str | None,
        option("further address of the native API, tcp://ADDRESS:PORT; other than loopback it needs both keys"),
    ] = None
    zmq_server_key: Annotated[
        str | None, option("file with the server's secret CURVE key (NAME.key_secret of depthbatch keygen)")
    ] = None
    zmq_client_keys: Annotated[
        str | None, option("directory with the public CURVE keys (*.key) of the clients that zmq_bind lets in")
    ] = None
    api_key: Annotated[
        str | None, option("keys that clients must send (several: separated by commas); none = open")
    ] = None
    served_model_name: Annotated[str | None, option("name clients use (default: the MODEL argument)")] = None
    max_requests: Annotated[Natural, option("sequences waiting and running; more get 503 with Retry-After")] = 8192
    max_requests_per_key: Annotated[
        Natural | None,
        option("of those, sequences of one API key (default: half of them where there are several keys, else all)"),
    ] = None
    max_sequences: Annotated[Natural, option("sequences of one request: its prompts, times n")] = 1024
    max_n: Annotated[Annotated[int, Meta(ge=1, le=128)], option("largest n")] = 16
    max_body_bytes: Annotated[Annotated[int, Meta(ge=1024)], option("largest request body")] = 16 << 20
    max_header_bytes: Annotated[
        Annotated[int, Meta(ge=1024)], option("largest request head: request line and headers")
    ] = 64 << 10
    access_log: Annotated[
        str,
        option("a line of the log for each request: method, path, status and seconds", ("off", "on"), bare="on"),
    ] = "off"
    default_timeout_s: Annotated[
        Annotated[float, Meta(ge=0.001, le=86400.0)] | None,
        option("timeout_s of requests that name none (default: no limit)"),
    ] = None
    keep_answers_s: Annotated[
        Annotated[float, Meta(ge=0.0, le=86400.0)],
        option("how long a streamed answer with an id of the client's can be resumed after its last news; 0 = not"),
    ] = 60.0
    drain_s: Annotated[
        Annotated[float, Meta(ge=0.0)], option("after SIGTERM, how long running streams may take to finish")
    ] = 30.0
    stall_s: Annotated[
        Annotated[float, Meta(ge=0.1)], option("with work waiting, no step for this long means unhealthy")
    ] = 30.0
    cors_origins: Annotated[
        str | None,
        option("origins whose pages may call this server, as https://host:port, separated by commas; * = any"),
    ] = None
    page: Annotated[str, option("the server's own page at /", PAGE)] = "on"
    chat_template_kwargs: Annotated[str, option("names clients may set, separated by commas")] = "enable_thinking"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_key is not None and not self.api_keys:
            raise ConfigError("api_key holds no key: leave it out to serve without one")
        if (self.zmq_server_key is None) != (self.zmq_client_keys is None):
            raise ConfigError("zmq_server_key and zmq_client_keys go together: who the server is, and whom it lets in")
        if self.zmq_bind is not None:
            check_address(self.zmq_bind, self.zmq_server_key is not None)
        elif self.zmq_server_key is not None:
            raise ConfigError("zmq_server_key needs zmq_bind: the local address has no keys")
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(f"cors_origins: {origin!r} is no origin, as https://host:port, and not *")

    @property
    def origins(self) -> tuple[str, ...]:
        """Of ``cors_origins``."""
        return tuple(origin.strip().rstrip("/") for origin in (self.cors_origins or "").split(",") if origin.strip())

    @property
    def api_keys(self) -> tuple[bytes, ...]:
        return tuple(key.strip().encode() for key in (self.api_key or "").split(",") if key.strip())

    def load_zmq_keys(self) -> ServerKeys | None:
        """None where there are none. Raises ConfigError."""
        if self.zmq_server_key is None or self.zmq_client_keys is None:
            return None
        return ServerKeys.load(self.zmq_server_key, self.zmq_client_keys)

    @property
    def places(self) -> int:
        """The share of ``max_requests`` that each frontend has."""
        return -(-self.max_requests // self.frontends)

    @property
    def places_per_key(self) -> int:
        """How many of its places a frontend gives to one API key."""
        if self.max_requests_per_key is not None:
            return min(-(-self.max_requests_per_key // self.frontends), self.places)
        return self.places if len(self.api_keys) < 2 else max(1, self.places // 2)

    @property
    def template_names(self) -> frozenset[str]:
        return frozenset(name.strip() for name in self.chat_template_kwargs.split(",") if name.strip())


HTTP_FIELDS = options_of(HttpConfig)
OPTION_NAMES = (*ENGINE_FIELDS, *HTTP_FIELDS)


def configs_from_sources(
    arguments: argparse.Namespace, model: str, environ: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, HttpConfig]:
    """Both configurations of a server; one TOML file may hold the options of both. Raises ConfigError."""
    check_environment(environ, OPTION_NAMES)
    if getattr(arguments, "api_key", None) == "":  # an empty text would stand for none
        raise ConfigError("--api-key is empty: leave it out to serve without a key")
    engine = values_from_sources(arguments, environ, ENGINE_FIELDS, HTTP_FIELDS)
    http = values_from_sources(arguments, environ, HTTP_FIELDS, ENGINE_FIELDS)
    return EngineConfig.from_values({**engine, "model": model}), HttpConfig(**http)
