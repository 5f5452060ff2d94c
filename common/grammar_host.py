"""A grammar host from outside: starts the program, hands out one matcher a grammar, and never waits without a limit.

Between owner and matcher, on a socket that keeps messages whole: the grammar in pieces, then int32 tokens; each, the
grammar included, is answered by the next mask, by the end, or by what is wrong. A matcher that has crashed or run into
a limit is a closed connection, and no matter of any other.
"""

import contextlib
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from depthbatch.common.grammar_limits import COMPILE_CPU_S, MEMORY_BYTES, STEP_CPU_S

START_S = 60.0  # reading a vocabulary of 150,000 takes seconds
_PIECE = 32 << 10  # bytes of a grammar in one message
_TOKENS = 8 << 10  # in one message
_MAX_ANSWER = 1 << 20


class GrammarError(Exception):
    """A grammar that is wrong, too costly, or cannot be met. The message says which, in one line."""


class Matcher:
    """One grammar's process. Not thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._owed = 1  # answers that have not been read: the grammar's own is the first
        self._answer: bytes | None = b""
        self._started = False

    def tell(self, tokens: Sequence[int]) -> None:
        """Says what the text went on with; the next mask is computed from then on. Raises GrammarError."""
        values = np.asarray(tokens, np.int32)
        for start in range(0, values.size, _TOKENS):
            self._send(values[start : start + _TOKENS].tobytes())
            self._owed += 1

    def mask(self, deadline_s: float) -> bytes | None:
        """What may come next, int32 words with a bit a token; None when only the end may. ``deadline_s``: of
        time.monotonic, from which on there is no waiting. Raises GrammarError."""
        while self._owed:
            answer = self._receive(deadline_s)
            self._owed -= 1
            if answer[:1] == b"f":
                raise GrammarError(answer[1:].decode("utf-8", "replace"))
            self._answer = answer[1:] if answer[:1] == b"a" else None
            self._started = True
        return self._answer

    @property
    def descriptor(self) -> int:
        """Readable when an answer has come, or the process has ended."""
        return self._connection.fileno()

    @property
    def answered(self) -> bool:
        """``mask`` would not wait."""
        return not self._owed or bool(select.select([self._connection], [], [], 0)[0])

    def fork(self) -> "Matcher":
        """Of a grammar that is kept and has answered: a matcher for one text, whose first mask is made. Raises
        GrammarError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(1.0)
        with theirs:
            try:
                socket.send_fds(self._connection, [b"f"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise self._gone() from None
        matcher = Matcher(ours)
        matcher._started = True
        return matcher

    def close(self) -> None:
        """Ends the process, at once or when what it computes ends; doing it twice is fine."""
        self._connection.close()

    def _receive(self, deadline_s: float) -> bytes:
        self._connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
        try:
            answer = self._connection.recv(_MAX_ANSWER)
        except TimeoutError:
            raise GrammarError("it was not answered for in time") from None
        except OSError:
            answer = b""
        if not answer:
            raise self._gone()
        return answer

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send(message)
        except TimeoutError:
            raise GrammarError("it was not answered for in time") from None
        except OSError:
            raise self._gone() from None

    def _gone(self) -> GrammarError:
        """Why the process has ended: in its own words, where it had some."""
        if words := self._last_words():
            return GrammarError(words)
        what = (
            f"a token took more than {STEP_CPU_S:g} s" if self._started else f"compiling took over {COMPILE_CPU_S:g} s"
        )
        return GrammarError(f"{what} of CPU time or {MEMORY_BYTES >> 20} MiB, or crashed")

    def _last_words(self) -> str:
        """What it said of why, behind answers that nobody has read."""
        self._connection.setblocking(False)
        for _ in range(self._owed + 2):
            try:
                answer = self._connection.recv(_MAX_ANSWER)
            except ConnectionResetError:  # told once, before what is there, where it left something of ours unread
                continue
            except OSError:
                return ""
            if answer[:1] == b"f":
                return answer[1:].decode("utf-8", "replace")
            if not answer:
                return ""
        return ""

    @classmethod
    def start(cls, connection: socket.socket, grammar: str, mode: bytes) -> "Matcher":
        """Sends the grammar. ``mode``: m for a text, p also to take a step, to see whether it can be taken, k to be kept
        for ``fork``. Raises GrammarError."""
        matcher = cls(connection)
        matcher._send(mode)
        data = grammar.encode()
        for start in range(0, len(data), _PIECE):
            last = start + _PIECE >= len(data)
            matcher._send((b"." if last else b"+") + data[start : start + _PIECE])
        return matcher


class GrammarHost:
    """The program, started when it is first needed, and again when it has died. Not thread-safe."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._arguments = [str(tokenizer), str(vocab_size), *map(str, eos_token_ids)]
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False

    def start(self) -> None:
        """Starts the program without waiting for it."""
        self.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*self.program(), str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the library's complaints quote what clients sent, without a bound
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    @staticmethod
    def program() -> list[str]:
        """What runs, without its arguments."""
        return [sys.executable, "-P", "-m", "depthbatch.common.grammar_program"]

    def wait_ready(self) -> None:
        """Waits until the vocabulary has been read, up to START_S. Raises GrammarError."""
        if self._control is None:
            self.start()
        assert self._control is not None
        if self._ready:
            return
        self._control.settimeout(START_S)
        try:
            answer = self._control.recv(_MAX_ANSWER)
        except OSError:
            answer = b""
        if answer[:1] != b"a":
            self.close()
            raise GrammarError(answer[1:].decode("utf-8", "replace") or "the grammar host did not start")
        self._ready = True

    def ready_matcher(self, grammar: str) -> Matcher:
        """One whose first answer also tells whether a step can be taken. Waits for the program. Raises GrammarError."""
        self.wait_ready()
        return self.matcher(grammar, b"p")

    def matcher(self, grammar: str, mode: bytes = b"m") -> Matcher:
        """Starts compiling. Never waits for the program, which is started again if it has died: what is asked of it
        before it is ready may come too late. Raises GrammarError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(1.0)
        with theirs:
            if not self._hand_over(theirs):
                self.start()
                if not self._hand_over(theirs):
                    ours.close()
                    raise GrammarError("the grammar host did not start")
        try:
            return Matcher.start(ours, grammar, mode)
        except BaseException:
            ours.close()
            raise

    def close(self) -> None:
        """Ends the program; matchers end with their own connections. Doing it twice is fine."""
        self._ready = False
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._process = None

    def _hand_over(self, connection: socket.socket) -> bool:
        if self._control is None:
            return False
        try:
            self._control.settimeout(1.0)
            socket.send_fds(self._control, [b"m"], [connection.fileno()])
        except OSError:
            return False
        return True
