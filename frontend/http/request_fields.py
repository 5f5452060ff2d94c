"""What a body's fields mean to the engine: parameters under their own names, the two ways to constrain output, and the
fields of the OpenAI API that this engine cannot honour, which are refused by name and never ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from depthbatch.common.errors import RequestError
from depthbatch.common.logging import get_logger
from depthbatch.frontend.http.error_answers import ApiError, bad_value, code_of
from depthbatch.frontend.http.schemas import Body, GenerationFields
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
    "regex": _null,
    "ebnf": _null,
    "json_schema": _null,
    "structural_tag": _null,
    "spaces_between_special_tokens": lambda value: value in (None, True),
    "echo": _off,
    "conversation": _null,
    "previous_response_id": _null,
    "no_stop_trim": _off,
    "return_hidden_states": _off,
}
# the same of objects within a body, by the field or the list that holds them
UNSUPPORTED_WITHIN: dict[str, dict[str, Neutral]] = {
    "messages": {
        "tool_calls": _empty,
        "tool_call_id": _null,
        "function_call": _null,
        "reasoning": _empty,
        "reasoning_content": _empty,
        "refusal": _empty,
        "audio": _null,
        "annotations": _empty,
        "prefix": _off,
    },
    "stream_options": {"continuous_usage_stats": _off, "include_obfuscation": _off},
    "response_format": {"grammar": _null, "structures": _null, "triggers": _null},
    "structured_outputs": {
        "grammar": _null,
        "ebnf": _null,
        "json_object": _off,
        "structural_tag": _null,
        "whitespace_pattern": _null,
        "disable_fallback": _off,
        "disable_any_whitespace": _off,
        "disable_additional_properties": _off,
    },
}
REASONS = {
    "no_stop_trim": "its name is include_stop_str_in_output here",
    **dict.fromkeys(("tools", "functions", "tool_calls", "tool_call_id"), "this engine's models call no tools"),
    **dict.fromkeys(
        ("regex", "ebnf", "json_schema", "grammar"), "say what constrains the output in structured_outputs"
    ),
    **{f"guided_{kind}": "its name is structured_outputs now" for kind in ("json", "regex", "choice", "grammar")},
    **dict.fromkeys(("conversation", "previous_response_id"), "this server keeps no conversations: send the messages"),
}

# bookkeeping that changes no output, and how a reasoning parser shows what it finds, where there is none; accepted without
# a word
HARMLESS = frozenset(
    {"user", "store", "metadata", "service_tier", "cache_control", "parallel_tool_calls", "safety_identifier"}
    | {"separate_reasoning", "stream_reasoning", "include_reasoning"}
)

_warned: set[str] = set()
MAX_UNKNOWN = 256  # fields of one object
MAX_WARNED = 1000  # names come from clients: the set must not grow with them


def check_body(body: Body) -> None:
    """Refuses what is known and unsupported in a body, or in an object within it. Raises ApiError (400)."""
    check_extras(body.model_extra)
    for name in body.model_fields_set & type(body).model_fields.keys():
        _check_within(name, name, getattr(body, name, None))


def _check_within(name: str, place: str, value: Any) -> None:
    """``name``: the field whose value it is, or the list's; ``place``: where that is in the body."""
    if isinstance(value, Body):
        check_extras(value.model_extra, UNSUPPORTED_WITHIN.get(name, {}), place)
        for inner in value.model_fields_set & type(value).model_fields.keys():
            _check_within(inner, f"{place}.{inner}", getattr(value, inner))
    elif isinstance(value, list) and value and isinstance(value[0], Body):
        for index, item in enumerate(value):
            _check_within(name, f"{place}[{index}]", item)


def check_extras(
    extras: Mapping[str, Any] | None, unsupported: Mapping[str, Neutral] = UNSUPPORTED, place: str = ""
) -> None:
    """Refuses what is known and unsupported, and very many fields; warns once about what nobody knows. Raises ApiError (400)."""
    if extras and len(extras) > MAX_UNKNOWN:
        raise ApiError(
            400,
            f"{place or 'the body'} has {len(extras)} unknown fields, more than {MAX_UNKNOWN}",
            param=place.partition("[")[0].partition(".")[0] or None,
            code="unsupported_field",
        )
    for name, value in (extras or {}).items():
        neutral = unsupported.get(name)
        if neutral is not None:
            if not neutral(value):
                path = f"{place}.{name}" if place else name
                message = f"{path}: not supported by this engine"
                reason = f" ({REASONS[name]})" if name in REASONS else ""
                param = place.partition("[")[0].partition(".")[0] or name
                raise ApiError(400, message + reason, param=param, code="unsupported_field")
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
    param, message = error.param, str(error)
    if param == "max_tokens" and getattr(body, "max_completion_tokens", None) is not None:
        param, message = "max_completion_tokens", message.replace("max_tokens", "max_completion_tokens", 1)
    if param in ENGINE_NAMES:
        param = "structured_outputs" if body.structured_outputs is not None else "response_format"
    return ApiError(400, message, param=param, code=code_of(error))
