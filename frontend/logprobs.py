"""Logprobs as users see them, out of the rows of scores that the worker made (common/frames.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class TokenLogprob(NamedTuple):
    """A token and its logprob under the raw logits, in nats."""

    token_id: int
    logprob: float


class TokenLogprobs(NamedTuple):
    """A token of a text and the likeliest ones at its place, best first (they hold the token itself or do not)."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...]


def read_scores(scores: bytes, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """One entry a token, with ``top`` of the likeliest tokens. Raises ValueError when rows and tokens do not match."""
    if not token_ids:
        return []
    rows = np.frombuffer(scores, "<i4").reshape(len(token_ids), -1)
    width = rows.shape[1] // 2
    likeliest = rows[:, 1 : 1 + width]
    floats = rows.view("<f4")
    return [
        TokenLogprobs(
            token, float(own[0]), tuple(map(TokenLogprob, ids[:top].tolist(), own[1 + width :][:top].tolist()))
        )
        for token, own, ids in zip(token_ids, floats, likeliest, strict=True)
    ]
