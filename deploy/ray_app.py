"""Replicas of an engine on Ray Serve: ``serve run depthbatch.deploy.ray_app:app model=demo``.

Two deployments. ``Engine``: a replica is one engine, its scheduler and worker are children of the replica's process.
``Frontend``: the HTTP API, which holds the clients' streams and goes on with them at another engine when one is lost
(frontend/forwarding.py). Scaling, restarts, draining and placement are Ray's. Needs ``pip install 'depthbatch[ray]'``.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from prometheus_client import generate_latest
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.metrics import Gauge
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import ASGIApp

from depthbatch.common.config import FIELDS, EngineConfig
from depthbatch.common.errors import ConfigError, DepthbatchError, EngineDeadError
from depthbatch.common.logging import setup_logging
from depthbatch.common.messages import EngineInfo
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.common.options import Natural, Option, Options, option, options_of
from depthbatch.common.stats import CoreStats
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.background import background
from depthbatch.frontend.forwarding import ForwardingEngine, ReplicaLostError, decode_call, encode_error, encode_news
from depthbatch.frontend.http.app import create_app
from depthbatch.frontend.http.generation import Service
from depthbatch.frontend.http.schemas import HealthAnswer, ProcessHealth
from depthbatch.frontend.http.settings import HTTP_FIELDS, HttpConfig
from depthbatch.frontend.http.texts import Texts
from depthbatch.frontend.prompts import load_texts
from depthbatch.frontend.routing import AffinityRouter, Order

METRICS_S = 5.0
ROUTING_STATS_S = 1.0
# of the HTTP server: Ray's proxy is the server here, no frontend keeps answers or has a native API
NOT_HERE = frozenset(
    {"host", "port", "max_header_bytes", "access_log", "keep_answers_s", "drain_s", "stall_s", "page"}
    | {"frontends", "zmq_bind", "zmq_server_key", "zmq_client_keys"}
)


class RayConfig(Options, frozen=True):
    """Options of the application that are neither the engine's nor the HTTP API's."""

    min_replicas: Annotated[Natural, option("engines at least")] = 1
    max_replicas: Annotated[Natural | None, option("engines at most (default: min_replicas)")] = None
    target_ongoing_requests: Annotated[
        Natural | None, option("requests an engine before another is started (default: 3/4 of max_num_seqs)")
    ] = None
    upscale_delay_s: Annotated[
        Annotated[float, Meta(ge=0.0)],
        option("how long there have to be too many requests before an engine is started"),
    ] = 30.0
    downscale_delay_s: Annotated[
        Annotated[float, Meta(ge=0.0)], option("how long there have to be too few before one is ended")
    ] = 600.0
    frontends: Annotated[Natural, option("replicas of the HTTP API")] = 1
    num_cpus: Annotated[Annotated[float, Meta(ge=0.0)], option("CPUs that Ray reserves for an engine")] = 1.0
    num_gpus: Annotated[Annotated[float, Meta(ge=0.0)], option("GPUs that Ray reserves for an engine")] = 0.0
    graceful_shutdown_s: Annotated[
        Annotated[float, Meta(ge=0.0)], option("how long an engine that is scaled down may finish what it runs")
    ] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ConfigError(f"max_replicas {self.max_replicas} is less than min_replicas {self.min_replicas}")


RAY_FIELDS = options_of(RayConfig)
SERVED_FIELDS = {name: entry for name, entry in HTTP_FIELDS.items() if name not in NOT_HERE}


def configs(args: Mapping[str, Any]) -> tuple[EngineConfig, HttpConfig, RayConfig]:
    """Of ``key=value`` arguments, or of a YAML file's ``args``. Raises ConfigError."""
    values: list[dict[str, Any]] = [{}, {}, {}]
    for key, value in args.items():
        name = key.replace("-", "_")
        entry: Option | None = None
        for own, fields in zip(values, (FIELDS, SERVED_FIELDS, RAY_FIELDS), strict=True):
            if name in fields:
                entry = fields[name]
                own[name] = entry.parse(value, key) if isinstance(value, str) else value
        if entry is None:
            where = "not an option on Ray Serve" if name in NOT_HERE else "no option"
            raise ConfigError(f"{key}: {where}")
    return EngineConfig.from_values(values[0]), HttpConfig(**values[1]), RayConfig(**values[2])


class LoopRouter(RequestRouter):  # type: ignore[misc]
    """Routes by prefix with the queued loops as the bound (frontend/routing.py). Loops are those that this frontend has sent
    and that have not come back, and those that an engine has reported beyond them, of other frontends."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._router = AffinityRouter(**kwargs)
        self._sent: dict[ReplicaID, dict[str, float]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, one a rank. Calls that are no requests go anywhere."""
        if pending_request is None or not pending_request.args or not isinstance(pending_request.args[0], Order):
            return [candidate_replicas]
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {id_: self._load(replica) for id_, replica in by_id.items()}
        return [[by_id[id_]] for id_ in self._router.rank(pending_request.args[0], loads)]  # type: ignore[index]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if pending_request.args and isinstance(pending_request.args[0], Order):
            order = pending_request.args[0]
            self._router.went(order, replica_id)
            self._sent.setdefault(replica_id, {})[pending_request.metadata.internal_request_id] = order.loops

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent.get(replica_id, {}).pop(internal_request_id, None)

    def _load(self, replica: RunningReplica) -> float:
        own = sum(self._sent.get(replica.replica_id, {}).values())
        return max(own, float(replica.routing_stats.get("queued_loops", 0.0)))


