"""Logprobs in the two shapes of the OpenAI API. Knows tokens' texts and offsets; nothing of how scores are made."""

from collections.abc import Sequence
from typing import Any, Protocol

from depthbatch.frontend.logprobs import TokenLogprobs
from depthbatch.frontend.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0  # what the API says instead of -inf, which JSON cannot


class LogprobFormat(Protocol):
    """One choice's format. Called once a piece, in order: it remembers how far the text has come."""

    def __call__(self, prompt: Sequence[TokenLogprobs], output: Sequence[TokenLogprobs]) -> dict[str, Any]: ...


def token_name(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token's text; ``bytes:\\x..`` when it is only part of a character, so that no two tokens share a name."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """``tokens``, ``token_logprobs``, ``top_logprobs``, ``text_offset``: four lists. With ``echo_ids`` (the prompt) the
    first call starts with the prompt's tokens, of which the first has no logprob."""

    def __init__(self, tokenizer: Tokenizer | None, echo_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer() if tokenizer is not None else None
        self._echo_ids = list(echo_ids)
        self._offset = 0  # characters so far

    def __call__(self, prompt: Sequence[TokenLogprobs], output: Sequence[TokenLogprobs]) -> dict[str, Any]:
        entries: list[TokenLogprobs | None] = [*output]
        token_ids = [entry.token_id for entry in output]
        if self._echo_ids:
            entries = [None, *prompt, *output]
            token_ids = self._echo_ids + token_ids
            self._echo_ids = []
        return {
            "tokens": [token_name(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": [self._advance(token_id) for token_id in token_ids],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the token itself, which need not be one of them."""
        top = {token_name(self._tokenizer, token): _finite(logprob) for token, logprob in entry.top}
        top.setdefault(token_name(self._tokenizer, entry.token_id), _finite(entry.logprob))
        return top

    def _advance(self, token_id: int) -> int:
        """Where the token's text starts."""
        start = self._offset
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.push((token_id,)))
        return start


class ChatLogprobs:
    """``content``: one object a token, with the likeliest ones beside it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def __call__(self, prompt: Sequence[TokenLogprobs], output: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in output]}

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))
        return {"token": token_name(self._tokenizer, token_id), "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)
