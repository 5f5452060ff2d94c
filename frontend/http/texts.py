"""Text to tokens and back, off the event loop: one thread does it all, so a long prompt delays no running stream."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

from depthbatch.frontend.http.error_answers import ApiError, bad_value
from depthbatch.frontend.http.schemas import Message, TemplateFields
from depthbatch.frontend.tokenizer import Tokenizer, check_fewest

P = ParamSpec("P")
R = TypeVar("R")


class Texts:
    """The served model's tokenizer, or the lack of one. Raises ApiError (400) where a tokenizer is needed.

    ``thread``: the one that owns the tokenizer; whoever made it ends it.
    """

    def __init__(self, tokenizer: Tokenizer | None, template_names: frozenset[str], thread: Executor) -> None:
        self._tokenizer = tokenizer
        self._template_names = template_names
        self._thread = thread

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    async def encode(
        self, text: str, add_special_tokens: bool, parse_special_tokens: bool, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a prompt; special tokens in it are text unless ``parse_special_tokens``. Raises RequestError, before
        anything is encoded, when they are certain to be more than ``max_tokens``."""
        tokenizer = self._needed("prompt")
        if max_tokens is not None:
            check_fewest(tokenizer.fewest_tokens(text), max_tokens, "prompt")
        return await self._run(tokenizer.encode, text, add_special_tokens, parse_special_tokens)

    async def offsets(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        """Where in the text each token of ``encode`` starts."""
        return await self._run(self._needed("prompt").offsets, text, add_special_tokens, parse_special_tokens)

    async def decoded_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Where in the decoded text each token starts; all 0 where there is no text."""
        return await self._run(_decoded_offsets, self._tokenizer, token_ids)

    async def encode_chat(
        self, messages: Sequence[Message], fields: TemplateFields, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a conversation in the model's own template; what messages say never acts as a control token.
        ``max_tokens``: as of ``encode``."""
        tokenizer = self._needed("messages")
        kwargs = self._template_kwargs(fields)
        for index, message in enumerate(messages):
            if message.content is None and message.role != "assistant":
                raise bad_value("messages", f"[{index}].content is null, which only an assistant's may be")
        plain = [_plain(message) for message in messages]
        return await self._run(lambda: tokenizer.encode_chat(plain, max_tokens, **kwargs))

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self._run(self._needed("tokens").decode, token_ids)

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        tokenizer = self._needed("return_token_strs")
        return await self._run(lambda: [tokenizer.token_text(token_id) for token_id in token_ids])

    async def describe(self) -> dict[str, Any]:
        """What /tokenizer_info says."""
        if self._tokenizer is None:
            raise ApiError(404, "this model has no tokenizer", code="no_tokenizer")
        return {
            **self._tokenizer.special_names,
            "chat_template": self._tokenizer.chat_template,
            "vocab_size": self._tokenizer.vocab_size,
            "eos_token_id": self._tokenizer.eos_token_id,
            "has_chat_template": self._tokenizer.has_chat_template,
        }

    def _template_kwargs(self, fields: TemplateFields) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        for name, value in (fields.chat_template_kwargs or {}).items():
            if name not in self._template_names:
                raise bad_value("chat_template_kwargs", f"{name[:64]!r} is not on this server's list")
            if value is not None and not isinstance(value, bool | int):
                raise bad_value("chat_template_kwargs", f"{name!r} must be true, false or a whole number")
            kwargs[name] = value
        if fields.continue_final_message and fields.add_generation_prompt:
            raise bad_value("continue_final_message", "not together with add_generation_prompt")
        if fields.continue_final_message:
            return {**kwargs, "continue_final_message": True, "add_generation_prompt": False}
        return {**kwargs, "add_generation_prompt": fields.add_generation_prompt is not False}

    def _needed(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise bad_value(param, "this model has no tokenizer; send token ids to /v1/completions")
        return self._tokenizer

    async def _run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))


def _plain(message: Message) -> dict[str, Any]:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content, **named}


def _decoded_offsets(tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> list[int]:
    offsets, end = [], 0
    detokenizer = tokenizer.detokenizer() if tokenizer is not None else None
    for token_id in token_ids:
        offsets.append(end)
        if detokenizer is not None:
            end += len(detokenizer.push((token_id,)))
    return offsets
