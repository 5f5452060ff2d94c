"""What a prompt may be, by the running engine's length and vocabulary; every refusal is a RequestError."""

from collections.abc import Sequence

import numpy as np

from depthbatch.common.errors import RequestError, shown
from depthbatch.common.messages import EngineInfo


class ContextLengthError(RequestError):
    """Prompt and output do not fit into the model's longest sequence."""


def check_length(prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """``max_tokens``, or for None what there is room for. Raises RequestError, ContextLengthError."""
    limit = max_model_len - prompt_tokens
    if prompt_tokens < 1:
        raise RequestError("prompt is empty", "prompt")
    if limit < 1:
        raise ContextLengthError(
            f"prompt of {prompt_tokens} tokens leaves no room: max_model_len is {max_model_len}", "prompt"
        )
    if max_tokens is not None and max_tokens > limit:
        raise ContextLengthError(
            f"max_tokens {max_tokens} and a prompt of {prompt_tokens} tokens are more than max_model_len "
            f"{max_model_len}",
            "max_tokens",
        )
    return limit if max_tokens is None else max_tokens


def check_token_ids(token_ids: Sequence[int], info: EngineInfo) -> None:
    """Raises RequestError unless every id is in the vocabulary. Long prompts come this way: no loop in Python unless an id
    is to be named."""
    if not token_ids:
        return
    if set(map(type, token_ids)) == {int}:
        try:
            ids = np.asarray(token_ids, np.int64)
        except OverflowError:
            pass
        else:
            if ids.min() >= 0 and ids.max() < info.vocab_size:
                return
    for token in token_ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < info.vocab_size:
            raise RequestError(f"prompt: {shown(token)} is not a token id below {info.vocab_size}", "prompt")
