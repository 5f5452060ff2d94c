"""What a request allows its output to be (a JSON schema, a regular expression, one of some texts) as a grammar.

A grammar travels as text, ``json_schema:..``, ``regex:..`` or ``choice:[..]``, that only processes of the grammar host
parse. Before a request is submitted such a process, under the limits that hold beside the worker, compiles its grammar
and takes a step: what cannot be compiled or met is the error of one client, and nobody else waits for it.
"""

import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from depthbatch.common.errors import EngineDeadError, OverloadedError, RequestError
from depthbatch.common.grammar_host import GrammarError, GrammarHost
from depthbatch.common.grammar_limits import COMPILE_WALL_S
from depthbatch.common.messages import EngineInfo
from depthbatch.common.model_dir import resolve_model_dir

MAX_GRAMMAR_CHARS = 64 * 1024
REMEMBERED = 64  # grammars that were compiled lately: clients send the same one with every request
MAX_WAITING = 32  # grammars of one client that wait to be compiled; one after another, each with its limits


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
    for name, entries in (("regex", [regex or ""]), ("choice", choice or ())):
        if not all(map(_is_unicode, entries)):
            raise RequestError(f"{name} holds half of a surrogate pair", name)
    return schema, regex, tuple(choice or ())


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _schema_text(schema: Any) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping | bool):
            raise RequestError("json_schema must be a JSON object", "json_schema")
        return json.dumps(value if isinstance(value, bool) else dict(value), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"json_schema is not JSON: {error}", "json_schema") from None


def grammar_text(json_schema: str | None, regex: str | None, choice: Sequence[str]) -> str:
    """The grammar of canonical fields, not proved yet; "" without a constraint."""
    if json_schema is None and regex is None and not choice:
        return ""
    text = json_schema if json_schema is not None else regex if regex is not None else json.dumps(list(choice))
    return f"{constraint_name(json_schema, regex)}:{text}"


def constraint_name(json_schema: str | None, regex: str | None) -> str:
    """Which of the fields is given."""
    return "json_schema" if json_schema is not None else "regex" if regex is not None else "choice"


def refusal(grammar: str, reason: object) -> RequestError:
    """The error of a request whose grammar cannot be followed: names the field that the grammar was given in."""
    name = grammar.partition(":")[0]
    return RequestError(f"{name}: {reason}", name)


class Proof(NamedTuple):
    """A grammar that waits to be compiled, and who hears of it."""

    grammar: str
    done: Future[None]


class GrammarChecker:
    """Has grammars compiled to see whether they can be; remembers those that could. Any thread may submit.

    Clients take turns, so that no one's grammars keep another's waiting. ``make_host`` is called with the first grammar:
    few engines see one.
    """

    def __init__(self, make_host: Callable[[], GrammarHost]) -> None:
        self._make_host = make_host
        self._host: GrammarHost | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, deque[Proof]] = OrderedDict()  # by client, whose turn it is first
        self._closed = False
        self._proved: OrderedDict[str, None] = OrderedDict()

    def submit(self, grammar: str, client: int = 0) -> "Future[None] | None":
        """Starts the proof; the future, which may be another request's, too, raises RequestError naming the field. None:
        known to be right. Raises OverloadedError when too many of the client's wait."""
        with self._lock:
            if not grammar or grammar in self._proved:
                return None
            waiting = self._waiting.get(client, ())
            for proof in waiting:
                if proof.grammar == grammar:
                    return proof.done
            if len(waiting) >= MAX_WAITING:
                raise OverloadedError(f"{MAX_WAITING} grammars are waiting to be compiled")
            proof = Proof(grammar, Future())
            self._thread.submit(self._prove_next)
            self._waiting.setdefault(client, deque()).append(proof)
            return proof.done

    def check(self, grammar: str) -> None:
        """Submits and waits. Raises what they raise."""
        future = self.submit(grammar)
        if future is not None:
            future.result()

    def close(self) -> None:
        """What waits is refused, what runs ends within its limits, and the host with it. Doing it twice is fine."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._close_host)
            self._thread.shutdown(wait=False)

    def _prove_next(self) -> None:
        """In the thread, which owns the host: of the client whose turn it is, what has waited longest."""
        with self._lock:
            client, waiting = self._waiting.popitem(last=False)
            grammar, done = waiting.popleft()
            if waiting:
                self._waiting[client] = waiting
        try:
            self._prove(grammar)
        except BaseException as error:  # also a panic: whoever waits is told
            done.set_exception(error)
        else:
            done.set_result(None)

    def _prove(self, grammar: str) -> None:
        if self._closed:
            raise EngineDeadError("the engine is closed")
        if grammar in self._proved:  # while it waited
            return
        if self._host is None:
            self._host = self._make_host()
        try:
            matcher = self._host.ready_matcher(grammar)
            try:
                matcher.mask(time.monotonic() + COMPILE_WALL_S)
            finally:
                matcher.close()
        except GrammarError as error:
            raise refusal(grammar, error) from None
        with self._lock:
            self._proved[grammar] = None
            if len(self._proved) > REMEMBERED:
                self._proved.popitem(last=False)

    def _close_host(self) -> None:
        if self._host is not None:
            self._host.close()


def host_of(model: str, info: EngineInfo) -> GrammarHost:
    """The grammar host for an engine's model."""
    return GrammarHost(resolve_model_dir(model) / "tokenizer.json", info.vocab_size, info.eos_token_ids)
