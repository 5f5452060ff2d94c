"""Health and metrics of a running engine for probes and scrapers; nothing here waits for work in the queue."""

import asyncio
from dataclasses import asdict

from prometheus_client import generate_latest

from depthbatch.common.errors import EngineDeadError
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.http.schemas import HealthAnswer, ProcessHealth
from depthbatch.frontend.metrics import FrontendMetrics
from depthbatch.frontend.process_metrics import process_metrics_text

STATS_WAIT_S = 0.5  # a scheduler that does not answer in time is reported with the numbers it gave last


class EngineProbe:
    """Reads what scheduler and worker push, and asks the scheduler, between two stages, for its counters."""

    def __init__(self, engine: AsyncEngine, metrics: FrontendMetrics, stall_s: float) -> None:
        self._engine = engine
        self._metrics = metrics
        self._stall_s = stall_s
        self._last_stats: dict[str, float] = {}

    def health(self) -> HealthAnswer:
        health = self._engine.health(self._stall_s)
        processes = {name: ProcessHealth(**asdict(process)) for name, process in health.processes.items()}
        return HealthAnswer(status=health.status, processes=processes)

    async def metrics_text(self) -> bytes:
        """Everything that one scrape gets."""
        try:
            async with asyncio.timeout(STATS_WAIT_S):
                self._last_stats = await self._engine.stats()
        except (TimeoutError, EngineDeadError):
            pass
        own = generate_latest(self._metrics.registry)
        return own + process_metrics_text(self._last_stats, self._engine.health(self._stall_s))
