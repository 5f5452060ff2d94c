"""The model's own chat template: conversation in, prompt text out. A sandboxed jinja environment, as templates expect.

Templates come with the model, never from a client; what they render is what transformers renders. Knows nothing of
tokens but the texts of those that must not come from a message.
"""

import contextlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from depthbatch.common.errors import RequestError

PRIVATE_USE = range(0xE000, 0xF8FF)  # where stand-ins come from


class Rendered(NamedTuple):
    """A prompt. ``quotes`` finds the stretches between its control tokens that hold a spelling of one which came from a
    message; it raises RequestError where the template does not let that be told."""

    text: str
    quotes: Callable[[], list[tuple[int, int]]]


class Generation(Extension):
    """{% generation %}: what training learns. Here it is its body, in a scope of its own as in transformers."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class ChatTemplate:
    """A compiled template. ``special_tokens``: bos_token, eos_token and the like, which templates refer to.
    ``control``: texts of tokens that a message cannot bring in."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any], control: Collection[str] = ()) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._template = environment.from_string(source)
        self._source = source
        self._special_tokens = dict(special_tokens)
        texts = sorted((text for text in control if text), key=len, reverse=True)  # the longest wins, as in a tokenizer
        self._control = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._char_sets = [{text[place % len(text)] for text in texts} for place in (0, 1, -1, -2)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> Rendered:
        """The prompt of a conversation. ``continue_final_message``: it ends with the last message's content, which the
        model goes on writing. Raises RequestError when the template refuses the messages.
        """
        variables = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt, **variables}
        end = None
        marker, end_marker = self._stand_ins(messages)
        if continue_final_message:
            end = end_marker
            if not messages or not isinstance(messages[-1].get("content"), str):
                raise RequestError("messages: the last one has no content to continue", "messages")
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + end}]
        text = self._text(messages, end, variables)
        return Rendered(text, lambda: self._quotes(text, messages, end, variables, marker))

    def _text(self, messages: Sequence[Mapping[str, Any]], end: str | None, variables: Mapping[str, Any]) -> str:
        """``end``: the character before whose last place the text ends."""
        try:
            text = self._template.render(messages=messages, **(self._special_tokens | dict(variables)))
        except RequestError:
            raise
        except Exception as error:  # whatever a template does with what it did not expect
            raise RequestError(f"messages do not fit the chat template: {error}", "messages") from None
        if end is None:
            return text
        before, found, _ = text.rpartition(end)
        if not found:
            raise RequestError("messages: the chat template leaves out what is to be continued", "messages")
        return before

    def _stand_ins(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Two characters that neither the template nor a message holds."""
        used = set(self._source).union(*(str(value) for message in messages for value in message.values()))
        free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
        try:
            return next(free), next(free)
        except StopIteration:
            raise RequestError("messages: every private-use character is taken", "messages") from None

    def _quotes(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        end: str | None,
        variables: Mapping[str, Any],
        marker: str,
    ) -> list[tuple[int, int]]:
        """The messages are rendered again with one character of every control token replaced wherever they hold it. What
        is replaced in the text came from a message; that the rest is the same shows that the template did not look."""
        spans = [found.span() for found in self._control.finditer(text)] if self._control is not None else []
        if not spans:
            return []
        for chars in self._char_sets:
            table = str.maketrans(dict.fromkeys(chars, marker))
            marked = [_translated(message, table) for message in messages]
            if marked == list(messages):
                return []
            with contextlib.suppress(RequestError):
                other = self._text(marked, end, variables)
                if _same_but(text, other, marker):
                    return _between(spans, [marker in other[start:stop] for start, stop in spans], len(text))
        raise RequestError("messages: this chat template takes apart the control tokens that they quote", "messages")


def _between(spans: Sequence[tuple[int, int]], quoted: Sequence[bool], length: int) -> list[tuple[int, int]]:
    """Stretches from one span that is not ``quoted`` to the next, where one that is lies in between."""
    regions, start, holds = [], 0, False
    for span, is_quoted in [*zip(spans, quoted, strict=True), ((length, length), False)]:
        if is_quoted:
            holds = True
            continue
        if holds:
            regions.append((start, span[0]))
        start, holds = span[1], False
    return regions


def _same_but(text: str, other: str, marker: str) -> bool:
    """Whether ``other`` is the text with some characters replaced by ``marker``."""
    if len(text) != len(other):
        return False
    chars, others = (np.frombuffer(string.encode("utf-32-le", "surrogatepass"), "<u4") for string in (text, other))
    return bool(np.all((chars == others) | (others == ord(marker))))


def _translated(value: Any, table: Mapping[int, str]) -> Any:
    """The same message with every text in it translated, but that of its role, which templates compare."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {key: item if key == "role" else _translated(item, table) for key, item in value.items()}
    if isinstance(value, list):
        return [_translated(item, table) for item in value]
    return value


def chosen_template(templates: Any) -> str | None:
    """The chat template of a tokenizer's configuration: one text, or several by name, of which "default" counts."""
    if isinstance(templates, list):
        templates = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
    if isinstance(templates, dict):
        templates = templates.get("default")
    return templates if isinstance(templates, str) else None


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"messages do not fit the chat template: {message}", "messages")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
