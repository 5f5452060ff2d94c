"""Text to token ids and back, from a model directory's own tokenizer files; never remote code, never the network.

What users type is text: special tokens in it are encoded as the characters they are, unless the caller asks
otherwise. A loaded Tokenizer is never changed again, so any thread may use it. Knows nothing of requests.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from depthbatch.common.errors import ModelError, RequestError
from depthbatch.common.text_files import read_json, read_text
from depthbatch.frontend.chat_template import ChatTemplate, chosen_template
from depthbatch.frontend.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from depthbatch.frontend.prompt_checks import ContextLengthError

BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
CONTEXT_IDS = 6  # of the prompt, which say whether an output's first space is text
MOST_COMPOSED = 4  # bytes that NFC makes one of, rounded up: U+1FBE U+0308 U+0301 have seven, U+0390 has two
OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")  # kinds that have to be converted


def load_tokenizer(directory: Path, chat_template: str | None = None) -> "Tokenizer | None":
    """The tokenizer of a model directory; None when it has none (the model then serves token ids only).
    ``chat_template``: instead of the model's own.

    Raises ModelError when its files are broken.
    """
    try:
        if (directory / "tokenizer.json").is_file():
            backend = Backend.from_str(read_text(directory / "tokenizer.json"))
        elif any((directory / name).is_file() for name in OTHER_FILES):
            backend = _converted(directory)
        else:
            return None
        config = _read_config(directory)
        return Tokenizer(backend, config if chat_template is None else {**config, "chat_template": chat_template})
    except Exception as error:  # the libraries raise bare Exception for whatever a broken file provokes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"cannot load the tokenizer of {directory}: {reason}") from None


def _converted(directory: Path) -> Backend:
    """A fast tokenizer made by transformers from older files; takes seconds to import."""
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return loaded.backend_tokenizer


def _read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special tokens and a chat template of files beside it where there are any."""
    config: dict[str, Any] = {**_json_file(directory / "special_tokens_map.json")}
    config |= {
        name: value for name, value in _json_file(directory / "tokenizer_config.json").items() if value is not None
    }
    if template := _json_file(directory / "chat_template.json").get("chat_template"):
        config["chat_template"] = template
    if (path := directory / "chat_template.jinja").is_file():
        config["chat_template"] = read_text(path)
    return config


def _json_file(path: Path) -> dict[str, Any]:
    """What the file holds; nothing where there is none. A byte-order mark is no part of it."""
    if not path.is_file():
        return {}
    values = read_json(path)
    if not isinstance(values, dict):
        raise ModelError(f"{path.name} must hold an object")
    return values


