"""Settings of the HTTP server: frozen, from the same four sources as the engine's. Knows nothing of the engine's own."""

import argparse
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields

from depthbatch.common.config import FIELDS as ENGINE_FIELDS
from depthbatch.common.config import EngineConfig, check_option, option, values_from_sources

DRAIN_NOTICE = signal.SIGUSR1  # to the frontend: SIGTERM is on its way, take no new work


@dataclass(frozen=True)
class HttpConfig:
    """Every option of ``depthbatch serve`` that is not the engine's."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "TCP port; 0 = any free one", low=0, high=65535)
    api_key: str | None = option(None, "keys that clients must send (several: separated by commas); none = open")
    served_model_name: str | None = option(None, "name clients use (default: the MODEL argument)")
    max_requests: int = option(8192, "sequences waiting and running; more get 503 with Retry-After", low=1)
    max_n: int = option(16, "largest n", low=1, high=128)
    max_body_bytes: int = option(16 << 20, "largest request body", low=1024)
    max_header_bytes: int = option(64 << 10, "largest request head: request line and headers", low=1024)
    default_timeout_s: float | None = option(
        None, "timeout_s of requests that name none (default: no limit)", low=0.001, high=86400.0
    )
    drain_s: float = option(30.0, "after SIGTERM, how long running streams may take to finish", low=0.0)
    stall_s: float = option(30.0, "with work waiting, no step for this long means unhealthy", low=0.1)
    chat_template_kwargs: str = option("enable_thinking", "names clients may set, separated by commas")

    def __post_init__(self) -> None:
        for entry in fields(self):
            check_option(entry, getattr(self, entry.name), entry.name)

    @property
    def api_keys(self) -> tuple[bytes, ...]:
        return tuple(key.strip().encode() for key in (self.api_key or "").split(",") if key.strip())

    @property
    def template_names(self) -> frozenset[str]:
        return frozenset(name.strip() for name in self.chat_template_kwargs.split(",") if name.strip())


HTTP_FIELDS = {entry.name: entry for entry in fields(HttpConfig)}


def configs_from_sources(
    arguments: argparse.Namespace, model: str, environ: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, HttpConfig]:
    """Both configurations of a server; one TOML file may hold the options of both. Raises ConfigError."""
    engine = values_from_sources(arguments, environ, ENGINE_FIELDS, HTTP_FIELDS)
    http = values_from_sources(arguments, environ, HTTP_FIELDS, ENGINE_FIELDS)
    return EngineConfig.from_values({**engine, "model": model}), HttpConfig(**http)