class EngineReplica:
    """One engine: scheduler and worker are children of this process, and end with it."""

    async def __init__(self, config_json: str) -> None:  # type: ignore[misc]  # Ray awaits it
        setup_logging("engine")
        self._engine = AsyncEngine.from_config(EngineConfig.from_json(config_json), quiet=True)
        await self._engine.__aenter__()
        self._queued: dict[int, float] = {}  # loops ahead of what runs here, by call
        self._calls = 0
        self._gauges: dict[str, Gauge] = {}
        self._teller = background(self._tell(), "metrics", self._engine.fail)

    async def info(self) -> bytes:
        """EngineInfo, encoded."""
        return msgspec.msgpack.encode(self._engine.info)

    async def generate(self, order: Order, call: bytes) -> AsyncGenerator[bytes, None]:
        """The news of a request (forwarding.Call)."""
        self._calls += 1
        number = self._calls
        self._queued[number] = order.loops
        try:
            asked = decode_call(call)
            async with contextlib.aclosing(self._engine.forward(asked.submit, asked.timeout_s)) as news:
                async for events in news:
                    self._queued[number] -= sum(sum(event.exit_depths) for event in events)
                    yield encode_news(events)
        except DepthbatchError as error:
            yield encode_error(error)
        finally:
            del self._queued[number]

    def record_routing_stats(self) -> dict[str, float]:
        """For LoopRouter."""
        return {"queued_loops": sum(max(0.0, loops) for loops in self._queued.values())}

    async def check_health(self) -> None:
        """Raises when the engine is lost for good, so that Ray starts another; a worker or scheduler that is being started
        again is no reason."""
        if self._engine.failure is not None:
            raise self._engine.failure

    async def __del__(self) -> None:
        self._teller.cancel()
        await self._engine.close()

    async def _tell(self) -> None:
        """The engine's counters as metrics of Ray's, ``depthbatch_NAME``, by replica."""
        while True:
            with contextlib.suppress(EngineDeadError):
                for name, value in (await self._engine.stats()).items():
                    if "{" in name:  # a series with labels of its own
                        continue
                    if name not in self._gauges:
                        self._gauges[name] = Gauge(f"depthbatch_{name}", description="Of an engine's scheduler.")
                    self._gauges[name].set(value)
            await asyncio.sleep(METRICS_S)


class RayReplicas:
    """Engines behind a handle of Ray's."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._generate = handle.options(stream=True).generate

    async def ask(self, call: bytes, order: Order) -> AsyncGenerator[bytes, None]:
        response = self._generate.remote(order, call)
        try:
            async for news in response:
                yield news
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
        finally:
            response.cancel()


class RayProbe:
    """Health and load of this frontend; of the engines, Ray's dashboard and metrics tell."""

    def __init__(self, service: Service, engine: ForwardingEngine, config: EngineConfig) -> None:
        self.config = config
        self._service = service
        self._engine = engine

    async def core_stats(self) -> CoreStats:
        return CoreStats(running=self._engine.num_unfinished)

    def health(self) -> HealthAnswer:
        own = ProcessHealth(pid=os.getpid(), state="running", steps=0, last_step_age_s=0.0, restarts=0)
        return HealthAnswer(status="ok", processes={"frontend": own})

    async def metrics_text(self) -> bytes:
        return generate_latest(self._service.metrics.registry)

    def stages(self) -> list[bytes] | None:
        return None


_built: list[ASGIApp] = []  # of this process's replica


@serve.ingress(lambda: _built[-1])  # type: ignore[untyped-decorator]
class FrontendReplica:
    """The HTTP API over engines elsewhere."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config_json: str, http_json: str, engines: DeploymentHandle
    ) -> None:
        setup_logging("frontend")
        config, http = EngineConfig.from_json(config_json), msgspec.json.decode(http_json, type=HttpConfig)
        info = msgspec.msgpack.decode(await engines.info.remote(), type=EngineInfo)
        tokenizer, defaults = await asyncio.to_thread(load_texts, config)
        engine = ForwardingEngine(RayReplicas(engines), info, tokenizer, config.seed)
        texts = Texts(tokenizer, http.template_names, ThreadPoolExecutor(1, thread_name_prefix="tokenizer"))
        service = Service(engine, texts, http, http.served_model_name or config.model, defaults)
        _built.append(create_app(service, RayProbe(service, engine, config)))


Engine: Any = serve.deployment(EngineReplica, name="Engine")
Frontend: Any = serve.deployment(FrontendReplica, name="Frontend")


def app(args: dict[str, Any]) -> serve.Application:
    """The application, of options as ``depthbatch serve`` has them (with underscores), and of RayConfig's."""
    config, http, ray = configs(args)
    resolve_model_dir(config.model)
    most = config.max_num_seqs
    scaling = AutoscalingConfig(
        min_replicas=ray.min_replicas,
        max_replicas=ray.max_replicas or ray.min_replicas,
        target_ongoing_requests=ray.target_ongoing_requests or max(1, 3 * most // 4),
        upscale_delay_s=ray.upscale_delay_s,
        downscale_delay_s=ray.downscale_delay_s,
    )
    engines = Engine.options(
        autoscaling_config=scaling,
        max_ongoing_requests=2
        * most,  # what waits beyond that waits in the frontends, for whichever engine is free first
        graceful_shutdown_timeout_s=ray.graceful_shutdown_s,
        health_check_period_s=2.0,
        ray_actor_options={"num_cpus": ray.num_cpus, "num_gpus": ray.num_gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=LoopRouter, request_routing_stats_period_s=ROUTING_STATS_S
        ),
    ).bind(config.to_json())
    return Frontend.options(
        num_replicas=ray.frontends,
        max_ongoing_requests=http.max_requests,
        ray_actor_options={"num_cpus": min(0.1, ray.num_cpus)},
    ).bind(config.to_json(), msgspec.json.encode(http).decode(), engines)
