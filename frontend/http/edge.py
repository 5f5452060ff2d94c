"""ASGI middleware in front of every route: API key, body size and pace. Knows nothing of what the bodies mean."""

import asyncio
import hmac
from collections import deque

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from depthbatch.common.errors import shown
from depthbatch.frontend.background import panics_as_errors
from depthbatch.frontend.http.error_answers import ApiError
from depthbatch.frontend.http.page import PATHS

# what probes, scrapers and browsers read without a key; everything that names or runs a model needs one
OPEN_PATHS = PATHS | {"/health", "/ready", "/metrics", "/version", "/get_load", "/v1/loads", "/docs", "/openapi.json"}
UNPACED_PATHS = OPEN_PATHS | {"/abort"}  # an abort makes room for those who wait
STARTS_PER_TURN = 4  # a millisecond or two each


CLIENT = "depthbatch.client"  # in the scope: the number of the API key, 0 where none is asked for


def client_of(request: Request) -> int:
    """Whose request it is."""
    client: int = request.scope[CLIENT]
    return client


class BodyTooLarge(ApiError):
    """413."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the body is larger than {limit} bytes", code="body_too_large")


class Turnstile:
    """Lets ``per_turn`` requests through in one turn of the running event loop, the others in later turns in order of
    arrival, so that a turn stays short however many arrive.

    A turn runs everything that is ready. Above capacity, the requests that arrive during one turn would make the next one
    longer, in which more arrive: turns of seconds, and every stream and probe waits for them.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn  # of this turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        """Returns at once if there is room in this turn and nobody waits."""
        if self._left and not self._waiting:
            self._left -= 1
            self._turn_later()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._turn_later()
        await turn

    def _turn_later(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turning = False
        self._left = self._per_turn
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else whoever waited was cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < self._per_turn:
            self._turn_later()


class Edge:
    """Refuses requests without a key, and bodies over the limit before they are read whole. Probes and aborts pass at once,
    whatever else waits to start."""

    def __init__(self, app: ASGIApp, api_keys: tuple[bytes, ...], max_body_bytes: int) -> None:
        self.app = app
        self.api_keys = api_keys
        self.max_body_bytes = max_body_bytes
        self._turnstile = Turnstile(STARTS_PER_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scope[CLIENT] = self._client(headers.get(b"authorization", b""))
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        if scope["path"] not in UNPACED_PATHS:
            await self._turnstile.enter()
        await self._bounded(scope, receive, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        path = scope["path"]
        if self.api_keys and path not in OPEN_PATHS and not scope[CLIENT]:
            return ApiError(401, "no valid API key", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.strip().lower() not in ("identity", ""):
            return ApiError(415, f"content-encoding {shown(encoding)}: send the body as it is", code="compressed_body")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_body_bytes:
            return BodyTooLarge(self.max_body_bytes)
        return None

    def _client(self, authorization: bytes) -> int:
        """The number of the key, from 1; 0 without a good one."""
        scheme, _, key = authorization.partition(b" ")
        # every key is compared, each in constant time: how long it takes says nothing
        matches = [hmac.compare_digest(key.strip(), known) for known in self.api_keys]
        return 1 + matches.index(True) if scheme.lower() == b"bearer" and any(matches) else 0

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the body on and counts it: a chunked body does not say its length."""
        read = 0
        too_large = False
        started = False

        async def counted_receive() -> Message:
            nonlocal read, too_large
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_body_bytes:
                too_large = True
                raise BodyTooLarge(self.max_body_bytes)
            return message

        async def guarded_send(message: Message) -> None:
            nonlocal started
            if too_large and not started:
                return  # the framework's own words for a body that could not be read
            started = True
            await send(message)

        with panics_as_errors():
            await self.app(scope, counted_receive, guarded_send)
        if too_large and not started:
            await BodyTooLarge(self.max_body_bytes).response()(scope, receive, send)