class Tokenizer:
    """A tokenizer behind the few verbs that the engine needs. ``config``: the contents of tokenizer_config.json."""

    def __init__(self, backend: Backend, config: Mapping[str, Any]) -> None:
        backend.no_truncation()
        backend.no_padding()
        # Whole offsets: those of a token that starts with a space start there. The ids are the same.
        source = backend.to_str().replace('"trim_offsets":true', '"trim_offsets":false')
        self._control = Backend.from_str(source)  # special tokens in the text act
        self._plain = Backend.from_str(source)
        self._plain.encode_special_tokens = True  # special tokens in the text are text
        self._added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._special = {token: str(entry.content) for token, entry in self._added.items() if entry.special}
        self._byte_table = self._token_bytes() if _is_byte_level(backend) else None
        self._bytes_a_token = self._most_bytes()
        self._pieces = _piece_style(backend)
        self.vocab_size: int = backend.get_vocab_size()
        names = self.special_names = _special_names(config)  # bos_token, eos_token, ... -> text
        self.eos_token_id: int | None = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
        template = self.chat_template = chosen_template(config.get("chat_template"))
        self._chat_template = (
            ChatTemplate(template, _template_names(config), self._special.values()) if template else None
        )

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of a text. ``add_special_tokens``: what the model expects around it (bos, say).
        ``allow_special``: special tokens written in the text act as such. Raises RequestError on lone surrogates.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt is not valid Unicode at character {error.start}", "prompt") from None
        backend = self._control if allow_special else self._plain
        # The library's encode keeps the interpreter lock, seconds for a long text; its batches do not.
        return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of a text with nothing around it."""
        return self.encode(text, add_special_tokens=False)

    def offsets(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Where in the text each token of ``encode`` starts, in characters; tokens that are no part of it lie between their
        neighbours."""
        backend = self._control if allow_special else self._plain
        spans = backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].offsets
        starts, end = [], 0
        for start, stop in spans:
            starts.append(end if start == stop else start)
            end = max(end, stop)
        return starts

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, without encoding it; 0 where nothing can be said."""
        if self._bytes_a_token is None or len(text) < self._bytes_a_token:
            return 0
        return len(text.encode("utf-8", "surrogatepass")) // self._bytes_a_token

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None, **template_options: Any
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, by default open for the assistant's answer.

        Special tokens of the template act; those that a message's content holds are text. ``template_options`` are
        those of ChatTemplate.render. Raises RequestError when the template is missing or refuses the messages, or when
        they are certain to have more than ``max_tokens``.
        """
        if self._chat_template is None:
            raise RequestError("this model has no chat template", "messages")
        text, quotes = self._chat_template.render(messages, **template_options)
        if max_tokens is not None:
            check_fewest(self.fewest_tokens(text), max_tokens, "messages")
        ids: list[int] = []
        done = 0
        for start, end in quotes():
            ids += self.encode(text[done:start], add_special_tokens=False, allow_special=True)
            ids += self.encode(text[start:end], add_special_tokens=False)
            done = end
        return ids + self.encode(text[done:], add_special_tokens=False, allow_special=True)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of a whole sequence, special tokens left out or shown."""
        return str(self._control.decode(list(token_ids), skip_special_tokens=skip_special))

    def detokenizer(self, after: Sequence[int] = (), skip_special: bool = True) -> Detokenizer:
        """A new incremental decoder for one sequence, or for what follows the ids ``after``."""
        if self._byte_table is not None:
            if not skip_special:
                return ByteDetokenizer(self.token_bytes)
            table = self._byte_table
            return ByteDetokenizer(lambda token: table[token] if token < len(table) else b"")
        decode = self.decode if skip_special else partial(self.decode, skip_special=False)
        return WindowDetokenizer(decode, after[-CONTEXT_IDS:])

    def token_text(self, token: int) -> str:
        """One token by itself, for display; bytes that are no character show as U+FFFD."""
        if token in self._special:
            return self._special[token]
        if self._byte_table is not None:
            return self._byte_table[token].decode("utf-8", "replace") if token < len(self._byte_table) else ""
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters; none for an id that no token has."""
        if token in self._special:
            return self._special[token].encode()
        if self._byte_table is not None:
            return self._byte_table[token] if token < len(self._byte_table) else b""
        if self._pieces is None or token in self._added:
            return self.token_text(token).encode()
        piece = self._control.id_to_token(token) or ""
        if self._pieces.bytes_fall_back and (byte := BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        return piece.replace(self._pieces.space, " ").encode()

    def _most_bytes(self) -> int | None:
        """Bytes of text that one token can stand for at most; None where that is not known, because text may be dropped
        or any length of it may become one token."""
        if self._byte_table is None:
            return None
        parts = json.loads(self._control.to_str())
        steps = parts["pre_tokenizer"] or {}
        kept = all(
            step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] != "Removed")
            for step in steps.get("pretokenizers", [steps])
        )
        whole = set(byte_level_alphabet()) <= set(self._control.get_vocab())  # no byte is unknown
        stripping = any(entry.lstrip or entry.rstrip for entry in self._added.values())
        normalizer = (parts["normalizer"] or {}).get("type")
        if not kept or not whole or stripping or normalizer not in (None, "NFC"):
            return None
        longest = max(map(len, [*self._byte_table, *(str(entry.content).encode() for entry in self._added.values())]))
        return longest * (MOST_COMPOSED if normalizer else 1)

    def _token_bytes(self) -> list[bytes]:
        """Bytes of every token of a byte-level vocabulary; special tokens have none."""
        char_bytes = byte_level_alphabet()
        table = []
        for token in range(max(self._control.get_vocab().values(), default=-1) + 1):
            text = self._control.id_to_token(token) or ""
            if token in self._special:
                table.append(b"")
            elif token in self._added or any(char not in char_bytes for char in text):
                table.append(text.encode())
            else:
                table.append(bytes(char_bytes[char] for char in text))
        return table


def check_fewest(fewest: int, max_tokens: int, param: str) -> None:
    """Raises ContextLengthError when a text that has not been encoded is certain to be too long."""
    if fewest > max_tokens:
        what = f"{param} of at least {fewest} tokens"
        raise ContextLengthError(
            f"{what} leave{'' if param == 'messages' else 's'} no room: there is room for {max_tokens}", param
        )


def byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's character -> byte: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _is_byte_level(backend: Backend) -> bool:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return [part.get("type") for part in parts] == ["ByteLevel"]


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... -> text; written as a string or as a map with ``content``."""
    texts = {key: _token_text(value) for key, value in config.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if text is not None}


def _template_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """What chat templates find by name: the special tokens, and the list of additional ones."""
    names: dict[str, Any] = dict(_special_names(config))
    more = config.get("additional_special_tokens")
    if isinstance(more, list):
        names["additional_special_tokens"] = [text for text in map(_token_text, more) if text is not None]
    return names


class PieceStyle(NamedTuple):
    """How a SentencePiece vocabulary spells texts."""

    space: str
    bytes_fall_back: bool  # <0x0A> is a byte


def _piece_style(backend: Backend) -> PieceStyle | None:
    """None for a vocabulary that spells them otherwise."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    bytes_fall_back = any(part.get("type") == "ByteFallback" for part in parts)
    for part in parts:
        if part.get("type") == "Metaspace":
            return PieceStyle(part["replacement"], bytes_fall_back)
        if part.get("type") == "Replace" and part.get("content") == " " and "String" in part["pattern"]:
            return PieceStyle(part["pattern"]["String"], bytes_fall_back)
    return None


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
