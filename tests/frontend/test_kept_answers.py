"""The file of answers that can be asked for again: what is in it, for how long, and how large it gets."""

import logging
from pathlib import Path

import pytest

from depthbatch.common.messages import FinishReason, RequestParams, Submit, TokenEvent
from depthbatch.frontend import kept_answers
from depthbatch.frontend.kept_answers import KeptAnswers, Numbered, single_tokens

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
    first.forget("a")
    assert second.find("a") is None and second.find("b") is None
    first.close()
    second.close()


def test_only_the_last_to_go_on_writes(tmp_path: Path) -> None:
    """An answer that goes on in another frontend, while the first believes that its client is there: tokens are not written
    twice."""
    first, second = KeptAnswers(tmp_path, 60), KeptAnswers(tmp_path, 60)
    old = first.begin("a", b"", [SUBMIT])
    first.add([(old, Numbered(0, event(1)))])
    answer = second.find("a")
    assert answer is not None
    new = second.go_on(answer)
    first.add([(old, Numbered(0, event(2)))])
    second.add([(new, Numbered(0, event(2)))])
    found = first.find("a")
    assert found is not None and found.handle == new
    assert [number.event.token_ids for number in found.news] == [(1,), (2,)]
    assert first._file.execute("SELECT count(*) FROM news").fetchone() == (2,)  # nothing is left that nobody can find
    first.close()
    second.close()


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
    assert caplog.text.count("cannot be written") == 1
    with caplog.at_level(logging.WARNING, "depthbatch"):
        assert kept_answers.open_answers(tmp_path / "absent", 60) is None and "cannot be made" in caplog.text
    kept.add([(0, Numbered(0, event(1)))])
    assert kept.begin("small", form, [SUBMIT]) and kept.find("small") is not None
    kept.close()


def test_news_of_several_tokens_are_taken_apart() -> None:
    """Each with its own depth and logprobs; how the request ends comes with the last, cuts with the first."""
    one, two, three = [each.event for each in single_tokens([Numbered(0, event(1, 2, 3, reason=FinishReason.LENGTH))])]
    assert (one.token_ids, one.logprobs, one.cuts, one.finish_reason) == ((1,), b"\1" * 8, b"c", None)
    assert (two.token_ids, two.exit_depths, two.logprobs, two.cuts) == ((2,), (2,), b"\2" * 8, b"")
    assert (three.token_ids, three.finish_reason) == ((3,), FinishReason.LENGTH)
