"""The grammar host: reads the vocabulary once, then forks a process for every grammar.

What clients send is parsed by native code, which may loop, take all memory or crash. Here that ends the process of one
grammar: each has limits of CPU time and memory, and its owner sees the connection close. Run as
``python -m depthbatch.common.grammar_program DESCRIPTOR TOKENIZER VOCAB_SIZE EOS_ID...``; the owner's side, and what is
said on the sockets, is in ``common.grammar_host``.
"""

import contextlib
import gc
import json
import os
import re
import resource
import signal
import socket
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from depthbatch.common.grammar_limits import (
    COMPILE_CPU_S,
    INITIAL_LEXER_FUEL,
    MEMORY_BYTES,
    STEP_CPU_S,
    TOKENS_A_STEP,
)
from depthbatch.common.text_files import read_text

MAX_MESSAGE = 1 << 20
ALLOWED, ENDED, FAILED = b"a", b"e", b"f"  # first byte of an answer: a mask follows; only the end may; why not


KNOWN_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)  # the library refuses others
_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords that hold no schema
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_WRONG_REGEX = re.compile(r"regex parse error:\n    (.*)\n    ( *)(\^+)\n+error: (.*)")


class GrammarFailure(Exception):
    """The grammar is wrong, too large, or cannot be met; the message says which, in one line."""


class Matcher:
    """One grammar and where its text stands."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        """``grammar``: as ``frontend.grammar`` writes it. Raises GrammarFailure."""
        self._eos = frozenset(tokenizer.eos_tokens)
        self._mask_bytes = 4 * -(-tokenizer.vocab_size // 32)
        limits = LLParserLimits(initial_lexer_fuel=INITIAL_LEXER_FUEL, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        self._check()

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()

    def consume(self, tokens: list[int]) -> None:
        """Takes tokens; those behind the end change nothing. Raises GrammarFailure."""
        for token in tokens:
            if self._matcher.is_stopped():
                break
            self._matcher.consume_token(token)
            self._check()

    def mask(self) -> bytes:
        """What may come next: a bit a token, whole int32. Raises GrammarFailure when nothing may."""
        mask = self._matcher.compute_bitmask()[: self._mask_bytes]  # the library's may be a word longer
        self._check()
        if not any(mask):
            raise GrammarFailure("no token of the vocabulary can go on")
        return mask

    def try_a_step(self, mask: bytes) -> None:
        """Takes the first token there is, for what only shows then. Raises GrammarFailure."""
        allowed = (8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)
        first = next((token for token in allowed if token not in self._eos), None)
        if first is not None:
            self.consume([first])
            if not self.ended:
                self.mask()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailure(_first_line(self._matcher.get_error()))


def _source(grammar: str) -> str:
    """llguidance's form of a grammar."""
    kind, _, text = grammar.partition(":")
    try:
        if kind == "json_schema":
            # compact: with free whitespace a model may go on with spaces for ever
            schema = json.dumps(_without_annotations(json.loads(text)))
            return str(
                LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False, "coerce_one_of": True})
            )
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(text))
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(entry) for entry in json.loads(text))))
    except (ValueError, RecursionError) as error:
        raise GrammarFailure(_first_line(str(error))) from None


def _without_annotations(schema: Any) -> Any:
    """A schema without the formats that the library does not know: to the standard a format is an annotation."""
    if isinstance(schema, list):
        return [_without_annotations(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in KNOWN_FORMATS:
            continue
        if key in _VALUES:
            kept[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            kept[key] = {name: _without_annotations(entry) for name, entry in value.items()}
        else:
            kept[key] = _without_annotations(value)
    return kept


def _first_line(message: str) -> str:
    """The library's message without the quotation of the grammar that follows it; of a regular expression, which part
    of it is wrong."""
    if match := _WRONG_REGEX.search(message):
        pattern, spaces, marks, reason = match.groups()
        start = len(spaces)
        part = f" at character {start + 1}, {pattern[start : start + len(marks)][:80]!r}," if marks else ""
        return f"{reason}{part} of the regular expression {pattern[:120]!r}"
    line = (message.strip().splitlines() or [""])[0]
    known = {"NoExtensionBias": "nothing matches it", "NoExtension": "nothing matches it"}
    return known.get(line, line)[:300] or "the grammar library gave up on it"


def serve(connection: socket.socket, tokenizer: LLTokenizer) -> None:
    """Answers for one grammar until its owner is gone; one that is kept (mode k) has a process forked for every text."""
    connection.setblocking(True)
    _limit_memory()
    try:
        message = connection.recv(1)
        grammar = _receive_grammar(connection)
        _limit_cpu(COMPILE_CPU_S)
        matcher = Matcher(tokenizer, grammar)
        mask = matcher.mask()
        if message == b"p":
            matcher.try_a_step(mask)
        connection.send(ALLOWED + mask)
        if message == b"k":
            _limit_cpu(0)
            connection = _text_of(connection)
            connection.send(ALLOWED + mask)
        while message := connection.recv(MAX_MESSAGE):
            tokens = list(memoryview(message).cast("i"))
            for start in range(0, len(tokens), TOKENS_A_STEP):
                _limit_cpu(STEP_CPU_S)
                matcher.consume(tokens[start : start + TOKENS_A_STEP])
            connection.send(ENDED if matcher.ended else ALLOWED + matcher.mask())
    except GrammarFailure as failure:
        connection.send(FAILED + str(failure).encode("utf-8", "replace"))


def _text_of(connection: socket.socket) -> socket.socket:
    """In a process of a text's own: its connection. The process that is kept ends here with its owner."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not data:
            os._exit(0)
        for descriptor in descriptors:
            text = socket.socket(fileno=descriptor)
            with contextlib.suppress(OSError):
                if os.fork() == 0:
                    connection.close()
                    return text
            text.close()


def _receive_grammar(connection: socket.socket) -> str:
    parts = []
    while part := connection.recv(MAX_MESSAGE):
        parts.append(part[1:])
        if part[:1] == b".":
            break
    return b"".join(parts).decode()


def _limit_cpu(seconds: float) -> None:
    """The default action of SIGPROF ends the process, whatever native code it is in."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(arguments: list[str]) -> None:
    control = socket.socket(fileno=int(arguments[0]))
    try:
        tokenizer = LLTokenizer(
            read_text(arguments[1]), n_vocab=int(arguments[2]), eos_token=list(map(int, arguments[3:]))
        )
    except Exception as error:  # whatever the library makes of a tokenizer that it does not know
        control.send(FAILED + _first_line(str(error)).encode("utf-8", "replace"))
        return
    control.send(ALLOWED)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a matcher ended
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            with contextlib.suppress(OSError):  # no process to be had: the owner sees the connection close
                if os.fork() == 0:
                    control.close()
                    _run_child(connection, tokenizer)
            connection.close()


def _run_child(connection: socket.socket, tokenizer: LLTokenizer) -> None:
    try:
        serve(connection, tokenizer)
    finally:  # also of a panic, which is a BaseException: nothing may go on as a second host
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
