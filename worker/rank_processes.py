"""The processes of a worker's ranks: rank 0 starts the others, speaks to each over a socket pair, and ends with the first.

Imports no torch, so that all ranks import it at the same time.
"""

import atexit
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from threading import Thread
from typing import Any, NoReturn

from depthbatch.common.config import EngineConfig
from depthbatch.common.logging import get_logger

log = get_logger("worker")


class Channel:
    """Whole messages over a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._file: Any = end.makefile("rwb")
        end.close()  # the file keeps the connection

    def send(self, *messages: bytes) -> None:
        """Waits while the other side has much to read. Raises OSError when it has gone."""
        for message in messages:
            self._file.write(len(message).to_bytes(8, "little"))
            self._file.write(message)
        self._file.flush()

    def receive(self) -> bytes:
        """Waits for the next message. Raises EOFError when the other side has gone."""
        head = self._file.read(8)
        data: bytes = self._file.read(size := int.from_bytes(head, "little"))
        if len(head) < 8 or len(data) < size:
            raise EOFError
        return data


class RankProcesses:
    """The ranks beside this one, as processes."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts them; each gets the configuration. The calling thread must live as long as they do."""
        self.channels: dict[int, Channel] = {}  # by rank
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, config.tensor_parallel_size):
            ours, theirs = socket.socketpair()
            with theirs:
                self._processes[rank] = subprocess.Popen(
                    [*self.program(), str(theirs.fileno()), str(rank), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # they end with rank 0 and in no other way: signals to its group are not for them
                )
            self.channels[rank] = Channel(ours)
            self.channels[rank].send(config.to_json().encode())
        self._closing = False
        self._watch = Thread(target=self._end_with_the_first, name="ranks", daemon=True)
        self._watch.start()
        atexit.register(self.close)

    @staticmethod
    def program() -> list[str]:
        """What runs as another rank, without its arguments."""
        return [sys.executable, "-P", "-m", "depthbatch.worker.rank"]

    def close(self) -> None:
        """Ends the others; doing it twice is fine."""
        self._closing = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def wait_for_the_watch(self) -> None:
        """What was asked of a rank fails a moment before the kernel tells that it is dead: time for the watch to say so."""
        self._watch.join(1.0)

    def _end_with_the_first(self) -> None:
        """Ends this process when another rank ends: what it computes would wait for that one for ever."""
        ranks = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        [(descriptor, _), *_] = poll.poll()
        if self._closing:
            return
        code = self._processes[ranks[descriptor]].wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        log.critical("rank %d died (%s), and the worker with it", ranks[descriptor], how)
        os._exit(1)


def end(status: int) -> NoReturn:
    """Ends this process, and the other ranks with it, without taking apart what torch has built: NCCL would wait for ranks
    that are gone, and for graphs that hold its collectives."""
    atexit._run_exitfuncs()
    logging.shutdown()
    os._exit(status)
