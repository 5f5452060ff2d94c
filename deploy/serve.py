"""``depthbatch serve``: the engine and its native ZMQ API in the foreground, until SIGTERM or SIGINT."""

import argparse
import asyncio
import contextlib
import signal
import sys

from depthbatch.common.config import EngineConfig, add_config_arguments, config_from_sources, to_toml
from depthbatch.common.logging import setup_logging
from depthbatch.common.transport import API_ENDPOINT, endpoint
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.zmq_api import ZmqApi


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and every engine option."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    parser.add_argument("--print-config", action="store_true", help="print the options in force and stop")
    add_config_arguments(parser)


def run_serve(args: argparse.Namespace) -> int:
    """Serves until told to stop. Raises DepthbatchError when the engine does not start or is lost."""
    config = config_from_sources(args, model=args.model)
    if args.print_config:
        print(to_toml(config))
        return 0
    setup_logging("frontend")
    asyncio.run(_serve(config))
    return 0


async def _serve(config: EngineConfig) -> None:
    loop = asyncio.get_running_loop()
    serving = loop.create_task(_serve_until_cancelled(config))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _serve_until_cancelled(config: EngineConfig) -> None:
    async with AsyncEngine.from_config(config) as engine:
        api = ZmqApi(engine, endpoint(engine.run_dir, API_ENDPOINT))
        try:
            print(f"depthbatch: ready at {api.address}", file=sys.stderr, flush=True)
            raise await engine.failed()
        finally:
            await api.close()
