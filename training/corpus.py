"""Token rows from a user's file, for distilling gates on any Ouro checkpoint.

A ``.jsonl`` file has one JSON object a line with ``token_ids`` (list of integers), or ``text``, or ``prompt`` and
``answer`` (or ``completion``; only the answer's positions count). Any other file is plain text, cut into rows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from depthbatch.common.errors import ConfigError
from depthbatch.common.text_files import read_text
from depthbatch.training.train_gate import TokenRow

Encode = Callable[[str], list[int]]


def _row(value: Any, encode: Encode, where: str) -> TokenRow:
    """One parsed JSONL line as a row."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is not a JSON object")
    ids = value.get("token_ids")
    if ids is not None:
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"{where}: token_ids is not a list of integers")
        return TokenRow(ids, list(range(len(ids))))
    answer = value.get("answer", value.get("completion"))
    if isinstance(value.get("prompt"), str) and isinstance(answer, str):
        prompt, rest = encode(value["prompt"]), encode(answer)
        start = max(0, len(prompt) - 1)
        return TokenRow(prompt + rest, list(range(start, len(prompt) + len(rest))))
    if isinstance(value.get("text"), str):
        whole = encode(value["text"])
        return TokenRow(whole, list(range(len(whole))))
    raise ConfigError(f"{where} has neither token_ids, text, nor prompt with answer or completion")


def _read_jsonl(path: Path, lines: list[str], encode: Encode, vocab_size: int) -> list[TokenRow]:
    rows = []
    for number, line in enumerate(tqdm(lines, desc="data", mininterval=5.0), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        row = _row(value, encode, where)
        if any(not 0 <= token < vocab_size for token in row.ids):
            raise ConfigError(f"{where} has a token id outside the model's vocabulary of {vocab_size}")
        rows.append(row)
    return rows


def read_rows(path: Path, encode: Encode, vocab_size: int, length: int, most_tokens: int) -> list[TokenRow]:
    """Read a file's rows.

    ``path``: ``.jsonl``, or plain text in UTF-8.
    ``encode``: text to token ids.
    ``vocab_size``: ids must be below it.
    ``length``: longer rows are cut into pieces of so many tokens.
    ``most_tokens``: stop after so many counted positions.

    Raises ConfigError: an unreadable file, a malformed line, or no token to learn from.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the data file {path}: {reason}") from None
    if path.suffix == ".jsonl":
        whole = _read_jsonl(path, text.splitlines(), encode, vocab_size)
    else:
        ids = encode(text)
        if ids and max(ids) >= vocab_size:
            raise ConfigError(
                f"the data file {path} has token {max(ids)}, the model only {vocab_size}: its tokenizer is another's"
            )
        whole = [TokenRow(ids, list(range(len(ids))))]
    rows, counted = [], 0
    for row in whole:
        for start in range(0, len(row.ids), length):
            end = min(start + length, len(row.ids))
            positions = [p - start for p in row.positions if start <= p < end][: most_tokens - counted]
            if positions:
                rows.append(TokenRow(row.ids[start:end], positions))
                counted += len(positions)
    if not rows:
        raise ConfigError(f"the data file {path} holds no token to learn from")
    return rows
