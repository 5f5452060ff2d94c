"""Run by test_ray.py in the clients' environment, where Ray is: one engine's deployment class, called as Ray calls it.

Prints one JSON object with what it told; it asserts nothing.
"""

import asyncio
import json
import sys

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import DepthbatchError
from depthbatch.deploy import ray_app

GAUGES: dict[str, float] = {}


class Gauge:
    """Ray's, as far as it is used."""

    def __init__(self, name: str, description: str) -> None:
        self.name = name

    def set(self, value: float) -> None:
        GAUGES[self.name] = value


async def main() -> dict:
    ray_app.Gauge, ray_app.METRICS_S = Gauge, 0.05
    config = EngineConfig.from_values({"model": "demo", "max_num_seqs": 2, "kv_blocks": 32, "threads": 1})
    replica = object.__new__(ray_app.EngineReplica)
    await replica.__init__(config.to_json())  # Ray awaits it
    await replica.check_health()
    while "depthbatch_num_requests_waiting" not in GAUGES:
        await asyncio.sleep(0.05)
    told = {"gauges": sorted(GAUGES), "idle": replica.record_routing_stats()}
    replica._engine.fail("a task", RuntimeError("it broke"))
    try:
        await replica.check_health()
    except DepthbatchError as error:
        told["failed"] = str(error)
    await replica.__del__()
    return told


if __name__ == "__main__":
    json.dump(asyncio.run(main()), sys.stdout)
