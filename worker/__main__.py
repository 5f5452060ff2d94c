"""``python -m depthbatch.worker --run-dir RUN --config JSON [--parent-pid N]``: started by the engine, not by hand."""

import argparse
import sys

from depthbatch.common.child import die_with_parent, die_with_threads
from depthbatch.common.logging import setup_logging
from depthbatch.worker.process import run_worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="depthbatch.worker")
    parser.add_argument("--run-dir", required=True, help="directory that holds the sockets")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--parent-pid", type=int, default=0, help="process to die with")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    setup_logging("worker")
    die_with_threads()
    return run_worker(arguments.run_dir, arguments.config)


if __name__ == "__main__":
    sys.exit(main())
