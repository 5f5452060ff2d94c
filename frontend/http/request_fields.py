"""What a body's fields mean to the engine: parameters under their own names, the two ways to constrain output, and the
fields of the OpenAI API that this engine cannot honour, which are refused by name and never ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from depthbatch.common.errors import RequestError
from depthbatch.common.logging import get_logger
from depthbatch.frontend.http.errors import ApiError, bad_value, code_of
from depthbatch.frontend.http.schemas import GenerationFields
from depthbatch.frontend.params import SamplingParams

log = get_logger("http")

# body fields of both endpoints that are the engine's own, name and meaning
ENGINE_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if name in GenerationFields.model_fields)
ENGINE_NAMES = ("json_schema", "regex", "choice")
ANY_OBJECT = {"type": "object"}

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


def sampling_fields(body: GenerationFields) -> dict[str, Any]:
    """Fields of SamplingParams that the client has set. Raises ApiError (400) naming the client's field."""
    fields = {name: value for name in ENGINE_FIELDS if (value := getattr(body, name)) is not None}
    return fields | constraint_fields(body)


def constraint_fields(body: GenerationFields) -> dict[str, Any]:
    """``json_schema``, ``regex`` or ``choice``, or nothing. Raises ApiError (400) naming the client's field."""
    asked, own = body.response_format, body.structured_outputs
    if asked is not None and asked.type != "text":
        if own is not None:
            raise bad_value("structured_outputs", "not together with response_format")
        if asked.type == "json_object":
            return {"json_schema": ANY_OBJECT}
        if asked.json_schema is None:
            raise bad_value("response_format", "type json_schema needs json_schema")
        return {"json_schema": asked.json_schema.json_schema}
    if own is None:
        return {}
    given = {name: value for name in ENGINE_NAMES if (value := getattr(own, name)) is not None}
    if len(given) != 1:
        raise bad_value("structured_outputs", "exactly one of json, regex and choice")
    return given


def renamed(error: RequestError, body: GenerationFields) -> ApiError:
    """An error of the engine with the name of the field that the client used."""
    param = error.param
    if param in ENGINE_NAMES:
        param = "structured_outputs" if body.structured_outputs is not None else "response_format"
    return ApiError(400, str(error), param=param, code=code_of(error))
