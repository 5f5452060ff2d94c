"""``python -m depthbatch.worker --run-dir RUN --config JSON [--parent-pid N]``: started by the engine, not by hand."""

import os
import sys

from depthbatch.common.os_process import run_child


def _run(run_dir: str, config_json: str) -> int:
    """Threads that have nothing to do spin for some 50 us and then sleep, unless the environment says otherwise: OpenMP's
    default, milliseconds, takes the core that scheduler and frontend need between two steps."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # read when torch is loaded
    from depthbatch.worker.process import run_worker

    return run_worker(run_dir, config_json)


if __name__ == "__main__":
    status = run_child("worker", _run)
    if (processes := sys.modules.get("depthbatch.worker.rank_processes")) is not None:
        processes.end(status)
    sys.exit(status)
