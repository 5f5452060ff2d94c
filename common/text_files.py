"""Text files that people write or other programs leave: UTF-8, with or without a byte-order mark."""

import json
from pathlib import Path
from typing import Any


def decode_text(data: bytes, errors: str = "strict") -> str:
    """Text without its byte-order mark; ``errors`` as of bytes.decode. Raises UnicodeDecodeError, which is a ValueError."""
    return data.decode("utf-8-sig", errors)


def read_text(path: str | Path, errors: str = "strict") -> str:
    """A file's text. Raises OSError, UnicodeDecodeError."""
    return decode_text(Path(path).read_bytes(), errors)


def read_json(path: str | Path) -> Any:
    """What a JSON file holds. Raises OSError, ValueError, and RecursionError of a few kB of brackets."""
    return json.loads(read_text(path))
