"""Grammars at the edge: what cannot be compiled or met is refused by its field, in time, beside the event loop, and in a
process whose end is nobody else's."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from depthbatch.common import grammar_program
from depthbatch.common.errors import EngineDeadError, OverloadedError, RequestError
from depthbatch.common.grammar_host import GrammarError
from depthbatch.common.messages import GrammarStart
from depthbatch.frontend import grammar
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.grammar import GrammarChecker
from depthbatch.frontend.params import SamplingParams
from depthbatch.worker.sampling.grammar_matchers import Grammars
from fakes.grammars import allowed, failures_of, matchers_of, text_of
from fakes.serving_engine import demo_host

EMOJI = "\N{GRINNING FACE}"


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(demo_host)
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(demo_host(), 264, [2])
    assert grammars.ready()
    yield grammars
    grammars.close()


HOSTILE: dict[str, tuple[str, Any]] = {
    "a smallest integer": ("json_schema", {"type": "integer", "const": -(1 << 63)}),
    "a smallest integer in an enum": ("json_schema", {"enum": [1, -(1 << 63)]}),
    "characters of four bytes": ("json_schema", {"minLength": EMOJI * 50}),
    "characters of three bytes": ("json_schema", {"maxLength": "\N{HIRAGANA LETTER A}" * 50}),
    "a large multiple": ("json_schema", {"type": "integer", "multipleOf": 1000003}),
    "a larger multiple": ("json_schema", {"type": "integer", "multipleOf": 2147483648}),
    "the largest multiple": ("json_schema", {"type": "integer", "multipleOf": (1 << 63) - 1}),
    "too many of many": ("regex", "(a{1000}){1000}"),
    "too many choices": ("regex", "(a?){3000}a{3000}"),
    "only itself": ("json_schema", {"$ref": "#"}),
    "itself for ever": (
        "json_schema",
        {
            "type": "object",
            "properties": {"a": {"$ref": "#"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    ),
    "no character at all": ("regex", r"[^\s\S]"),
    "one, then no character": ("regex", r"a[^\s\S]"),
    "one of nothing": ("json_schema", {"enum": []}),
    "an empty range": ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}),
    "nothing": ("json_schema", False),
    "no schema": ("json_schema", {"type": "nonsense"}),
    "a reference to nowhere": ("json_schema", {"$ref": "#/nowhere"}),
    "half a group": ("regex", "(a"),
    "a range backwards": ("regex", "[z-a]"),
    "a control character": ("regex", "\0("),
    "a schema too deep for the library": (
        "json_schema",
        '{"type": "object", "properties": {"a": ' * 300 + '{"type": "integer"}' + "}}" * 300,
    ),
    "too many of many in a string": ("json_schema", {"type": "string", "pattern": "^(a{1000}){1000}$"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_clients_grammar_is_its_own_trouble(checker: GrammarChecker, name: str) -> None:
    """Bugs: a smallest integer ended the frontend by SIGSEGV; characters of four bytes ended it by a panic; a large multiple
    stopped all streams for 19 s, a larger one for ever; what the library gave up on, or nothing matches, was answered
    with an empty text and "stop". Each is refused by its field in one line, within seconds, and the next grammar is
    compiled."""
    field, value = HOSTILE[name]
    start = time.monotonic()
    with pytest.raises(RequestError) as caught:
        checker.check(text_of(field, value))
    assert caught.value.param == field and str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert time.monotonic() - start < 30
    checker.check(text_of("regex", f"next after {len(name)}"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", "()"),  # the empty text is a text
        ("regex", "[0-9]{3}"),
        ("choice", ["yes", "no", 'a "quoted"\nline', EMOJI]),
        ("json_schema", {"type": "integer", "multipleOf": 10}),
        ("json_schema", {"type": "number", "multipleOf": 0.0000001}),
        ("json_schema", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": []}),
        ("json_schema", {"items": {"type": "string", "format": "uri-template"}}),
        ("json_schema", {"properties": {"const": {"format": "password"}}, "$defs": {"enum": {"format": "iri"}}}),
        ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        (
            "json_schema",
            {
                "type": "object",
                "properties": {
                    f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 30 + 1}}}$"}
                    if i % 2
                    else {"enum": ["a", i]}
                    for i in range(300)
                },
                "required": [f"p{i}" for i in range(300)],
            },
        ),
    ],
)
def test_good_grammars_pass(checker: GrammarChecker, field: str, value: Any) -> None:
    """The limits are no hindrance to what people send."""
    checker.check(text_of(field, value))
    assert checker.submit(text_of(field, value)) is None


@pytest.mark.parametrize(
    ("schema", "text", "follows"),
    [
        ({"type": "string", "format": "uri-template"}, '"{', True),
        ({"properties": {"default": {"format": "no-such", "type": "integer"}}}, '{"default":1', True),
        ({"$ref": "#/own/a", "own": {"a": {"type": "string", "format": "no-such"}}}, '"x', True),
        ({"const": {"format": "no-such"}}, '{"format":"n', True),
        ({"const": {"format": "no-such"}}, "{}", False),
        ({"type": "string", "format": "date"}, '"2026-1', True),
        ({"type": "string", "format": "date"}, '"x', False),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1.5", True),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "t", False),
    ],
)
def test_formats_are_annotations_and_one_of_is_taken(grammars: Grammars, schema: Any, text: str, follows: bool) -> None:
    """Bug: a format that the library does not know was refused, though the standard calls formats annotations, and so was
    oneOf whose branches overlap. Formats that it knows still hold, and a value that looks like a format is a value."""
    grammars.admit([7], [GrammarStart(7, 1, text_of("json_schema", schema))])
    taken = 0
    for token in (ord(character) - 30 for character in text):  # the demo's tokens of what can be printed
        if token not in allowed(grammars, 7):
            break
        grammars.note([7], [token])
        taken += 1
    assert failures_of(grammars, [7]) == {}
    assert (taken == len(text)) == follows


def test_known_formats_are_those_of_the_library(grammars: Grammars) -> None:
    """A format that it did not know any more would be refused again."""
    for known in grammar_program.KNOWN_FORMATS:
        grammars.admit([7], [GrammarStart(7, 1, text_of("json_schema", {"type": "string", "format": known}))])
        assert allowed(grammars, 7) == [4], known  # a quotation mark
        assert failures_of(grammars, [7]) == {}, known


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("regex", "ab(c", "unclosed group at character 3, '(', of the regular expression 'ab(c'"),
        ("regex", "a|[z-b]x", "invalid character class range, the start must be <= the end at character 4, 'z-b', "),
        (
            "json_schema",
            {"properties": {"a": {"type": "string", "pattern": "("}}},
            "unclosed group at character 1, '('",
        ),
        ("json_schema", {"not": {"type": "integer"}}, '["not"]'),
    ],
)
def test_an_error_names_the_part_at_fault(checker: GrammarChecker, field: str, value: Any, reason: str) -> None:
    """Bug: of "(" users got "regex parse error:" and no more, of a schema not which pattern."""
    with pytest.raises(RequestError) as caught:
        checker.check(text_of(field, value))
    assert reason in str(caught.value) and str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize("field", ["regex", "choice"])
def test_half_a_surrogate_pair_is_refused(field: str) -> None:
    """Bug: text that has no UTF-8 cannot leave the process; it failed as an error of the engine."""
    with pytest.raises(RequestError, match="surrogate") as caught:
        text_of(field, "\ud800" if field == "regex" else ["a", "\udfff"])
    assert caught.value.param == field


class Held:
    """A host whose matchers answer when the test lets them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.release = threading.Event()

    def ready_matcher(self, text: str) -> "Held":
        self.asked.append(text)
        return self

    def mask(self, deadline_s: float) -> None:
        if not self.release.wait(60):
            raise GrammarError("the test has not let go")

    def close(self) -> None:
        pass


