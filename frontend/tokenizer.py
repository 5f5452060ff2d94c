"""Text to token ids and back, from a model directory's own tokenizer files; never remote code, never the network.

What users type is text: special tokens in it are encoded as the characters they are, unless the caller asks
otherwise. A loaded Tokenizer is never changed again, so any thread may use it. Knows nothing of requests.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthbatch.common.errors import ModelError, RequestError
from depthbatch.frontend.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(directory: Path) -> "Tokenizer | None":
    """The tokenizer of a model directory; None when it has none (the model then serves token ids only).

    Raises ModelError when its files are broken or would need code from the repository.
    """
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    import transformers  # takes seconds; not before a tokenizer is wanted

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(40)  # errors only: it warns of model types that it does not know
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file provokes in there
        raise ModelError(f"cannot load the tokenizer of {directory}: {_first_line(error)}") from None
    finally:
        transformers.logging.set_verbosity(verbosity)
    if not loaded.is_fast:
        raise ModelError(f"cannot load the tokenizer of {directory}: it has no tokenizer.json")
    return Tokenizer(loaded)


class Tokenizer:
    """A fast tokenizer behind the few verbs that the engine needs."""

    def __init__(self, loaded: Any) -> None:
        from tokenizers import Tokenizer as Backend

        self._loaded = loaded
        self._control = loaded.backend_tokenizer  # special tokens in the text act
        self._control.no_truncation()
        self._control.no_padding()
        self._plain = Backend.from_str(self._control.to_str())
        self._plain.encode_special_tokens = True  # special tokens in the text are text
        added = self._control.get_added_tokens_decoder()
        self._special = {token: entry.content for token, entry in added.items() if entry.special}
        self._byte_table = self._token_bytes() if _is_byte_level(self._control) else None
        self.vocab_size: int = self._control.get_vocab_size()

    @property
    def eos_token_id(self) -> int | None:
        value = self._loaded.eos_token_id
        return value if isinstance(value, int) else None

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of a text. ``add_special_tokens``: what the model expects around it (bos, say).
        ``allow_special``: special tokens written in the text act as such. Raises RequestError on lone surrogates.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt is not valid Unicode at character {error.start}", "prompt") from None
        backend = self._control if allow_special else self._plain
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._loaded.chat_template)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template, open for the assistant's answer.

        Special tokens of the template act; those that a message's content holds are text. Raises RequestError when
        the template is missing or refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template", "messages")
        contents = [message.get("content") for message in messages]
        hostile = {
            i: content
            for i, content in enumerate(contents)
            if isinstance(content, str) and any(special in content for special in self._special.values())
        }
        marked = [{**message, "content": _mark(i)} if i in hostile else message for i, message in enumerate(messages)]
        options = {"add_generation_prompt": True} | template_kwargs
        try:
            text: str = self._loaded.apply_chat_template(marked, tokenize=False, **options)
        except Exception as error:  # jinja errors, raise_exception() in a template, missing keys
            raise RequestError(f"messages do not fit the chat template: {_first_line(error)}", "messages") from None
        ids: list[int] = []
        for i, content in hostile.items():
            before, found, text = text.partition(_mark(i))
            ids += self.encode(before, add_special_tokens=False, allow_special=True)
            if found:
                ids += self.encode(content, add_special_tokens=False)
        return ids + self.encode(text, add_special_tokens=False, allow_special=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens left out."""
        return str(self._control.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """A new incremental decoder for one sequence."""
        if self._byte_table is not None:
            table = self._byte_table
            return ByteDetokenizer(lambda token: table[token] if token < len(table) else b"")
        return WindowDetokenizer(self.decode)

    def token_text(self, token: int) -> str:
        """One token by itself, for display; bytes that are no character show as U+FFFD."""
        if token in self._special:
            return str(self._special[token])
        if self._byte_table is not None:
            return self._byte_table[token].decode("utf-8", "replace") if token < len(self._byte_table) else ""
        return self.decode([token])

    def _token_bytes(self) -> list[bytes]:
        """Bytes of every token of a byte-level vocabulary; special tokens have none."""
        char_bytes = byte_level_alphabet()
        added = self._control.get_added_tokens_decoder()
        table = []
        for token in range(max(self._control.get_vocab().values(), default=-1) + 1):
            text = self._control.id_to_token(token) or ""
            if token in self._special:
                table.append(b"")
            elif token in added or any(char not in char_bytes for char in text):
                table.append(text.encode())
            else:
                table.append(bytes(char_bytes[char] for char in text))
        return table


def byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's character -> byte: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _is_byte_level(backend: Any) -> bool:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return [part.get("type") for part in parts] == ["ByteLevel"]


def _mark(index: int) -> str:
    return f"\ue000{index}\ue001"  # private use: no template writes these


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
