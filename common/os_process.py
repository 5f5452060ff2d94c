"""What a process of the engine asks of its system: to die with its parent and of what fails in it, to say where it is
when it hangs, and to collect garbage rarely. ``run_child`` is a child's main."""

import argparse
import ctypes
import faulthandler
import gc
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from depthbatch.common.logging import get_logger, setup_logging
from depthbatch.common.run_dir import note_end

STACKS_SIGNAL = signal.SIGUSR2  # to scheduler or worker: write the stacks of your threads into the log

_PR_SET_PDEATHSIG = 1
_GC_THRESHOLDS = (2_000, 10, 1_000)  # container objects made and not freed, then collections of the younger generation
_libc = ctypes.CDLL(None)  # loaded before any fork


def run_child(name: str, run: Callable[[str, str], int]) -> int:
    """The main of the process ``name``: its arguments, its ties to the parent, its log; then ``run(run_dir, config_json)``,
    whose exit status is returned."""
    parser = argparse.ArgumentParser(prog=f"depthbatch.{name}")
    parser.add_argument("--run-dir", required=True, help="directory that holds the sockets")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--parent-pid", type=int, default=0, help="process to die with")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    setup_logging(name)
    die_with_threads()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)  # by the C library's handler: needs no lock of Python's
    try:
        status = run(arguments.run_dir, arguments.config)
    except SystemExit as end:  # a signal
        status = int(end.code or 0)
    if status == 0:
        note_end(arguments.run_dir, name)
    return status


def die_with_parent(parent_pid: int) -> None:
    """Ties this process's life to ``parent_pid`` (0 = started by hand: nothing to tie to).

    Twice, because each way has a hole: the kernel's parent-death signal reaches a child that is stuck in C code, but
    misses a parent that died before this call; the death pipe (the launcher hands its read end as stdin and holds the
    write end) closes however the parent goes.
    """
    if parent_pid <= 0:
        return
    end_with_parent()
    if os.getppid() != parent_pid:
        os._exit(1)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_wait_for_parent, name="death-pipe", daemon=True).start()


def state_of(pid: int) -> str:
    """What the kernel says of a process, as in ``S (sleeping)``; "" when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(maxsplit=1)[1] for line in lines if line.startswith("State:")), "")


def end_with_parent() -> None:
    """The kernel kills this process when its parent's thread ends. May be called between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with_threads() -> None:
    """From now on an exception that ends a thread ends the process, with status 1 and a line that names the thread.

    By default Python prints it and goes on without the thread, and whoever waits for its work waits for ever.
    """
    threading.excepthook = _die_of_thread


def _die_of_thread(args: threading.ExceptHookArgs) -> None:
    name = "?" if args.thread is None else args.thread.name
    error = args.exc_value
    log = get_logger("thread")
    log.critical("thread %s failed: %s: %s", name, args.exc_type.__name__, error, exc_info=error)
    os._exit(1)


def _wait_for_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def tune_garbage_collection() -> None:
    """Once start-up is over: what it made is never gone through again, and what requests made only rarely.

    By default the collector goes through every object each time a quarter more have come: with 5,000 open requests in
    the frontend, half a second in which nothing is streamed. Counted references free what a request leaves behind;
    the collections of the young, which stay, get its cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
