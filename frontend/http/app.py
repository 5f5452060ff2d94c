"""The FastAPI application: routers, error handlers and the edge, put together, and its page /docs. Starts nothing."""

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse

from depthbatch import __version__
from depthbatch.frontend.http import chat, completions, operations, page, router_routes
from depthbatch.frontend.http.edge import Edge
from depthbatch.frontend.http.error_answers import install_handlers
from depthbatch.frontend.http.generation import Service

WORD_LIMIT = 2**31 - 1
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#1b1f24}"
    "h2{margin-top:2em;border-bottom:1px solid #d0d7de}code{font-size:.95em;background:#f3f4f6;padding:.1em .3em}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.3em .6em;"
    "border-bottom:1px solid #e5e7eb}.m{display:inline-block;min-width:3.5em;font-weight:600;color:#0550ae}"
)


def create_app(service: Service, probe: operations.Probe) -> FastAPI:
    """The application over a running engine."""

    app = FastAPI(title="depthbatch", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(completions.routes(service))
    app.include_router(chat.routes(service))
    app.include_router(operations.routes(service, probe))
    app.include_router(router_routes.routes(service, probe))
    if service.config.page == "on":
        app.include_router(page.routes(_facts(service, probe)))
    install_handlers(app)
    app.add_middleware(Edge, api_keys=service.config.api_keys, max_body_bytes=service.config.max_body_bytes)
    if service.config.origins:  # outside the edge: a browser asks whether it may, before it has a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    _use_400_for_422(app)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    return app


def _facts(service: Service, probe: operations.Probe) -> dict[str, object]:
    """What this server has of what the page offers."""
    tokenizer = service.texts.tokenizer
    return {
        "version": __version__,
        "api_key": bool(service.config.api_keys),
        "tokenizer": tokenizer is not None,
        "chat": tokenizer is not None and tokenizer.has_chat_template,
        "stage_trace": probe.stages() is not None,
    }


def _use_400_for_422(app: FastAPI) -> None:
    """FastAPI documents 422 for bad bodies; ours answer 400, which every route documents."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(name, None)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def docs_page(document: dict[str, Any]) -> str:
    """An OpenAPI document as one plain page. No scripts and nothing from elsewhere: servers without internet have it, and
    no third party learns who reads it."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    body = "".join(_operation(document, path, method, op) for path, method, op in _operations(document))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f"<h1>{title}</h1><p>The same as a document for programs: <a href=openapi.json>openapi.json</a></p>{body}"
    )


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _operation(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [f"<h2 id='{escape(operation['operationId'])}'><span class=m>{method.upper()}</span>{escape(path)}</h2>"]
    parts.append(f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>")
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        parts.append(_fields(document, _resolve(document, body)))
    statuses = ", ".join(sorted(operation["responses"]))
    parts.append(f"<p>Answers: {escape(statuses)}</p>")
    return "".join(parts)


def _fields(document: dict[str, Any], schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for name, field in schema.get("properties", {}).items():
        mark = " (required)" if name in required else ""
        kind = escape(_kind(document, field))
        text = escape(field.get("description", ""))
        rows.append(f"<tr><td><code>{escape(name)}</code>{mark}<td>{kind}<td>{text}")
    return f"<table><tr><th>field<th>type<th>{''.join(rows)}</table>"


def _kind(document: dict[str, Any], field: dict[str, Any]) -> str:
    """A type in a few words."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        kinds = [_kind(document, option) for option in field["anyOf"]]
        return " or ".join(kind for kind in dict.fromkeys(kinds) if kind != "null")
    if field.get("type") == "array":
        return f"list of {_kind(document, field.get('items', {}))}"
    kind = str(field.get("type", "any"))
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    bounds = f"{'above' if 'exclusiveMinimum' in field else 'from'} {low:g}" if _says_something(low) else ""
    bounds += f" to {high:g}" if _says_something(high) else ""
    return f"{kind} {bounds.strip()}".strip()


def _says_something(bound: float | None) -> bool:
    """Limits of the integer type itself are no news."""
    return bound is not None and abs(bound) < WORD_LIMIT


def _resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: dict[str, Any] = document["components"]["schemas"][reference.rpartition("/")[2]]
    return found
