"""``python -m depthbatch.deploy.supervise.program NAME``: what supervisord starts, in a run directory that is prepared.

Scheduler and worker become their own modules; the frontend serves HTTP over the two. Environment:
DEPTHBATCH_RUN_DIR, with engine.json and http.json in it.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from depthbatch.common.errors import FAULT, USER_ERROR, DepthbatchError
from depthbatch.common.logging import get_logger, setup_logging
from depthbatch.common.os_process import die_with_parent, die_with_threads, end_with_parent
from depthbatch.common.run_dir import note_end
from depthbatch.deploy.supervise.attached import AttachedProcesses
from depthbatch.deploy.supervise.back_off import book_fault
from depthbatch.deploy.supervise.run_files import (
    GAVE_UP,
    HTTP_FILE,
    RUN_DIR_VARIABLE,
    follows_fault,
    frontend_names,
    frontend_number,
    note_start,
    read_config,
    url_file,
    write_file,
)
from depthbatch.deploy.supervise.supervisord_client import SupervisordClient
from depthbatch.frontend.background import TaskFailedError
from depthbatch.frontend.http.settings import HttpConfig


def main() -> int:
    name = sys.argv[1]
    number = frontend_number(name)
    run_dir = Path(os.environ[RUN_DIR_VARIABLE])
    parent_pid = os.getppid()
    if number is not None:  # before its pid is known, and until the server has handlers of its own
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    setup_logging(name)
    wait_s = book_fault(run_dir, name) if number is None and follows_fault(run_dir, name) else 0.0
    starts = note_start(run_dir, name)
    if starts:
        get_logger(name).warning("started again (restart %d)", starts)
    if number is not None:
        die_with_parent(parent_pid)
        die_with_threads()
        return _run_frontend(run_dir, number)
    if wait_s:
        end_with_parent()
        get_logger(name).warning("dies again and again: waits %g s before it starts", wait_s)
        time.sleep(wait_s)
    command = [sys.executable, "-P", "-m", f"depthbatch.{name}", "--run-dir", str(run_dir)]
    command += ["--config", read_config(run_dir).to_json(), "--parent-pid", str(parent_pid)]
    os.execv(command[0], command)


def _run_frontend(run_dir: Path, number: int) -> int:
    from depthbatch.frontend.async_engine import AsyncEngine
    from depthbatch.frontend.http.server import bind, run_frontend

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one descriptor a connection
    try:
        http = HttpConfig(**json.loads((run_dir / HTTP_FILE).read_text()))
        # After the imports: from here on the kernel accepts for us, and nobody reads until we run.
        listener = bind(http, shared=http.frontends > 1)
        config = read_config(run_dir)
        processes = AttachedProcesses(run_dir, config, SupervisordClient(run_dir), number)
        engine = AsyncEngine.from_config(config, quiet=number > 0, processes=processes)
        run_frontend(engine, http, listener, lambda url: write_file(run_dir / url_file(number), url), number)
    except TaskFailedError:  # told already; a bug may not strike twice
        return FAULT
    except DepthbatchError as error:
        print(f"depthbatch: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return USER_ERROR if error.exit_code == USER_ERROR else GAVE_UP
    note_end(run_dir, frontend_names(number + 1)[number])
    return 0


if __name__ == "__main__":
    sys.exit(main())
