"""Fields of the OpenAI API, and of servers like it, that this engine cannot honour: refused by name, never ignored."""

from collections.abc import Callable, Mapping
from typing import Any

from depthbatch.common.logging import get_logger
from depthbatch.frontend.http.errors import ApiError

log = get_logger("http")

Neutral = Callable[[Any], bool]


def _off(value: Any) -> bool:
    return value is None or value is False


def _one(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and value == 1)


def _empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _no_tools(value: Any) -> bool:
    return value in (None, "none", "auto")


def _null(value: Any) -> bool:
    return value is None


# field -> the values that ask for nothing
UNSUPPORTED: dict[str, Neutral] = {
    "prompt_logprobs": _null,
    "length_penalty": _one,
    "best_of": _one,
    "use_beam_search": _off,
    "suffix": _empty,
    "guided_json": _null,
    "guided_regex": _null,
    "guided_choice": _null,
    "guided_grammar": _null,
    "grammar": _null,
    "prompt_embeds": _null,
    "chat_template": _null,
    "documents": _empty,
    "mm_processor_kwargs": _empty,
    "tools": _empty,
    "tool_choice": _no_tools,
    "functions": _empty,
    "function_call": _no_tools,
    "modalities": lambda value: value in (None, ["text"]),
    "audio": _null,
    "prediction": _null,
    "web_search_options": _null,
    "reasoning_effort": _null,
    "bad_words": _empty,
    "allowed_token_ids": _null,
    "truncate_prompt_tokens": _null,
    "logits_processors": _empty,
    "lora_request": _null,
    "kv_transfer_params": _null,
}

# bookkeeping that changes no output; accepted without a word
HARMLESS = frozenset({"user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier"})

_warned: set[str] = set()
MAX_WARNED = 1000  # names come from clients: the set must not grow with them


def check_extras(extras: Mapping[str, Any] | None) -> None:
    """Refuses what is known and unsupported, warns once about what nobody knows. Raises ApiError (400)."""
    for name, value in (extras or {}).items():
        neutral = UNSUPPORTED.get(name)
        if neutral is not None:
            if not neutral(value):
                raise ApiError(400, f"{name}: not supported by this engine", param=name, code="unsupported_field")
        elif name not in HARMLESS and name not in _warned and len(_warned) < MAX_WARNED:
            _warned.add(name)
            log.warning("ignored unknown field %r", name[:64])
