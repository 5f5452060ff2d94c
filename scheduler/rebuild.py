"""How a sequence that has lost its K/V (preempted, its worker or its scheduler dead) gets the same ones back.

What is known of it: prompt, output, and the exit depth of every output token. Output token k is the one that the decode
step of token k - 1 has sampled, so its depth is how deep token k - 1 went; the first one comes from prefill. ::

    tokens      p0 .. pn  o0   o1   o2        decode goes on with o2, which was sampled and never fed
    loops run   r_max     d1   d2   -         d = request.depths

Where every loop has a plane of its own, a prefill over all but the last token gives what decode had written, if each
token stops at its depth: its K/V of deeper loops are those of its last one, as an early exit leaves them. Where loops
share a plane, tokens of one prefill see each other at the loop that they are at, whereas in decode the earlier one had
come to its end. There the prompt alone is prefilled, cut where it was (``next_cut``), and the output is decoded once
more beside all other rows: at its known depths, with forced tokens (those it has said), and what is sampled is dropped.

A sequence whose K/V were copied to host memory gets them back bit for bit (offload.py) in the prefill that gives it its
slot. That runs over the last of the tokens that are in the cache, at depth 0: its K/V stay what they are.

In each case the last token enters as an ordinary row: its depth is its gate's to decide, as it would have been.
"""

import numpy as np

from depthbatch.common.frames import FORCED_TOKEN_FIELDS
from depthbatch.common.messages import StageExtra
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.rows import RowState, SlotArray


def next_cut(request: Request, start: int, budget: int, most: int) -> int:
    """Tokens of the chunk of a request's prefill that begins at ``start``. Where loops share a plane, what a prompt holds
    depends on where it is cut, so it is cut where it was, or else every ``most`` tokens (M), and nowhere else: above
    ``budget`` where that does not fit beside what is in the batch already."""
    done = 0
    for cut in request.cuts:
        if done == start:
            return cut
        done += cut
    return min(most if request.forced_decode else budget, request.length - start)


def cuts_to_remember(request: Request) -> bytes:
    """int32 tokens of each chunk of the prompt, for whoever may have to submit the request again; none if it is whole."""
    return np.asarray(request.cuts, "<i4").tobytes() if len(request.cuts) > 1 else b""


def chunk_depths(request: Request, start: int, length: int, r_max: int) -> bytes:
    """uint8 [length]: loops that each token of a chunk of a prefill runs."""
    if request.restored:
        return bytes(length)
    of_prompt = max(0, min(length, request.prompt.size - start))
    first = 1 + max(0, start - request.prompt.size)
    return bytes([r_max]) * of_prompt + bytes(request.depths[first : first + length - of_prompt])


def forced_token(request: Request) -> int:
    """The forced token that decode goes on with behind the prefill of a request that has output."""
    return request.output[request.length - request.prompt.size]


def start_decode(rows: RowState, request: Request) -> None:
    """A prefill is over: the row decodes, forced tokens first where it has to."""
    rows.start_decode(request.slot, request.computed)
    if request.forced_decode and len(request.output) > 1 and not request.restored:
        rows.set_forced(request.slot, True)


def feed_forced_tokens(rows: RowState, slots: SlotArray) -> StageExtra:
    """Prelude of rows of which some are fed forced tokens: their tokens, and the depths these had. The last token's depth
    is not known, so its row is from then on as any other."""
    forced = slots[rows.forced[slots]]
    fed = np.empty((forced.size, FORCED_TOKEN_FIELDS), np.int32)
    for index, slot in enumerate(forced.tolist()):
        request = rows.request[slot]
        assert request is not None
        ordinal = int(rows.position[slot]) - request.prompt.size
        fed[index] = slot, request.output[ordinal]
        if ordinal + 1 < len(request.output):
            rows.force_depth(slot, request.depths[ordinal + 1])
        else:
            rows.set_forced(slot, False)
    return StageExtra(forced_tokens=fed.tobytes())
