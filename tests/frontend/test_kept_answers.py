"""The file of answers that can be asked for again: what is in it, for how long, and how large it gets."""

import logging
import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from depthbatch.common.messages import FinishReason, RequestParams, Submit, TokenEvent
from depthbatch.frontend import kept_answers
from depthbatch.frontend.kept_answers import KeptAnswers, Numbered, open_answers, single_tokens

SUBMIT = Submit(7, b"\1\0\0\0", RequestParams(max_tokens=9, seed=2**64 - 1))


def event(*tokens: int, reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(
        7, tokens, (2,) * len(tokens), reason, logprobs=b"".join(bytes([t] * 8) for t in tokens), cuts=b"c"
    )


def test_what_is_kept_outlives_its_writer(tmp_path: Path) -> None:
    """A second opening, as of a frontend that is started again, reads what the first wrote, in order; a later answer of a
    name takes the place of the former one; what is forgotten is gone."""
    first = KeptAnswers(tmp_path, 60)
    handle = first.begin("a", b"form", [SUBMIT, SUBMIT])
    first.add([(handle, Numbered(0, event(1))), (handle, Numbered(1, event(2, 3)))])
    first.add([(handle, Numbered(0, event(reason=FinishReason.STOP)))])
    second = KeptAnswers(tmp_path, 60)
    found = second.find("a")
    assert found is not None and found.submits == (SUBMIT, SUBMIT) and found.form == b"form"
    assert found.news == [(0, event(1)), (1, event(2, 3)), (0, event(reason=FinishReason.STOP))]
    second.begin("a", b"new", [SUBMIT])
    first.add([(handle, Numbered(0, event(9)))])  # of the former one
    found = first.find("a")
    assert found is not None and found.form == b"new" and not found.news
    first.drop(found.handle)
    assert second.find("a") is None and second.find("b") is None
    first.close()
    second.close()


def test_only_the_last_to_go_on_writes(tmp_path: Path) -> None:
    """Bug: a stream that was resumed at another frontend went on in the first one, too, whose tokens were dropped in silence.
    A frontend learns with its next tokens, or without any, that others have its answers, and only one of those that want
    to go on gets an answer; what a former one drops is not the later one's. A name that is used again ends nobody."""
    files = [KeptAnswers(tmp_path, 60) for _ in range(3)]
    first, second, third = files
    old, quiet, named = (first.begin(name, b"", [SUBMIT]) for name in ("a", "quiet", "again"))
    assert first.add([(old, Numbered(0, event(1)))]) == []
    taken = second.go_on(old)
    assert taken is not None and taken.handle != old and taken.news == [(0, event(1))]
    assert second.go_on(old) is None and third.go_on(old) is None
    last = third.go_on(taken.handle)
    assert last is not None and third.go_on(quiet) is not None
    third.begin("again", b"", [SUBMIT])
    assert sorted(first.add((handle, Numbered(0, event(2))) for handle in (old, old, named))) == [old]
    assert first.add([(old, Numbered(0, event(2)))]) == []  # told once
    assert second.add([(taken.handle, Numbered(0, event(2)))]) == [taken.handle]
    assert third.add([(last.handle, Numbered(0, event(2)))]) == []
    assert first.sweep() == [quiet] and third.sweep() == []
    first.drop(old)
    first.leave(old)
    found = first.find("a")
    assert found is not None and found.handle == last.handle
    assert [number.event.token_ids for number in found.news] == [(1,), (2,)]
    assert first._file.execute("SELECT count(*) FROM news").fetchone() == (2,)  # nothing is left that nobody can find
    for file in files:
        file.close()


def test_an_answer_that_rests_can_be_aborted(tmp_path: Path) -> None:
    """What has not ended of it ends; whoever still writes it learns that; an answer that has ended stays as it is."""
    first, second = KeptAnswers(tmp_path, 60), KeptAnswers(tmp_path, 60)
    handle = first.begin("a", b"", [SUBMIT, SUBMIT])
    first.add([(handle, Numbered(1, event(2, reason=FinishReason.STOP)))])
    assert second.abort("a") and not second.abort("a") and not second.abort("b")
    found = first.find("a")
    assert found is not None and not found.unfinished
    reasons = [(number, told.finish_reason) for number, told in found.news]
    assert reasons == [(1, FinishReason.STOP), (0, FinishReason.ABORT)]
    assert first.add([(handle, Numbered(0, event(3)))]) == [handle]
    first.close()
    second.close()


def test_frontends_that_start_at_the_same_moment_all_keep_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: while one switched the file to WAL, SQLite refused the others, which then kept nothing for all of their lives. It
    is tried again, for so long."""
    monkeypatch.setattr(kept_answers, "WAIT_S", 0.0)
    with sqlite3.connect(tmp_path / kept_answers.FILE, isolation_level=None, check_same_thread=False) as other:
        other.execute("BEGIN EXCLUSIVE")
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "depthbatch"):
            patch.setattr(kept_answers, "OPEN_S", 0.1)
            assert open_answers(tmp_path, 60) is None and "locked" in caplog.text
        ending = threading.Timer(0.2, lambda: other.execute("COMMIT"))
        ending.start()
        kept = open_answers(tmp_path, 60)
        ending.join()
    other.close()
    assert kept is not None and kept.begin("a", b"", [SUBMIT])
    kept.close()


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Bug: the file, which holds prompts, had the mode that the umask left: only the run directory kept others out."""
    former = os.umask(0)
    try:
        kept = KeptAnswers(tmp_path, 60)
        kept.begin("a", b"", [SUBMIT])
    finally:
        os.umask(former)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 3 and set(modes.values()) == {0o600}, modes
    kept.close()


def test_a_file_that_cannot_be_read_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: an error of the disk while answers were looked for ended the frontend. There is nothing, and the log says why."""
    kept = KeptAnswers(tmp_path, 60)
    handle = kept.begin("a", b"", [SUBMIT])
    kept._file.execute("DROP TABLE answers")
    with caplog.at_level(logging.WARNING, "depthbatch"):
        assert kept.add([(handle, Numbered(0, event(1)))]) == [] and kept.sweep() == []
    assert kept.find("a") is None and kept.go_on(handle) is None and not kept.abort("a")
    assert kept.begin("a", b"", [SUBMIT]) == 0
    assert caplog.text.count("cannot be used") == 1
    kept.close()


def test_answers_are_kept_for_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time runs from the last news; while an answer runs it does not run at all, also in the eyes of another
    frontend."""
    now_s = 1e9
    monkeypatch.setattr(kept_answers.time, "time", lambda: now_s)
    kept, other = KeptAnswers(tmp_path, 60), KeptAnswers(tmp_path, 60)
    handle = kept.begin("a", b"", [SUBMIT])
    for _ in range(20):
        now_s += 20
        kept.sweep()
        other.sweep()
    assert other.find("a") is not None
    kept.leave(handle)
    now_s += 59
    kept.sweep()
    assert other.find("a") is not None
    now_s += 2
    assert other.find("a") is None and kept.find("a") is None
    kept.close()
    other.close()


def test_the_file_has_a_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest answers make room; one that is larger than the file is not kept, which the log says once, and harms nobody."""
    monkeypatch.setattr(kept_answers, "MAX_BYTES", 256 << 10)
    kept = KeptAnswers(tmp_path, 60)
    form = bytes(8 << 10)
    for number in range(100):
        assert kept.begin(f"a{number}", form, [SUBMIT])
    assert kept.find("a99") is not None and kept.find("a0") is None
    assert (tmp_path / kept_answers.FILE).stat().st_size <= 256 << 10
    with caplog.at_level(logging.WARNING, "depthbatch"):
        assert kept.begin("large", bytes(1 << 20), [SUBMIT]) == kept.begin("large", bytes(1 << 20), [SUBMIT]) == 0
    assert caplog.text.count("cannot be used") == 1
    with caplog.at_level(logging.WARNING, "depthbatch"):
        assert open_answers(tmp_path / "absent", 60) is None and "cannot be made" in caplog.text
    kept.add([(0, Numbered(0, event(1)))])
    assert kept.begin("small", form, [SUBMIT]) and kept.find("small") is not None
    kept.close()


def test_news_of_several_tokens_are_taken_apart() -> None:
    """Bug: what an answer had found in the prefix cache was not told when it was resumed: the fields were listed one by one.
    Each token has its own depth and logprobs; how the request ends comes with the last, the rest with the first."""
    told = TokenEvent(
        *(7, (1, 2, 3), (4, 5, 6), FinishReason.ERROR, 3, b"abc", b"prompt", b"cuts"),
        failure="why",
        kills_worker=True,
        accepted_drafts=2,
        rejected_drafts=1,
        cached_tokens=9,
    )
    assert all(getattr(told, name) != getattr(TokenEvent(7, (), ()), name) for name in TokenEvent.__struct_fields__[1:])
    one, two, three = [each.event for each in single_tokens([Numbered(0, told)])]
    assert one == TokenEvent(
        *(7, (1,), (4,)),
        logprobs=b"a",
        prompt_logprobs=b"prompt",
        cuts=b"cuts",
        accepted_drafts=2,
        rejected_drafts=1,
        cached_tokens=9,
    )
    assert two == TokenEvent(7, (2,), (5,), logprobs=b"b")
    assert three == TokenEvent(7, (3,), (6,), FinishReason.ERROR, 3, b"c", failure="why", kills_worker=True)
