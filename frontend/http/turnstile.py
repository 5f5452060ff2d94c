"""Few requests start in one turn of the event loop, so that a turn stays short however many arrive.

A turn of the loop runs everything that is ready. Above capacity, the requests that arrive during one turn would make
the next one longer, in which more arrive: turns of seconds, and every stream and probe waits for them. Knows nothing
of what a request is.
"""

import asyncio
from collections import deque


class Turnstile:
    """Lets ``per_turn`` through in one turn of the running event loop, the others in later turns in order of arrival."""

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