def test_good_grammars_are_compiled_once() -> None:
    """The second request with the same schema waits for nothing; only so many are remembered."""
    held = Held()
    held.release.set()
    checker = GrammarChecker(lambda: held)  # type: ignore[arg-type, return-value]
    for _ in range(3):
        checker.check("regex:g")
    assert held.asked == ["regex:g"] and checker.submit("regex:g") is None and checker.submit("") is None
    for index in range(grammar.REMEMBERED):
        checker.check(f"regex:g{index}")
    assert checker.submit("regex:g") is not None
    checker.close()
    checker.close()


def test_only_so_many_of_a_client_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's slow grammars take no more than the places that one has: its next is refused at once, with the reason,
    and served once they are through. What waits when the engine closes is told so."""
    monkeypatch.setattr(grammar, "MAX_WAITING", 2)
    held = Held()
    checker = GrammarChecker(lambda: held)  # type: ignore[arg-type, return-value]
    futures = [hold(held, checker), checker.submit("regex:b"), checker.submit("regex:c")]
    assert checker.submit("regex:b") is futures[1]  # waits already
    with pytest.raises(OverloadedError, match="2 grammars are waiting"):
        checker.submit("regex:d")
    assert checker.submit("regex:d", client=7) is not None
    held.release.set()
    assert [future and future.result(60) for future in futures] == [None] * 3
    checker.check("regex:d")
    held.release.clear()
    slow, late = hold(held, checker, "regex:e"), checker.submit("regex:f")
    checker.close()
    held.release.set()
    assert slow is not None and late is not None
    assert isinstance(late.exception(60), EngineDeadError) and held.asked[-1] == "regex:e"


def hold(held: Held, checker: GrammarChecker, text: str = "regex:a") -> Any:
    """Submits a grammar, and waits until it is being compiled."""
    future = checker.submit(text)
    while text not in held.asked:
        time.sleep(0.001)
    return future


def test_clients_take_turns() -> None:
    """Bug: one API key's grammars stood before everybody else's. Whoever comes later with one is the next but one."""
    held = Held()
    checker = GrammarChecker(lambda: held)  # type: ignore[arg-type, return-value]
    futures = [hold(held, checker)]
    futures += [checker.submit(f"regex:1{index}", client=1) for index in range(3)]
    futures += [checker.submit(f"regex:2{index}", client=2) for index in range(2)]
    held.release.set()
    assert [future.result(60) for future in futures if future] == [None] * 6
    assert held.asked[1:] == ["regex:10", "regex:20", "regex:11", "regex:21", "regex:12"]
    checker.close()


def test_a_client_that_leaves_takes_nobodys_proof_along() -> None:
    """Requests with the same new grammar wait for one proof; cancelling one of them left the others without an answer."""
    held = Held()
    engine: Any = SimpleNamespace(
        _grammars=GrammarChecker(lambda: held),  # type: ignore[arg-type, return-value]
        _client=SimpleNamespace(check=lambda token_ids, params: SimpleNamespace(grammar="regex:g")),
    )

    async def two() -> None:
        hold(held, engine._grammars)
        params = SamplingParams(regex="g")
        first, second = (asyncio.ensure_future(AsyncEngine._prove_grammar(engine, [], params)) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)
        held.release.set()
        await second

    asyncio.run(two())
    assert held.asked == ["regex:a", "regex:g"]
    engine._grammars.close()


def test_compiling_leaves_the_event_loop_free() -> None:
    """The compiler waits for something that only the loop does; on the loop's own thread it would wait for ever."""
    held = Held()
    checker = GrammarChecker(lambda: held)  # type: ignore[arg-type, return-value]

    async def prove() -> None:
        future = checker.submit("regex:g")
        assert future is not None
        asyncio.get_running_loop().call_later(0.01, held.release.set)
        await asyncio.wrap_future(future)

    asyncio.run(prove())
    checker.close()


