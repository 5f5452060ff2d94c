"""What a child process owes its parent: to die with it, and to die of what fails in it. Called first in a child's main."""

import ctypes
import os
import signal
import stat
import threading

from depthbatch.common.logging import get_logger

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ties this process's life to ``parent_pid`` (0 = started by hand: nothing to tie to).

    Twice, because each way has a hole: the kernel's parent-death signal reaches a child that is stuck in C code, but
    misses a parent that died before this call; the death pipe (the launcher hands its read end as stdin and holds the
    write end) closes however the parent goes.
    """
    if parent_pid <= 0:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_wait_for_parent, name="death-pipe", daemon=True).start()


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
