"""The access log: a line for each request with method, path, status and seconds. Neither bodies, queries nor headers."""

import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from depthbatch.common.logging import get_logger

SHOWN_PATH = 200  # characters

log = get_logger("access")


class AccessLog:
    """ASGI middleware around everything. A request whose client left before there was an answer has "-" as its status."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_s, status = time.monotonic(), "-"

        async def noted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, noted_send)
        finally:
            path = quote(scope["path"])[:SHOWN_PATH]  # quoted: no line ends, no terminal codes
            log.info("%s %s %s %.3f s", scope["method"], path, status, time.monotonic() - began_s)
