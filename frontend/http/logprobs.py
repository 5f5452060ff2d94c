"""Logprobs in the two shapes of the OpenAI API. Knows tokens' texts and offsets; nothing of how scores are made."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from depthbatch.frontend.detokenizer import Detokenizer
from depthbatch.frontend.logprobs import TokenLogprobs
from depthbatch.frontend.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0  # what the API says instead of -inf, which JSON cannot


class LogprobFormat(Protocol):
    """One choice's format. Called once a piece, in order: it remembers how far the text has come."""

    def __call__(self, prompt: Sequence[TokenLogprobs], output: Sequence[TokenLogprobs]) -> dict[str, Any]: ...


class TokenNames:
    """What tokens are called: their texts, or with ``as_ids`` their ids."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def data(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for; None where there is no text."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def __call__(self, token_id: int) -> str:
        """``bytes:\\x..`` when it is only part of a character, ``token_id:..`` when it has no text."""
        data = None if self._as_ids else self.data(token_id)
        if not data:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Echo(NamedTuple):
    """A prompt that the text starts with."""

    ids: list[int]
    offsets: list[int]  # where in its text each token starts
    length: int  # of its text, in characters


class CompletionLogprobs:
    """``tokens``, ``token_logprobs``, ``top_logprobs``, ``text_offset``: four lists. With ``echo`` the first call starts
    with the prompt's tokens, of which the first has no logprob."""

    def __init__(self, names: TokenNames, detokenizer: Detokenizer | None, echo: Echo | None = None) -> None:
        """``detokenizer``: a new one."""
        self._names = names
        self._detokenizer = detokenizer
        self._echo = echo
        self._offset = 0 if echo is None else echo.length  # characters so far

    def __call__(self, prompt: Sequence[TokenLogprobs], output: Sequence[TokenLogprobs]) -> dict[str, Any]:
        entries: list[TokenLogprobs | None] = [*output]
        token_ids = [entry.token_id for entry in output]
        offsets = [self._advance(token_id) for token_id in token_ids]
        if self._echo is not None:
            entries = [None, *prompt, *output]
            token_ids = self._echo.ids + token_ids
            offsets = self._echo.offsets + offsets
            self._echo = None
        return {
            "tokens": [self._names(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the token itself, which need not be one of them. Of two tokens with one text, the
        second goes by its id."""
        logprobs = dict(entry.top)
        logprobs.setdefault(entry.token_id, entry.logprob)
        top: dict[str, float] = {}
        for token_id, logprob in logprobs.items():
            name = self._names(token_id)
            top[f"token_id:{token_id}" if name in top else name] = _finite(logprob)
        return top

    def _advance(self, token_id: int) -> int:
        """Where the token's text starts."""
        start = self._offset
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.push((token_id,)))
        return start


class ChatLogprobs:
    """``content``: one object a token, with the likeliest ones beside it."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def __call__(self, prompt: Sequence[TokenLogprobs], output: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in output]}

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._names.data(token_id)
        return {
            "token": self._names(token_id),
            "logprob": _finite(logprob),
            "bytes": None if data is None else list(data),
        }


def _finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)
