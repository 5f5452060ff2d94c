"""The FastAPI application: routers, error handlers and the edge, put together. Starts nothing."""

from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from depthbatch import __version__
from depthbatch.frontend.http import chat, completions, operations
from depthbatch.frontend.http.docs_page import docs_page
from depthbatch.frontend.http.edge import Edge
from depthbatch.frontend.http.errors import install_handlers
from depthbatch.frontend.http.service import Service


def create_app(service: Service, probe: operations.Probe) -> FastAPI:
    """The application over a running engine."""

    app = FastAPI(title="depthbatch", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(completions.routes(service))
    app.include_router(chat.routes(service))
    app.include_router(operations.routes(service, probe))
    install_handlers(app)
    app.add_middleware(Edge, api_keys=service.config.api_keys, max_body_bytes=service.config.max_body_bytes)
    _use_400_for_422(app)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    return app


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
