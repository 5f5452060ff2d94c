"""Answers that a client may ask for again: what it takes to go on with each, in a file of the run directory.

The frontend's own death is what it is for: the file outlives every process of the engine, and ends with the run directory.
Written before a token is handed on, so that nobody has seen one that is not there. SQLite keeps it whole whenever a writer is
killed, and lets several frontends share it. Knows nothing of APIs: ``form`` is theirs.

An answer has one writer at a time, who knows its handle. Whoever goes on with it gives it another, so that what the former
writer adds is not written, and is told so.
"""

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from depthbatch.common.logging import get_logger
from depthbatch.common.messages import FinishReason, Submit, TokenEvent

FILE = "answers.sqlite"
MODE = 0o600  # it holds prompts
PAGE_BYTES = 4096
MAX_BYTES = 256 << 20  # of the file; the oldest answers make room
WAIT_S = 1.0  # for another frontend's writing
OPEN_S = 10.0  # for others that open the file: while one switches it to WAL, SQLite refuses the others at once
RETRY_S = 0.02
SWEEPS_PER_LIFE = 8

log = get_logger("frontend")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    id INTEGER PRIMARY KEY, origin INTEGER, name TEXT UNIQUE, form BLOB, submits BLOB, created INTEGER, touched REAL);
CREATE TABLE IF NOT EXISTS news (id INTEGER PRIMARY KEY, answer INTEGER, number INTEGER, event BLOB);
CREATE INDEX IF NOT EXISTS news_of ON news (answer);
"""  # an answer's id is its handle, its origin the first one, by which its news are found
_DELETE_NEWS = "DELETE FROM news WHERE answer = (SELECT origin FROM answers WHERE id = ?)"
_DELETE = "DELETE FROM answers WHERE id = ?"
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
    origin: int  # its first handle
    name: str
    form: bytes  # what its API needs to know
    submits: tuple[Submit, ...]  # its sequences as they began
    created: int  # unix s
    news: list[Numbered]

    @property
    def unfinished(self) -> list[int]:
        """Numbers of the sequences that have not ended; one that a stop string has ended may be among them."""
        ended = {number for number, event in self.news if event.finish_reason is not None}
        return [number for number in range(len(self.submits)) if number not in ended]


class KeptAnswers:
    """By name; a later answer of a name takes the place of the former one. Each is kept ``keep_s`` after its last news.

    Keeping is never worth a stream: where the file cannot be written, one line of the log says so and nothing is kept.
    """

    def __init__(self, run_dir: str | Path, keep_s: float) -> None:
        """Raises OSError or sqlite3.Error."""
        self._keep_s = keep_s
        self._live: dict[int, int] = {}  # handles that this process writes, with the answers' origins
        self._next_sweep_s = 0.0
        self._failing = False
        path = Path(run_dir) / FILE
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, MODE))  # what SQLite lays beside it gets its mode
        self._file = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
        try:
            for pragma in (
                f"page_size={PAGE_BYTES}",
                "journal_mode=WAL",
                "synchronous=OFF",  # against the death of a process, not of the machine: then the run directory is gone, too
                f"max_page_count={MAX_BYTES // PAGE_BYTES}",
            ):
                self._file.execute(f"PRAGMA {pragma}")
            self._file.executescript(_SCHEMA)
        except sqlite3.Error:
            self._file.close()
            raise

    def begin(self, name: str, form: bytes, submits: Sequence[Submit]) -> int:
        """Keeps what comes of these sequences under the name. Returns a handle for ``add``; 0: it is not kept."""
        now_s = time.time()
        handle = _new_handle()
        row = (handle, handle, name, form, _encode(submits), int(now_s), now_s)
        if not self._write(
            ("DELETE FROM news WHERE answer = (SELECT origin FROM answers WHERE name = ?)", [(name,)]),
            ("DELETE FROM answers WHERE name = ?", [(name,)]),
            ("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", [row]),
        ):
            return 0
        self._live[handle] = handle
        return handle

    def go_on(self, handle: int) -> KeptAnswer | None:
        """The answer as it is now, with a new handle with which it is written from now on; None where somebody else has
        taken it, or it is not kept any more."""
        new, answer = _new_handle(), None
        try:
            self._file.execute("BEGIN IMMEDIATE")
            change = "UPDATE answers SET id = ?, touched = ? WHERE id = ?"
            if self._file.execute(change, (new, time.time(), handle)).rowcount:
                answer = self._answer("id", new)
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            self._undo()
            self._tell(error)
            return None
        if answer is not None:
            self._live[new] = answer.origin
        return answer

    def abort(self, name: str) -> bool:
        """Ends what has not ended of an answer that nobody goes on with; False where there is nothing."""
        answer = self._answer("name", name)
        if answer is None or not answer.unfinished or (taken := self.go_on(answer.handle)) is None:
            return False
        end = TokenEvent(0, (), (), FinishReason.ABORT)
        self.add((taken.handle, Numbered(number, end)) for number in taken.unfinished)
        self.leave(taken.handle)
        return True

    def add(self, news: Iterable[tuple[int, Numbered]]) -> list[int]:
        """What has come, by handle, in one transaction. Returns the handles with which nothing is written any more, because
        others go on with the answers."""
        rows = [(number, _encode(event), handle) for handle, (number, event) in news if handle in self._live]
        before = self._file.total_changes
        self._write(("INSERT INTO news (number, event, answer) SELECT ?, ?, origin FROM answers WHERE id = ?", rows))
        if self._file.total_changes - before == len(rows):
            return []
        return self._lost({handle for _, _, handle in rows})

    def leave(self, handle: int) -> None:
        """Nothing more comes for now: from here on its time runs."""
        if self._live.pop(handle, None) is not None:
            self._write(("UPDATE answers SET touched = ? WHERE id = ?", [(time.time(), handle)]))

    def find(self, name: str) -> KeptAnswer | None:
        """The answer of that name; None when there is none (any more)."""
        self._sweep(time.time())
        return self._answer("name", name)

    def drop(self, handle: int) -> None:
        """It cannot be asked for any more, unless somebody else goes on with it."""
        self._remove([handle])

    def sweep(self) -> list[int]:
        """Removes what is over; to be called now and then. Returns like ``add``, of answers without news, too."""
        now_s = time.time()
        if now_s < self._next_sweep_s:
            return []
        self._next_sweep_s = now_s + self._keep_s / SWEEPS_PER_LIFE
        self._sweep(now_s)
        return self._lost(set(self._live))

    def close(self) -> None:
        self._file.close()

    def _answer(self, column: str, value: int | str) -> KeptAnswer | None:
        columns = "id, origin, name, form, submits, created"
        rows = self._read(f"SELECT {columns} FROM answers WHERE {column} = ?", value)
        if not rows:
            return None
        handle, origin, name, form, submits, created = rows[0]
        found = self._read("SELECT number, event FROM news WHERE answer = ? ORDER BY id", origin)
        news = [Numbered(number, _event(event)) for number, event in found]
        return KeptAnswer(handle, origin, name, form, _submits(submits), created, news)

    def _lost(self, handles: set[int]) -> list[int]:
        """Those of answers that others go on with; they, and those of which nothing is kept any more, are not live then."""
        lost = []
        for handle in handles & self._live.keys():
            rows = self._read("SELECT id FROM answers WHERE origin = ?", self._live[handle])
            if rows != [(handle,)]:
                del self._live[handle]
                lost += [handle] * len(rows)
        return lost

    def _sweep(self, now_s: float) -> None:
        """Running answers are touched first: another frontend may sweep, too."""
        self._write(("UPDATE answers SET touched = ? WHERE id = ?", [(now_s, handle) for handle in self._live]))
        over = self._read("SELECT id FROM answers WHERE touched < ?", now_s - self._keep_s)
        self._remove([handle for (handle,) in over])

    def _remove(self, handles: Iterable[int]) -> None:
        ids = [(handle,) for handle in handles]
        for (handle,) in ids:
            self._live.pop(handle, None)
        self._write((_DELETE_NEWS, ids), (_DELETE, ids))

    def _read(self, statement: str, value: float | str) -> list[tuple[Any, ...]]:
        """Nothing where the file cannot be read."""
        try:
            return self._file.execute(statement, (value,)).fetchall()
        except sqlite3.Error as error:
            self._tell(error)
            return []

    def _write(self, *changes: tuple[str, Sequence[tuple[object, ...]]]) -> bool:
        """Statements with their rows, in one transaction; a full file first loses its oldest quarter."""
        if not any(rows for _, rows in changes):
            return True
        for room_made in (False, True):
            try:
                self._file.execute("BEGIN IMMEDIATE")
                for statement, rows in changes:
                    self._file.executemany(statement, rows)
                self._file.execute("COMMIT")
            except sqlite3.Error as error:
                self._undo()
                if "full" in str(error) and not room_made:
                    self._drop_oldest()
                    continue
                self._tell(error)
                return False
            self._failing = False
            return True
        return False

    def _undo(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._file.execute("ROLLBACK")

    def _tell(self, error: sqlite3.Error) -> None:
        if not self._failing:
            log.warning("%s cannot be used (%s): answers are not kept", FILE, error)
        self._failing = True

    def _drop_oldest(self) -> None:
        """Deleting needs no new page but in the journal, which is a file of its own."""
        oldest = self._read(
            "SELECT id FROM answers ORDER BY touched, id LIMIT 1 + (SELECT count(*) FROM answers) / ?", 4
        )
        for (handle,) in oldest:
            self._live.pop(handle, None)
        with contextlib.suppress(sqlite3.Error):
            self._file.execute("BEGIN IMMEDIATE")
            self._file.executemany(_DELETE_NEWS, oldest)
            self._file.executemany(_DELETE, oldest)
            self._file.execute("COMMIT")


def open_answers(run_dir: str | Path, keep_s: float) -> KeptAnswers | None:
    """None, with one line of the log, where there is no room for the file: no stream is worth less for it."""
    deadline_s = time.monotonic() + OPEN_S
    while True:
        try:
            return KeptAnswers(run_dir, keep_s)
        except (sqlite3.Error, OSError) as error:
            if "locked" not in str(error) or time.monotonic() >= deadline_s:
                log.warning("%s cannot be made (%s): answers are not kept", FILE, error)
                return None
        time.sleep(RETRY_S)


# Of an event of several tokens these come with the first one, those with the last.
_OF_FIRST: dict[str, Any] = {
    "prompt_logprobs": b"",
    "cuts": b"",
    "accepted_drafts": 0,
    "rejected_drafts": 0,
    "cached_tokens": 0,
}
_OF_LAST: dict[str, Any] = {"finish_reason": None, "stop_reason": None, "failure": "", "kills_worker": False}


def single_tokens(news: Iterable[Numbered]) -> Iterator[Numbered]:
    """The same news with at most one token an event."""
    for number, event in news:
        count = len(event.token_ids)
        if count < 2:
            yield Numbered(number, event)
            continue
        row = len(event.logprobs) // count
        for index in range(count):
            one = msgspec.structs.replace(
                event,
                token_ids=event.token_ids[index : index + 1],
                exit_depths=event.exit_depths[index : index + 1],
                logprobs=event.logprobs[index * row : (index + 1) * row],
                **(_OF_FIRST if index else {}),
                **(_OF_LAST if index < count - 1 else {}),
            )
            yield Numbered(number, one)
