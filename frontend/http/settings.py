"""Settings of the HTTP server: frozen, from options or DEPTHBATCH_* variables. Knows nothing of the engine's own."""

from dataclasses import dataclass

from depthbatch.common.config import option


@dataclass(frozen=True)
class HttpConfig:
    """Every option of ``depthbatch serve`` that is not the engine's."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "TCP port; 0 = any free one")
    api_key: str | None = option(None, "keys that clients must send (several: separated by commas); none = open")
    served_model_name: str | None = option(None, "name clients use (default: the MODEL argument)")
    max_requests: int = option(4096, "sequences waiting and running; more get 503 with Retry-After")
    max_n: int = option(16, "largest n")
    max_body_bytes: int = option(16 << 20, "largest request body")
    max_header_bytes: int = option(64 << 10, "largest request head: request line and headers")
    default_timeout_s: float | None = option(None, "timeout_s of requests that name none (default: no limit)")
    drain_s: float = option(30.0, "after SIGTERM, how long running streams may take to finish")
    stall_s: float = option(30.0, "with work waiting, no step for this long means unhealthy")
    chat_template_kwargs: str = option("enable_thinking", "names clients may set, separated by commas")

    @property
    def api_keys(self) -> tuple[bytes, ...]:
        return tuple(key.strip().encode() for key in (self.api_key or "").split(",") if key.strip())

    @property
    def template_names(self) -> frozenset[str]:
        return frozenset(name.strip() for name in self.chat_template_kwargs.split(",") if name.strip())
