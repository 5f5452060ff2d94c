"""What a request allows its output to be (a JSON schema, a regular expression, one of some texts) as a grammar.

Grammars are llguidance's; the worker's matchers read the same text. Compiling one is checked here, in a thread of its
own and with a time limit, so that what a client sends neither stops the event loop nor reaches the worker unproved.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as OutOfTime
from typing import Any

from depthbatch.common.errors import RequestError

MAX_GRAMMAR_CHARS = 64 * 1024
COMPILE_LIMIT_S = 2.0
REMEMBERED = 64  # grammars that were compiled lately: clients send the same one with every request


def canonical_constraint(json_schema: Any, regex: Any, choice: Any) -> tuple[str | None, str | None, tuple[str, ...]]:
    """The three fields of SamplingParams, checked for type and size; a schema becomes its JSON text.

    Raises RequestError that names the field.
    """
    given = [
        name
        for name, value in (("json_schema", json_schema), ("regex", regex), ("choice", choice))
        if value is not None and value != ()
    ]
    if len(given) > 1:
        raise RequestError(f"{given[0]} and {given[1]} exclude each other", given[0])
    if regex is not None and (not isinstance(regex, str) or not regex):
        raise RequestError(f"regex must be a text that is not empty, not {repr(regex)[:80]}", "regex")
    if choice is not None and choice != ():
        texts = isinstance(choice, list | tuple) and all(isinstance(entry, str) and entry for entry in choice)
        if not texts or not choice:
            raise RequestError("choice must be a list of texts, none empty", "choice")
    schema = None if json_schema is None else _schema_text(json_schema)
    for name, size in (
        ("json_schema", len(schema or "")),
        ("regex", len(regex or "")),
        ("choice", sum(map(len, choice or ()))),
    ):
        if size > MAX_GRAMMAR_CHARS:
            raise RequestError(f"{name} has {size} characters, more than {MAX_GRAMMAR_CHARS}", name)
    return schema, regex, tuple(choice or ())


def _schema_text(schema: Any) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping | bool):
            raise RequestError("json_schema must be a JSON object", "json_schema")
        return json.dumps(value if isinstance(value, bool) else dict(value), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"json_schema is not JSON: {error}", "json_schema") from None


def grammar_text(json_schema: str | None, regex: str | None, choice: Sequence[str]) -> str:
    """The grammar of canonical fields, not proved yet; "" without a constraint. Raises RequestError."""
    if json_schema is None and regex is None and not choice:
        return ""
    from llguidance import LLMatcher  # few requests need it

    try:
        if json_schema is not None:
            # compact: with free whitespace a model may go on with spaces for ever
            return str(LLMatcher.grammar_from_json_schema(json_schema, {"whitespace_flexible": False}))
        if regex is not None:
            return str(LLMatcher.grammar_from_regex(regex))
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in choice)))
    except (ValueError, RecursionError) as error:
        name = constraint_name(json_schema, regex)
        raise RequestError(f"{name}: {_first_line(error)}", name) from None


def constraint_name(json_schema: str | None, regex: str | None) -> str:
    """Which of the fields is given."""
    return "json_schema" if json_schema is not None else "regex" if regex is not None else "choice"


class GrammarChecker:
    """Compiles grammars to see whether they can be; remembers those that could. For one thread's use."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._proved: OrderedDict[str, None] = OrderedDict()

    def submit(self, grammar: str) -> "Future[str] | None":
        """Starts compiling; the future's text is what is wrong, "" when nothing is. None: known to be right."""
        if not grammar or grammar in self._proved:
            return None
        return self._thread.submit(_compile, grammar)

    def settle(self, grammar: str, name: str, complaint: str) -> None:
        """Takes what the future gave; raises RequestError naming the field ``name``."""
        if complaint:
            raise RequestError(f"{name}: {complaint}", name)
        self._proved[grammar] = None
        if len(self._proved) > REMEMBERED:
            self._proved.popitem(last=False)

    def check(self, grammar: str, name: str) -> None:
        """Submits, waits and settles. Raises RequestError, also when the time is over."""
        future = self.submit(grammar)
        if future is None:
            return
        try:
            complaint = future.result(COMPILE_LIMIT_S)
        except OutOfTime:
            future.cancel()
            raise out_of_time(name) from None
        self.settle(grammar, name, complaint)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def out_of_time(name: str) -> RequestError:
    return RequestError(f"{name}: not compiled within {COMPILE_LIMIT_S:g} s", name)


def _compile(grammar: str) -> str:
    from llguidance import LLMatcher

    from depthbatch.common.grammar_limits import LIMITS

    return _first_line(LLMatcher.validate_grammar(grammar, None, limits=LIMITS))


def _first_line(message: object) -> str:
    """The library's message without the quotation of the grammar that follows it."""
    return (str(message).strip().splitlines() or [""])[0][:300]
