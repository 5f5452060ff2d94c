"""The server's own page: a playground, live figures and the schedule, from files that come with the package."""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path

from fastapi import APIRouter, HTTPException
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# Nothing from elsewhere, no script in the document, no text that becomes markup, no frame around it.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_DOCUMENT = "page.html"
_FILES = sorted(path for path in STATIC.iterdir() if path.suffix in TYPES)
PATHS = frozenset({"/", "/page/server.json", *(f"/page/{path.name}" for path in _FILES if path.name != _DOCUMENT)})


def loading_page(message: str, done: int, total: int) -> Response:
    """What a browser gets at ``/`` until there is a model: it asks again by itself, without a script."""
    bar = f'<progress max="{total}" value="{done}"></progress>' if total else "<progress></progress>"
    document = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>depthbatch: loading</title>'
        f'<h1>depthbatch</h1><p role="status">{escape(message)}</p><p>{bar}</p>'
    )
    headers = {**HEADERS, "Cache-Control": "no-store", "Retry-After": "5"}
    return Response(document, 503, headers, media_type="text/html")


def routes(facts: Mapping[str, object]) -> APIRouter:
    """``/`` and the files that it is made of. They are read once. ``facts``: what the page must know before it has a key."""
    router = APIRouter()
    answers = {path.name: (path.read_bytes(), TYPES[path.suffix]) for path in _FILES}
    answers["server.json"] = (json.dumps(facts).encode(), "application/json")

    def answer(name: str) -> Response:
        content, media_type = answers[name]
        return Response(content, media_type=media_type, headers=HEADERS)

    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    async def document() -> Response:
        """The document; it holds no secret, so it asks for none."""
        return answer(_DOCUMENT)

    @router.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        """Its style, scripts and icon."""
        if f"/page/{name}" not in PATHS:
            raise HTTPException(404)
        return answer(name)

    return router
