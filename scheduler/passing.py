"""Who passes a head of the queue that lacks blocks, so that what fits does not wait for what does not (scheduling.md).

The head waits for sequences that ran when it came to lack blocks, the *old* ones. How many tokens these may still give
until the head's blocks are there is known from their limits; whoever must end within as many tokens costs the head
nothing, as far as all sequences get tokens equally fast. Once the old ones have ended nobody passes, so that the head
never waits for more than them and those who have passed by then.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from depthbatch.scheduler.requests import Request

WINDOW = 16  # requests behind the head that are looked at


def tokens_to_wait(head: Request, missing: int, running: Iterable[Request | None], held: npt.NDArray[np.int32]) -> int:
    """Tokens until old sequences have given back the blocks that the head is ``missing``; 0 once they have, or have
    ended. ``held``: blocks of each slot."""
    assert head.blocked_since is not None
    old = []
    for request in running:
        if request is None:
            continue
        if request.admitted <= head.blocked_since:
            old.append((request.limit - request.dispatched, int(held[request.slot])))
        else:
            missing -= int(held[request.slot])
    if missing <= 0:
        return 0
    last = 0
    for tokens, blocks in sorted(old):
        last, missing = tokens, missing - blocks
        if missing <= 0:
            break
    return last
