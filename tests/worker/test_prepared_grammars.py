"""Grammars are compiled before their requests are admitted: no stage waits for a compiler."""

import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from depthbatch.common.grammar_host import GrammarHost
from depthbatch.common.messages import GrammarPrepared, GrammarStart
from depthbatch.worker.sampling import grammar_matchers
from depthbatch.worker.sampling.grammar_matchers import Grammars
from fakes.grammars import allowed, failures_of, matchers_of, text_of
from fakes.serving_engine import demo_host

DIGITS = text_of("regex", "[0-9]{2}")


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(demo_host(), 264, [2])
    assert grammars.ready()
    yield grammars
    grammars.close()


def prepared(grammars: Grammars, count: int) -> dict[int, str]:
    """What so many requests were told, by request."""
    told: list[GrammarPrepared] = []
    deadline = time.monotonic() + 60
    while len(told) < count and time.monotonic() < deadline:
        told += grammars.take_prepared()
        time.sleep(0.001)
    assert grammars.take_prepared() == [] and grammars.descriptors() == []
    return {each.request_id: each.failure for each in told}


def test_a_prepared_grammar_is_not_compiled_again(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the first mask was waited for in the stage that gave the first token, up to 0.25 s for every stream. Whatever
    compiles after the preparation fails here; every slot has a text of its own, also one that is admitted again."""
    for request_id in (11, 12):
        grammars.prepare(request_id, DIGITS)
    assert prepared(grammars, 2) == {11: "", 12: ""}
    monkeypatch.setattr(GrammarHost, "matcher", lambda *arguments: pytest.fail("compiled"))
    grammars.prepare(13, DIGITS)
    assert prepared(grammars, 1) == {13: ""}
    grammars.admit([1, 2], [GrammarStart(slot, 1, DIGITS) for slot in (1, 2)])
    digits = allowed(grammars, 1)
    assert len(digits) == 10 and allowed(grammars, 2) == digits
    for _ in range(2):
        grammars.note([1], digits[:1])
    assert allowed(grammars, 1) == [2] and allowed(grammars, 2) == digits
    grammars.admit([1], [GrammarStart(1, 1, DIGITS)])
    assert allowed(grammars, 1) == digits and failures_of(grammars, [1, 2]) == {}


def test_a_kept_grammar_is_no_older_for_its_use(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU time of its compiler is over with the first mask; forks for texts would use up what is left of it."""
    code = "import sys\nfrom depthbatch.common import grammar_program as program\n"
    code += "program.COMPILE_CPU_S = 0.06\nprogram.main(sys.argv[1:])"
    monkeypatch.setattr(GrammarHost, "program", staticmethod(lambda: [sys.executable, "-c", code]))
    host = demo_host()
    host.wait_ready()
    kept = host.matcher(DIGITS, b"k")
    assert kept.mask(time.monotonic() + 60)
    for _ in range(300):
        text = kept.fork()
        assert text.mask(time.monotonic() + 60)
        text.close()
    host.close()


def test_what_cannot_be_prepared_is_told(grammars: Grammars) -> None:
    """By its request, in time, and the next one is prepared."""
    grammars.prepare(1, text_of("regex", "(a"))
    grammars.prepare(2, text_of("json_schema", {"type": "integer", "multipleOf": 2147483648}))
    grammars.prepare(3, DIGITS)
    told = prepared(grammars, 3)
    assert told.pop(3) == "" and set(told) == {1, 2} and all(told.values()) and "CPU time" in told[2]


def test_preparing_is_not_waited_for_without_end(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is stopped."""
    monkeypatch.setattr(grammar_matchers, "ANSWER_WALL_S", 0.1)
    assert grammars._host._process is not None
    os.kill(grammars._host._process.pid, signal.SIGSTOP)
    try:
        grammars.prepare(1, DIGITS)
        assert "in time" in prepared(grammars, 1)[1]
    finally:
        os.kill(grammars._host._process.pid, signal.SIGCONT)


def test_only_so_many_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was used longest ago goes, process and all; one that has gone is compiled where it is needed."""
    monkeypatch.setattr(grammar_matchers, "KEPT", 2)
    texts = [text_of("regex", letter) for letter in "abc"]
    for request_id, text in enumerate(texts):
        grammars.prepare(request_id, text)
        assert prepared(grammars, 1) == {request_id: ""}
    assert list(grammars._kept) == texts[1:]
    deadline = time.monotonic() + 60
    while len(matchers_of(grammars._host)) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(matchers_of(grammars._host)) == 2
    grammars.admit([1], [GrammarStart(1, 1, texts[0])])
    assert allowed(grammars, 1) == [ord("a") - 30]


def test_a_kept_grammar_whose_process_has_died_is_compiled_again(grammars: Grammars) -> None:
    """The kernel may end any process that uses memory."""
    grammars.prepare(1, DIGITS)
    assert prepared(grammars, 1) == {1: ""}
    (child,) = matchers_of(grammars._host)
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while matchers_of(grammars._host) and time.monotonic() < deadline:
        time.sleep(0.001)
    grammars.admit([1], [GrammarStart(1, 1, DIGITS)])
    assert len(allowed(grammars, 1)) == 10 and failures_of(grammars, [1]) == {}
