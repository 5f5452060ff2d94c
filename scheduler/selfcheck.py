"""Self-checks: free + held == total, no slot or block owned twice, no row without a request. Cheap when idle."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from depthbatch.scheduler.kv_blocks import HostPool
from depthbatch.scheduler.requests import Request, State
from depthbatch.scheduler.rows import FREE, PREFILLING

if TYPE_CHECKING:
    from depthbatch.scheduler.admission import Admission


class InvariantError(RuntimeError):
    """The books do not balance: a bug in the scheduler, never a user's fault."""


def check_idle(admission: "Admission") -> None:
    """No request is left, so everything must be free, once."""
    blocks, slots = admission.blocks, admission.slots
    _require(blocks.free == blocks.total, f"idle with {blocks.free} of {blocks.total} blocks free")
    _require(slots.free == slots.total, f"idle with {slots.free} of {slots.total} slots free")
    _require(len(admission.waiting) == 0 and admission.partial is None, "idle with a request in the waiting queue")
    host = None if admission.offload is None else admission.offload.host
    _require(host is None or host.free == host.total, "idle with K/V in host memory")
    rows = admission.rows
    _require(rows.count == [rows.phase.size - 1, *[0] * 7], f"idle with rows in queues {rows.count}")
    _require(np.unique(blocks.free_blocks()).size == blocks.total, "a block is in the free list twice")
    _require(len(set(slots.free_slots())) == slots.total, "a slot is in the free list twice")


def check_ownership(admission: "Admission", requests: Iterable[Request]) -> None:
    """Every slot and row has exactly one owner, and every block as many as its pool says, at any time."""
    rows, blocks, slots = admission.rows, admission.blocks, admission.slots
    held = [rows.table[slot, : rows.num_blocks[slot]] for slot in range(1, slots.total + 1)]
    owned, owners = np.unique(np.concatenate(held), return_counts=True)
    all_blocks = np.sort(np.concatenate([owned, blocks.free_blocks()]))
    _require(
        np.array_equal(all_blocks, np.arange(1, blocks.total + 1)), "blocks: free and held are not each block once"
    )
    _require(np.array_equal(owners, blocks.owners(owned)), "a block has more or fewer owners than its pool says")
    free = set(slots.free_slots())
    _require(len(free) == slots.free, "a slot is in the free list twice")
    requests = list(requests)
    active = {request.slot: request for request in requests if request.state is State.ACTIVE}
    _require(free.isdisjoint(active) and len(free) + len(active) == slots.total, "slots: free and held do not add up")
    for slot in range(1, slots.total + 1):
        idle = bool((rows.phase[rows.of_slot(slot)] == FREE).all())
        _require(idle == (slot in free), f"slot {slot} is free and in a queue, or neither")
        _require(rows.request[slot] is active.get(slot), f"slot {slot} has a row of another request")
    counts = np.bincount(rows.phase[1:], minlength=len(rows.count)).tolist()
    _require(counts == rows.count, f"queue sizes {rows.count} are not those of the rows {counts}")
    if admission.chains is not None:
        _require(admission.chains.counted(), "rows that follow another are miscounted")
        for request in active.values():
            _require(admission.chains.holds(request), f"slot {request.slot}: its rows are not its chain")
    if admission.offload is not None:
        _check_host(admission.offload.host, requests)
    partial = admission.partial
    _require(
        rows.count[PREFILLING] == (partial is not None) and (partial is None or active.get(partial.slot) is partial),
        "the partly prefilled prompt is not the row in prefill",
    )


def _check_host(host: HostPool, requests: Iterable[Request]) -> None:
    out = [request for request in requests if request.host_blocks is not None]
    _require(all(request.state is State.WAITING for request in out), "K/V of a request that runs are in host memory")
    blocks = np.concatenate([host.free_blocks(), *(r.host_blocks for r in out if r.host_blocks is not None)])
    _require(
        np.array_equal(np.sort(blocks), np.arange(host.total)), "host blocks: free and held are not each block once"
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
