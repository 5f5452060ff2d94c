"""Answers that a client may ask for again: what it takes to go on with each, in a file of the run directory.

The frontend's own death is what it is for: the file outlives every process of the engine, and ends with the run directory.
Written before a token is handed on, so that nobody has seen one that is not there. SQLite keeps it whole whenever a writer is
killed, and lets several frontends share it. Knows nothing of APIs: ``form`` is theirs.
"""

import contextlib
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from depthbatch.common.logging import get_logger
from depthbatch.common.messages import Submit, TokenEvent

FILE = "answers.sqlite"
PAGE_BYTES = 4096
MAX_BYTES = 256 << 20  # of the file; the oldest answers make room
WAIT_S = 1.0  # for another frontend's writing
SWEEPS_PER_LIFE = 8

log = get_logger("frontend")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE, form BLOB, submits BLOB, created INTEGER, touched REAL);
CREATE TABLE IF NOT EXISTS news (id INTEGER PRIMARY KEY, answer INTEGER, number INTEGER, event BLOB);
CREATE INDEX IF NOT EXISTS news_of ON news (answer);
"""
_encode = msgspec.msgpack.Encoder().encode
_submits = msgspec.msgpack.Decoder(tuple[Submit, ...]).decode
_event = msgspec.msgpack.Decoder(TokenEvent).decode


def _new_handle() -> int:
    return 1 + secrets.randbits(62)


class Numbered(NamedTuple):
    """News of one of the sequences that were submitted together."""

    number: int
    event: TokenEvent


class KeptAnswer(NamedTuple):
    """One answer as far as it has come."""

    handle: int
    name: str
    form: bytes  # what its API needs to know
    submits: tuple[Submit, ...]  # its sequences as they began
    created: int  # unix s
    news: list[Numbered]


class KeptAnswers:
    """By name; a later answer of a name takes the place of the former one. Each is kept ``keep_s`` after its last news.

    Keeping is never worth a stream: where the file cannot be written, one line of the log says so and nothing is kept.
    """

    def __init__(self, run_dir: str | Path, keep_s: float) -> None:
        self._keep_s = keep_s
        self._live: set[int] = set()  # handles that this process writes
        self._next_sweep_s = 0.0
        self._failing = False
        self._file = sqlite3.connect(Path(run_dir) / FILE, timeout=WAIT_S, isolation_level=None)
        for pragma in (
            f"page_size={PAGE_BYTES}",
            "journal_mode=WAL",
            "synchronous=OFF",  # against the death of a process, not of the machine: the run directory is gone then, too
            f"max_page_count={MAX_BYTES // PAGE_BYTES}",
        ):
            self._file.execute(f"PRAGMA {pragma}")
        self._file.executescript(_SCHEMA)

    def begin(self, name: str, form: bytes, submits: Sequence[Submit]) -> int:
        """Keeps what comes of these sequences under the name. Returns a handle for ``add``; 0: it is not kept."""
        self.forget(name)
        now_s = time.time()
        handle = _new_handle()
        row = (handle, name, form, _encode(submits), int(now_s), now_s)
        if not self._write("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", [row]):
            return 0
        self._live.add(handle)
        return handle

    def go_on(self, answer: KeptAnswer) -> int:
        """Returns the handle with which the answer is written from now on; with the one before, by whomever, it is not."""
        handle = _new_handle()
        self._live.discard(answer.handle)
        for statement in ("UPDATE answers SET id = ? WHERE id = ?", "UPDATE news SET answer = ? WHERE answer = ?"):
            self._write(statement, [(handle, answer.handle)])
        self._live.add(handle)
        return handle

    def add(self, news: Iterable[tuple[int, Numbered]]) -> None:
        """What has come, by handle, in one transaction."""
        rows = [(number, _encode(event), handle) for handle, (number, event) in news if handle in self._live]
        self._write("INSERT INTO news (number, event, answer) SELECT ?, ?, id FROM answers WHERE id = ?", rows)

    def leave(self, handle: int) -> None:
        """Nothing more comes for now: from here on its time runs."""
        if handle in self._live:
            self._live.remove(handle)
            self._write("UPDATE answers SET touched = ? WHERE id = ?", [(time.time(), handle)])

    def find(self, name: str) -> KeptAnswer | None:
        """The answer of that name; None when there is none (any more)."""
        self._sweep(time.time())
        rows = self._file.execute("SELECT id, form, submits, created FROM answers WHERE name = ?", (name,)).fetchall()
        if not rows:
            return None
        handle, form, submits, created = rows[0]
        news = self._file.execute("SELECT number, event FROM news WHERE answer = ? ORDER BY id", (handle,))
        return KeptAnswer(
            handle, name, form, _submits(submits), created, [Numbered(number, _event(event)) for number, event in news]
        )

    def forget(self, name: str) -> None:
        """It cannot be asked for any more."""
        for (handle,) in self._file.execute("SELECT id FROM answers WHERE name = ?", (name,)).fetchall():
            self._remove([handle])

    def sweep(self) -> None:
        """Removes what is over; to be called now and then."""
        now_s = time.time()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + self._keep_s / SWEEPS_PER_LIFE
            self._sweep(now_s)

    def close(self) -> None:
        self._file.close()

    def _sweep(self, now_s: float) -> None:
        """Running answers are touched first: another frontend may sweep, too."""
        self._write("UPDATE answers SET touched = ? WHERE id = ?", [(now_s, handle) for handle in self._live])
        over = "SELECT id FROM answers WHERE touched < ?"
        self._remove([handle for (handle,) in self._file.execute(over, (now_s - self._keep_s,))])

    def _remove(self, handles: list[int]) -> None:
        self._live.difference_update(handles)
        ids = [(handle,) for handle in handles]
        self._write("DELETE FROM news WHERE answer = ?", ids)
        self._write("DELETE FROM answers WHERE id = ?", ids)

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> bool:
        """One transaction; a full file first loses its oldest quarter."""
        if not rows:
            return True
        for room_made in (False, True):
            try:
                self._file.execute("BEGIN IMMEDIATE")
                self._file.executemany(statement, rows)
                self._file.execute("COMMIT")
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    self._file.execute("ROLLBACK")
                if "full" in str(error) and not room_made:
                    self._drop_oldest()
                    continue
                if not self._failing:
                    log.warning("%s cannot be written (%s): answers are not kept", FILE, error)
                self._failing = True
                return False
            self._failing = False
            return True
        return False

    def _drop_oldest(self) -> None:
        """Deleting needs no new page but in the journal, which is a file of its own."""
        ids = [handle for (handle,) in self._file.execute("SELECT id FROM answers ORDER BY touched, id").fetchall()]
        oldest = [(handle,) for handle in ids[: len(ids) // 4 + 1]]
        self._live.difference_update(handle for (handle,) in oldest)
        with contextlib.suppress(sqlite3.Error):
            self._file.execute("BEGIN IMMEDIATE")
            self._file.executemany("DELETE FROM news WHERE answer = ?", oldest)
            self._file.executemany("DELETE FROM answers WHERE id = ?", oldest)
            self._file.execute("COMMIT")


def open_answers(run_dir: str | Path, keep_s: float) -> KeptAnswers | None:
    """None, with one line of the log, where there is no room for the file: no stream is worth less for it."""
    try:
        return KeptAnswers(run_dir, keep_s)
    except sqlite3.Error as error:
        log.warning("%s cannot be made (%s): answers are not kept", FILE, error)
        return None


def single_tokens(news: Iterable[Numbered]) -> Iterator[Numbered]:
    """The same news with at most one token an event."""
    for number, event in news:
        count = len(event.token_ids)
        if count < 2:
            yield Numbered(number, event)
            continue
        row = len(event.logprobs) // count
        for index in range(count):
            first, last = index == 0, index == count - 1
            one = TokenEvent(
                event.request_id,
                event.token_ids[index : index + 1],
                event.exit_depths[index : index + 1],
                event.finish_reason if last else None,
                event.stop_reason if last else None,
                event.logprobs[index * row : (index + 1) * row],
                event.prompt_logprobs if first else b"",
                event.cuts if first else b"",
                accepted_drafts=event.accepted_drafts if first else 0,
                rejected_drafts=event.rejected_drafts if first else 0,
            )
            yield Numbered(number, one)
