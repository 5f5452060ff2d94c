"""The two ways to constrain output, OpenAI's and vLLM's, as fields of SamplingParams. Knows no grammar."""

from typing import Any

from depthbatch.common.errors import RequestError
from depthbatch.frontend.http.errors import ApiError, bad_value, code_of
from depthbatch.frontend.http.schemas import GenerationFields

ENGINE_NAMES = ("json_schema", "regex", "choice")
ANY_OBJECT = {"type": "object"}


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
