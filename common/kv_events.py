"""Whether events of the prefix cache are published, and where: vLLM's ``--kv-events-config``, a JSON object."""

import msgspec

from depthbatch.common.endpoints import check_endpoint
from depthbatch.common.errors import ConfigError

MAX_BATCHES = 1_000_000_000  # twice as many are still a high-water mark of ZeroMQ, an int


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of vLLM's fields those that mean something here."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = ""  # of the PUB socket: bound where it is ipc or names any host ("*"), else connected
    replay_endpoint: str | None = None  # of a ROUTER that repeats batches
    buffer_steps: int = 10_000  # batches that it can repeat
    hwm: int = 100_000  # batches that wait for a slow subscriber before it loses some
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher != "zmq":
            raise ValueError(f"publisher must be zmq, not {self.publisher!r}")
        if self.enable_kv_cache_events and not self.endpoint:
            raise ValueError("endpoint is missing: where the PUB socket is, as tcp://*:5557")
        for name in ("endpoint", "replay_endpoint"):
            if address := getattr(self, name):
                self._check_address(name, address, name == "replay_endpoint" or binds(address))
        for name in ("buffer_steps", "hwm"):
            if not 0 <= getattr(self, name) <= MAX_BATCHES:
                raise ValueError(f"{name} must be from 0 to {MAX_BATCHES}, not {getattr(self, name)}")

    @staticmethod
    def _check_address(name: str, address: str, bind: bool) -> None:
        try:
            check_endpoint(address, bind)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None

    @classmethod
    def parse(cls, text: str) -> "KvEventsConfig":
        """Raises ConfigError naming the field."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            raise ConfigError(f"kv_events_config: {error}") from None


def binds(address: str) -> bool:
    """Whether a PUB socket binds the address or connects to it, by vLLM's rule."""
    return "*" in address or "::" in address or address.startswith("ipc://")
