"""Bad words as tokens and allowed tokens as a mask: vLLM's rules, and what is refused."""

import numpy as np
import pytest

from depthbatch.common.errors import RequestError
from depthbatch.common.frames import BAD_SEQUENCE_TOKENS
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.token_bans import allow_list, bad_sequences

TOKENS = {
    "cat": [5], " cat": [9],  # another token behind a space
    "dog": [1, 2], " dog": [3, 2],
    "x": [7], " x": [8, 7],  # the space is a token of its own
    "ox": [4, 6], " ox": [4, 9],  # begins alike
    "long": [1] * 17, " long": [1] * 17,
}  # fmt: skip


def sequences(*words: str) -> list[list[int]]:
    rows = np.frombuffer(bad_sequences(words, TOKENS.__getitem__), np.int32).reshape(-1, BAD_SEQUENCE_TOKENS)
    assert all((row[: int((row < 0).sum())] == -1).all() for row in rows)
    return [row[row >= 0].tolist() for row in rows]


def test_a_word_is_its_tokens_with_and_without_a_space_before_it() -> None:
    """The spaced form counts where it is as many tokens and another first one: else " x" would forbid every "x" anyway."""
    assert sequences("cat") == sequences(" cat") == [[5], [9]]
    assert sequences("dog", "x", "ox") == [[1, 2], [3, 2], [7], [4, 6]]
    assert bad_sequences((), None) == b""


@pytest.mark.parametrize(("words", "encode", "says"), [
    (["cat"], None, "no tokenizer"), (["cat", "long"], TOKENS.__getitem__, "'long' is 17 tokens, more than 16"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused(words, encode, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        bad_sequences(words, encode)
    assert caught.value.param == "bad_words"


def test_allowed_tokens_are_bits() -> None:
    """Every word, the sign bit among them; an id of the vocabulary's size is refused, the last one is not."""
    mask = np.unpackbits(np.frombuffer(allow_list((69, 0, 31, 32, 0), 70), np.uint8), bitorder="little")
    assert mask.size == 96 and np.flatnonzero(mask).tolist() == [0, 31, 32, 69]
    with pytest.raises(RequestError, match="70 is not below the vocabulary size 70") as caught:
        allow_list((1, 70), 70)
    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize("fields", [{"bad_words": ["a"]}, {"allowed_token_ids": [1]}])
def test_a_constraint_excludes_them(fields: dict) -> None:
    """A grammar may want just the token that is ruled out, and then nothing would be left."""
    with pytest.raises(RequestError, match="cannot be combined with regex") as caught:
        SamplingParams(regex="a", **fields)
    assert caught.value.param in fields
