"""``python -m depthbatch.scheduler --run-dir RUN --config JSON [--parent-pid N]``: started by the engine, not by hand."""

import sys

from depthbatch.common.os_process import run_child
from depthbatch.scheduler.process import run_scheduler

if __name__ == "__main__":
    sys.exit(run_child("scheduler", run_scheduler))
