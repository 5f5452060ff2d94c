"""What a child process owes its parent: to die with it, and to stop when asked. Called first in a child's main."""

import ctypes
import os
import signal
import stat
import threading

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


def _wait_for_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
