"""Text from token ids as they come: never splits, repeats or loses a character; holds stop strings back.

Two detokenizers, one contract: ``push`` returns text that is final, ``finish`` the rest, and all pieces joined equal
the decoding of the whole sequence at once. Neither knows of requests; StopChecker knows only text.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One sequence's decoder."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that they make final."""
        ...

    def finish(self) -> str:
        """The text still held, once no more ids will come."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings: an incremental UTF-8 decoder, exact and O(1) a token."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._rest = b""  # the start of a character

    def push(self, token_ids: Sequence[int]) -> str:
        data = self._rest
        for token in token_ids:
            data += self._token_bytes(token)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window twice, with and without the newest ids.

    The window starts at a point whose text was final, so what the tokenizer does at the start of a sequence (a
    dropped space, say) cancels out; text that ends in an incomplete character is held until the next id completes it.
    Tokenizers that fall back to bytes replace a whole run of bytes when one is wrong; what was right before it and has
    been shown stays shown.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int] = ()) -> None:
        """``after``: ids whose text is out already; without any the text begins here, and so it does after ids that
        end within a character."""
        self._decode = decode
        self._ids = [] if decode(after).endswith(REPLACEMENT) else list(after)
        self._start = 0  # the window: ids[start:]
        self._read = len(self._ids)  # the ids whose text is out: ids[:read]

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = []
        for token in token_ids:
            self._ids.append(token)
            pieces.append(self._advance(final=False))
        return "".join(pieces)

    def finish(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if not final and (after.endswith(REPLACEMENT) or len(after) <= len(before)):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]


class TextOnly(NamedTuple):
    """What StopChecker lets through."""

    text: str
    stop: str | None  # the stop string that was found; the text ends before it, or with it


class StopChecker:
    """Holds back the longest end of the text that may still become a stop string, and cuts at one that is complete."""

    def __init__(self, stop: Sequence[str], shows_stop: bool = False) -> None:
        """``shows_stop``: what ends the text is part of it."""
        self._stop = tuple(stop)
        self.shows_stop = shows_stop
        self._held = ""

    def __bool__(self) -> bool:
        """There is something to look for; else all text passes as it is."""
        return bool(self._stop)

    def push(self, text: str, active: bool = True) -> TextOnly:
        """Takes final text. While not ``active`` (fewer than min_tokens so far) nothing is held or cut."""
        if not self:
            return TextOnly(text, None)
        text = self._held + text
        self._held = ""
        if not active:
            return TextOnly(text, None)
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda entry: (entry[0] + len(entry[1]), entry[0]))
            return TextOnly(text[: at + len(stop)] if self.shows_stop else text[:at], stop)
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return TextOnly(text[: len(text) - keep], None)

    def finish(self) -> str:
        """The held text: it became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
