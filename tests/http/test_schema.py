"""schemathesis over the OpenAPI document: requests drawn from it, valid and not, get only the answers it lists.

Row "bad parameter gives 500": no generated request may give a 5xx, an undocumented status or a body that differs
from its documented shape. A pass is not luck: the operations that were tried are compared with the routes.
"""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from fakes.http_server import LiveServer


def no_fault(context: Any, response: Any, case: schemathesis.Case) -> None:
    """No 5xx, but for the 504 that a drawn ``timeout_s`` asks for."""
    if response.status_code != 504 or "timeout_s" not in (case.body or {}):
        not_a_server_error(context, response, case)


CHECKS = [no_fault, status_code_conformance, response_schema_conformance]
OPERATIONS = {
    "POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models", "GET /v1/models/{model}", "POST /tokenize",
    "POST /detokenize", "GET /tokenizer_info", "POST /abort", "GET /health", "GET /ready", "GET /metrics",
    "GET /stage_trace", "GET /version", "GET /get_load", "GET /v1/loads", "GET /server_info", "GET /get_server_info",
    "GET /model_info", "GET /get_model_info", "POST /v1/completions/render", "POST /v1/chat/completions/render",
}  # fmt: skip
EXAMPLES = 12


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_operation(live: LiveServer, mode: GenerationMode) -> None:
    """Bodies that fit the document, and bodies that break it."""
    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    tried = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        tried.add(operation.label)
        if mode is GenerationMode.NEGATIVE and operation.method.upper() == "GET":
            continue

        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def answers_as_documented(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=20)

        answers_as_documented()
    assert tried == OPERATIONS


def test_streams_fit_their_documented_schema(live: LiveServer) -> None:
    """Bug: a stream was documented as a string, and schemathesis, which reads one event by event, refused it whenever a
    drawn body happened to ask for a stream. Here one always does."""
    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    bodies = {
        "POST /v1/completions": {"prompt": "hi", "stream": True, "max_tokens": 3},
        "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 3},
    }
    operations = {result.ok().label: result.ok() for result in schema.get_all_operations()}
    for label, body in bodies.items():
        operations[label].Case(body=body, media_type="application/json").call_and_validate(checks=CHECKS, timeout=20)
