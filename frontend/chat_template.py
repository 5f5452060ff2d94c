"""The model's own chat template: conversation in, prompt text out. A sandboxed jinja environment, as templates expect.

Templates come with the model, never from a client. Knows nothing of tokens.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from depthbatch.common.errors import RequestError


class ChatTemplate:
    """A compiled template. ``special_tokens``: bos_token, eos_token and the like, which templates refer to."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation. ``continue_final_message``: it ends inside the last message, which the model
        goes on writing. Raises RequestError when the template refuses the messages.
        """
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | variables),
            )
        except RequestError:
            raise
        except Exception as error:  # whatever a template does with what it did not expect
            raise RequestError(f"messages do not fit the chat template: {error}", "messages") from None
        if not continue_final_message:
            return text
        content = str(messages[-1].get("content", "")).strip() if messages else ""
        end = text.rfind(content)
        if not content or end < 0:
            raise RequestError("messages: the last one has no content to continue", "messages")
        return text[: end + len(content)]


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"messages do not fit the chat template: {message}", "messages")


def _to_json(value: Any, indent: int | None = None) -> str:
    """Without jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
