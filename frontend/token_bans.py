"""Which tokens a request may not get, as the worker reads it: ``bad_words`` as token sequences, ``allowed_token_ids`` as a
mask. Both as vLLM has them.
"""

from collections.abc import Callable, Sequence

import numpy as np

from depthbatch.common.errors import RequestError
from depthbatch.common.frames import BAD_SEQUENCE_TOKENS, mask_words

Encode = Callable[[str], Sequence[int]]  # a text's tokens, without special ones around it


def bad_sequences(words: Sequence[str], encode: Encode | None) -> bytes:
    """int32 [n, BAD_SEQUENCE_TOKENS], each right-aligned behind -1: a sequence's last token may not follow the others.

    A word stands for its tokens at the start of a text, and for those behind a space where these are as many and begin
    otherwise. Raises RequestError without a tokenizer, and for a word of too many tokens.
    """
    if not words:
        return b""
    if encode is None:
        raise RequestError("bad_words: this model has no tokenizer, so a word has no tokens", "bad_words")
    sequences = []
    for word in words:
        plain = list(encode(word.lstrip()))
        spaced = list(encode(" " + word.lstrip()))
        if len(plain) > BAD_SEQUENCE_TOKENS:
            raise RequestError(
                f"bad_words: {word!r} is {len(plain)} tokens, more than {BAD_SEQUENCE_TOKENS}", "bad_words"
            )
        sequences.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    rows = np.full((len(sequences), BAD_SEQUENCE_TOKENS), -1, np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[-len(sequence) :] = sequence
    return rows.tobytes()


def allow_list(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """int32 [mask_words(vocab_size)], a bit a token. Raises RequestError for an id outside the vocabulary."""
    ids = np.asarray(token_ids, np.int64)
    if ids.max() >= vocab_size:
        raise RequestError(
            f"allowed_token_ids: {ids.max()} is not below the vocabulary size {vocab_size}", "allowed_token_ids"
        )
    bits = np.zeros(mask_words(vocab_size) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").tobytes()
