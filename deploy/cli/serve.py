"""``depthbatch serve``: the OpenAI-compatible server and the native ZMQ API in the foreground, until SIGTERM."""

import argparse
import signal

import msgspec

from depthbatch.common.config import add_config_arguments
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.common.options import add_option_arguments, to_toml
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
        print(to_toml(http_config, hidden=("api_key",)))
        return 0
    from depthbatch.frontend.http.server import bind

    with bind(http_config) as listener:  # before anything is loaded; the frontend binds the same port in a moment
        http_config = msgspec.structs.replace(http_config, port=listener.getsockname()[1])
    http_config.load_zmq_keys()
    resolve_model_dir(engine_config.model)
    from depthbatch.deploy.supervise.supervision import Supervision

    supervision = Supervision(engine_config, http_config)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, supervision.on_signal)
        return supervision.run()
    finally:
        supervision.close()