def test_a_host_that_dies_is_started_again(checker: GrammarChecker) -> None:
    """The kernel may end any process that uses memory: the grammar after is compiled by another host."""
    checker.check(text_of("regex", "before"))
    assert checker._host is not None and checker._host._process is not None
    former = checker._host._process
    former.kill()
    former.wait()
    checker.check(text_of("regex", "after"))
    assert checker._host._process is not former


# --- beside the worker, which is told what the edge has let pass, and of what fails later


def test_a_grammar_that_fails_later_fails_alone(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a grammar that gave up in the worker ended its text with "stop", and one that looped or crashed there would have
    ended the worker. Here slot 1's takes more than its CPU time, slot 2's crashes; slot 3 gets its digits."""
    monkeypatch.setattr("depthbatch.worker.sampling.grammar_matchers.ANSWER_WALL_S", 30.0)
    grammars.admit(
        [1, 2, 3],
        [
            GrammarStart(1, 1, text_of(*HOSTILE["a larger multiple"])),
            GrammarStart(2, 1, text_of(*HOSTILE["a smallest integer"])),
            GrammarStart(3, 1, text_of("regex", "[0-9]{3}")),
        ],
    )
    start = time.monotonic()
    assert allowed(grammars, 3) and len(allowed(grammars, 3)) == 10
    assert allowed(grammars, 1) == [2] and allowed(grammars, 2) == [2]
    assert time.monotonic() - start < 30
    failures = failures_of(grammars, [1, 2, 3])
    assert set(failures) == {1, 2} and all("CPU time" in reason for reason in failures.values())
    assert failures_of(grammars, [1, 2, 3]) == {} and allowed(grammars, 1) == [2]
    grammars.note([1, 2, 3], [2, 2, allowed(grammars, 3)[0]])  # what was launched before the failure was known
    assert len(allowed(grammars, 3)) == 10 and failures_of(grammars, [1, 2, 3]) == {}
    grammars.admit([1], [GrammarStart(1, 1, text_of("regex", "x"))])
    assert len(allowed(grammars, 1)) == 1 and allowed(grammars, 1) != [2]


def test_a_mask_is_not_waited_for_without_end(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher that does not answer, here because it is stopped, costs the stage its limit and one request its answer."""
    monkeypatch.setattr("depthbatch.worker.sampling.grammar_matchers.ANSWER_WALL_S", 0.2)
    grammars.admit([4, 5], [GrammarStart(slot, 1, text_of("regex", "[0-9]{3}")) for slot in (4, 5)])
    assert len(allowed(grammars, 5)) == 10
    first = min(matchers_of(grammars._host)[-2:])  # of slot 4
    os.kill(first, signal.SIGSTOP)
    try:
        token = allowed(grammars, 5)[0]
        grammars.note([4, 5], [token, token])
        start = time.monotonic()
        assert allowed(grammars, 4) == [2] and len(allowed(grammars, 5)) == 10
        assert time.monotonic() - start < 30
        assert "in time" in failures_of(grammars, [4, 5])[4]
    finally:
        os.kill(first, signal.SIGKILL)


def test_edge_and_worker_have_one_limit(checker: GrammarChecker, grammars: Grammars) -> None:
    """Bug: the first mask of a regular expression took the worker seconds; the limit that prevents it must be asked at the
    edge, where it is an error of one client. What the edge lets pass the worker's matcher takes, and the other way."""
    for regex, good in (("[0-9]{3}", True), ("(a?){3000}a{3000}", False)):
        text = text_of("regex", regex)
        grammars.admit([6], [GrammarStart(6, 1, text)])
        masked = allowed(grammars, 6)
        grammars.note([6], masked[:1])
        allowed(grammars, 6)
        assert (failures_of(grammars, [6]) == {}) == good
        future = checker.submit(text)
        if good:
            assert future is None or future.result(60) is None
        else:
            assert future is not None and isinstance(future.exception(60), RequestError)
