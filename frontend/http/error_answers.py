"""Errors in OpenAI shape. Knows status codes and the ``{"error": {...}}`` body, not where errors come from."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from depthbatch.common.errors import EngineDeadError, OverloadedError, RequestError, RequestKillsWorkerError, shown
from depthbatch.common.logging import get_logger
from depthbatch.frontend.http.schemas import HTTP_RANGES, SHAPES
from depthbatch.frontend.params import FLAGS, complaint
from depthbatch.frontend.prompt_checks import ContextLengthError

log = get_logger("http")

UNION_TAGS = ("str", "int", "float", "bool", "dict")  # what pydantic adds to a location for the arms of a union


NOT_SERVED = {
    "/v1/responses": " (this server keeps no conversations and calls no tools: send the messages to /v1/chat/completions)",
    "/v1/embeddings": " (this server generates; it has no embeddings)",
}


class ApiError(Exception):
    """An answer that is not 2xx. ``param`` names the field at fault, ``code`` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON object; also the payload of an SSE error event."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 401 else "server_error"
        if self.status == 401:
            kind = "authentication_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))


def bad_value(param: str, message: str) -> ApiError:
    """400 for one field."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def overloaded(message: str, retry_after_s: int = 1) -> ApiError:
    """503 that tells the client when to come back."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": str(retry_after_s)})


def as_api_error(error: BaseException) -> ApiError:
    """Any exception of a request as its answer; unexpected ones are logged with their traceback and say nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=code_of(error))
    if isinstance(error, OverloadedError):
        return overloaded(str(error), error.retry_after_s)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead", headers={"Retry-After": "5"})
    if isinstance(error, RequestKillsWorkerError):
        return ApiError(
            500, str(error), code="worker_died", headers={"x-should-retry": "false"}
        )  # OpenAI's clients obey
    log.error("internal error", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def code_of(error: RequestError) -> str:
    """The word for programs."""
    return "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"


def _validation_error(error: RequestValidationError) -> ApiError:
    """One line with the field's name, in the words that the field has on every way in. Unions complain once an arm: the
    first complaint says where, the field's shape what would be right."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    where = [part for part in first["loc"] if part not in ("body", "query")]
    if not where or not isinstance(error.body, dict):
        return ApiError(400, "the body must be a JSON object (Content-Type: application/json)", code="invalid_json")
    name = str(where[0])
    return ApiError(400, _complaint(name, where, first, error.body.get(name)), param=name, code="invalid_value")


def _complaint(name: str, where: list[Any], first: Mapping[str, Any], value: Any) -> str:
    own = complaint(name, value) if first["type"] != "bool_type" or name in FLAGS else None
    if own is not None:
        return own
    if first["type"] == "missing":
        return f"{_path(where)} is missing"
    given = shown(first["input"])
    if first["type"] == "bool_type":
        return f"{_path(where)} must be true or false, not {given}"
    if name in HTTP_RANGES:
        return f"{name} must be {HTTP_RANGES[name]}, not {given}"
    if limits := _text_limits(first):
        return f"{_path(where)} must be {limits}, not {given}"
    fields = [part for part in where if isinstance(part, str) and part in SHAPES]
    if fields and first["type"] != "value_error":
        place = _path(where[: where.index(fields[-1]) + 1])
        return f"{place} must be {SHAPES[fields[-1]]}, not {given}"
    return f"{_path(where)}: {first['msg'].removeprefix('Value error, ')}"  # pydantic's own words in front of ours


def _text_limits(first: Mapping[str, Any]) -> str | None:
    """What a text with limits of its own may be; None when the complaint is about something else."""
    if first["loc"][-1] != "name":
        return None
    if first["type"] == "string_pattern_mismatch":
        return "1 to 64 of the characters A-Z, a-z, 0-9, _ and -"
    return f"a text of at most {first['ctx']['max_length']} characters" if first["type"] == "string_too_long" else None


def _path(where: list[Any]) -> str:
    """messages[0].content: the location without the arms of unions that pydantic puts into it."""
    text = str(where[0])
    for part in where[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in UNION_TAGS:
            text += f".{part}"
    return text


def install_handlers(app: FastAPI) -> None:
    """Every error of the app leaves in OpenAI shape, those of the framework included."""

    async def on_any(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def on_validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error).response()

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message, code = str(error.detail), None
        if error.status_code == 404:
            reason = NOT_SERVED.get(request.url.path.rstrip("/"), "")
            message = f"no such path: {request.url.path[:200]}{reason}"
        elif error.status_code == 400:
            message, code = "the body is not valid JSON", "invalid_json"  # not UTF-8, or nested too deeply to parse
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (ApiError, RequestError, OverloadedError, RequestKillsWorkerError, EngineDeadError, Exception):
        app.add_exception_handler(kind, on_any)
