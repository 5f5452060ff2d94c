"""``depthbatch serve``: the OpenAI-compatible server and the native ZMQ API in the foreground, until SIGTERM."""

import argparse
import sys

from depthbatch.common.config import add_config_arguments, add_option_arguments, to_toml
from depthbatch.common.logging import setup_logging
from depthbatch.frontend.http.settings import HTTP_FIELDS, configs_from_sources


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, every engine option and every option of the HTTP server."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    parser.add_argument("--print-config", action="store_true", help="print the options in force and stop")
    add_config_arguments(parser)
    add_option_arguments(parser, HTTP_FIELDS, "HTTP options")


def run_serve(args: argparse.Namespace) -> int:
    """Serves until told to stop. Raises DepthbatchError when the port is taken, or the engine does not start."""
    engine_config, http_config = configs_from_sources(args, args.model)
    if args.print_config:
        print(to_toml(engine_config))
        print(to_toml(http_config))
        return 0
    setup_logging("frontend")
    from depthbatch.frontend.http.server import bind

    listener = bind(http_config)  # before anything is loaded
    from depthbatch.frontend.async_engine import AsyncEngine
    from depthbatch.frontend.http.run import run_frontend

    run_frontend(AsyncEngine.from_config(engine_config), http_config, listener, _announce)
    return 0


def _announce(url: str) -> None:
    print(f"depthbatch: ready at {url}", file=sys.stderr, flush=True)
