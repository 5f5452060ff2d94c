"""Grammars at the edge: what cannot be compiled is refused by its field, in time, and beside the event loop."""

import asyncio
import json
import threading

import numpy as np
import pytest
from llguidance import LLParserLimits, LLTokenizer

from depthbatch.common import grammar_limits
from depthbatch.common.errors import RequestError
from depthbatch.common.messages import GrammarStart
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend import grammar
from depthbatch.frontend.grammar import GrammarChecker, grammar_text
from depthbatch.worker.sampling import grammar_matchers


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ((None, "(a", ()), "regex"),
        ((None, "[z-a]", ()), "regex"),
        (('{"type": "nonsense"}', None, ()), "json_schema"),
        (('{"$ref": "#/nowhere"}', None, ()), "json_schema"),
    ],
)
def test_what_does_not_compile_is_refused_by_its_field(
    fields: tuple[str | None, str | None, tuple[str, ...]], name: str
) -> None:
    """Syntax that only a compiler sees; the message is one line."""
    checker = GrammarChecker()
    with pytest.raises(RequestError) as caught:
        checker.check(grammar_text(*fields), name)
    assert caught.value.param == name and "\n" not in str(caught.value)
    checker.close()


def test_schemas_too_deep_for_the_library_are_refused() -> None:
    """The library's own recursion limit, which it tells by an exception."""
    schema: object = {"type": "integer"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(RequestError) as caught:
        grammar_text(json.dumps(schema), None, ())
    assert caught.value.param == "json_schema"


def test_good_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request with the same schema waits for nothing; only so many are remembered."""
    compiled: list[str] = []
    monkeypatch.setattr(grammar, "_compile", lambda text: compiled.append(text) or "")
    checker = GrammarChecker()
    for _ in range(3):
        checker.check("g", "regex")
    assert compiled == ["g"] and checker.submit("g") is None and checker.submit("") is None
    for index in range(grammar.REMEMBERED):
        checker.check(f"g{index}", "regex")
    assert checker.submit("g") is not None
    checker.close()


def test_a_compilation_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler blocks until the test lets it go: the request is refused meanwhile, by its field."""
    release = threading.Event()
    monkeypatch.setattr(grammar, "_compile", lambda text: str(release.wait(60) or ""))
    monkeypatch.setattr(grammar, "COMPILE_LIMIT_S", 0.05)
    checker = GrammarChecker()
    try:
        with pytest.raises(RequestError, match="not compiled within") as caught:
            checker.check("g", "regex")
        assert caught.value.param == "regex"
    finally:
        release.set()
        checker.close()


def test_compiling_leaves_the_event_loop_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler waits for something that only the loop does; on the loop's own thread it would wait for ever."""
    ticked = threading.Event()
    monkeypatch.setattr(grammar, "_compile", lambda text: "" if ticked.wait(60) else "the loop stood still")
    checker = GrammarChecker()

    async def prove() -> None:
        future = checker.submit("g")
        assert future is not None
        asyncio.get_running_loop().call_later(0.01, ticked.set)
        checker.settle("g", "regex", await asyncio.wrap_future(future))

    asyncio.run(prove())
    checker.close()


def test_edge_and_worker_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the first mask of a regular expression took the worker seconds; the limit that prevents it must be asked at the
    edge, where it is an error of one client. With a limit that nothing can keep, both refuse."""
    tokenizer = LLTokenizer((resolve_model_dir("demo") / "tokenizer.json").read_text(), n_vocab=264, eos_token=[2])
    digits = grammar_text(None, "[0-9]{3}", ())
    assert grammar_limits.LIMITS.initial_lexer_fuel < LLParserLimits().initial_lexer_fuel

    def first_mask() -> list[int]:
        grammars = grammar_matchers.Grammars(tokenizer, 264, [2])
        grammars.admit([1], [GrammarStart(1, 1, digits)])
        bits = np.unpackbits(grammars.masks([1]).view(np.uint8)[0], bitorder="little")
        return np.flatnonzero(bits).tolist()

    checker = GrammarChecker()
    checker.check(digits, "regex")
    assert len(first_mask()) == 10  # the digits
    monkeypatch.setattr(grammar_limits, "LIMITS", LLParserLimits(initial_lexer_fuel=1))
    assert first_mask() == [2]  # nothing but the end
    with pytest.raises(RequestError, match="regex: "):
        GrammarChecker().check(digits, "regex")
    checker.close()
