"""Bad sequences as they travel, from plain lists of tokens."""

from collections.abc import Sequence

import numpy as np

from depthbatch.common.frames import BAD_SEQUENCE_TOKENS


def bad_rows(sequences: Sequence[Sequence[int]]) -> bytes:
    """int32 [n, BAD_SEQUENCE_TOKENS], right-aligned behind -1."""
    rows = [[-1] * (BAD_SEQUENCE_TOKENS - len(sequence)) + list(sequence) for sequence in sequences]
    return np.array(rows, np.int32).tobytes()
