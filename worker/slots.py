"""What the worker keeps of every slot: one row a slot in static device tensors, gathered and scattered by slot index.

Slot 0 is a dummy: padding rows read and write it, so padding needs no special case. Knows nothing of requests, of
queues, or of where a sequence is: positions and loops arrive with every row.
"""

import torch
from torch import Tensor

from depthbatch.common.errors import ModelError
from depthbatch.common.frames import SLOT_PARAM_WORDS, lane_of
from depthbatch.worker.models.interface import ModelSpec, WorkItem
from depthbatch.worker.sampling.logits_processors import Shaping
from depthbatch.worker.sampling.slot_params import SlotParams


class SlotState:
    """Static tensors of ``num_slots`` slots and the dummy.

    ::

        lane        0      1      2   ...  lanes * num_slots             (common.frames.lane_of; a slot without drafts)
        token       .      t      t          t          int32 [L*S+1]    the token whose prelude runs here next
        item[i]     .      x      x          x          dtype [L*S+1, D] one tensor a name of spec.work_item
        survival    .      s      s          s          fp32  [L*S+1]    S_t of the token in the core
        cumulated   .      c      c          c          fp32  [L*S+1]    p_1 + .. + p_t of the token in the core

        slot        0      1      2   ...  num_slots
        params      .      p      p          p          int32 [S+1, SLOT_PARAM_WORDS]
        block_table .      b      b          b          int32 [S+1, max_blocks]   logical blocks
        shaping     counts, penalties' and grammars' tables: worker/sampling/logits_processors.py
    """

    def __init__(self, num_slots: int, max_blocks: int, spec: ModelSpec, device: torch.device, lanes: int = 1) -> None:
        rows, states = num_slots + 1, lanes * num_slots + 1
        self.num_slots = num_slots
        self.max_blocks = max_blocks
        self.lanes = lanes
        self._model, self._names = spec.architecture, spec.work_item
        self.token = torch.zeros(states, dtype=torch.int32, device=device)
        self.item: WorkItem = tuple(
            torch.zeros(states, spec.hidden_size, dtype=spec.dtype, device=device) for _ in spec.work_item
        )
        self.survival = torch.ones(states, dtype=torch.float32, device=device)
        self.cumulated = torch.zeros(states, dtype=torch.float32, device=device)
        # Lane of the next position, by lane.
        self.next_lane = (torch.arange(states, device=device) - 1 + num_slots) % max(states - 1, 1) + 1
        self.next_lane[0] = 0
        self.params = torch.zeros(rows, SLOT_PARAM_WORDS, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.shaping = Shaping(rows, spec.vocab_size, device)

    @staticmethod
    def bytes_needed(num_slots: int, max_blocks: int, spec: ModelSpec, lanes: int = 1) -> int:
        """Of ``tensors``, before there are any."""
        rows, states = num_slots + 1, lanes * num_slots + 1
        a_state = 20 + len(spec.work_item) * spec.hidden_size * spec.dtype.itemsize
        a_row = 4 * (SLOT_PARAM_WORDS + max_blocks) + Shaping.bytes_a_row(spec.vocab_size)
        return states * a_state + rows * a_row

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that lives as long as the worker; none may ever be replaced."""
        return (
            self.token,
            *self.item,
            self.survival,
            self.cumulated,
            self.params,
            self.block_table,
            self.next_lane,
            *self.shaping.tensors(),
        )

    def set_params(self, rows: Tensor) -> None:
        """Takes rows of the slot parameter frame: int32 [n, SLOT_PARAM_WORDS], on the device."""
        self.params.index_copy_(0, SlotParams(rows).slot.long(), rows)

    def gather_params(self, slots: Tensor) -> SlotParams:
        """Parameters of the rows; slots int64 [N]."""
        return SlotParams(self.params.index_select(0, slots))

    def lanes_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Lanes of the tokens at ``positions`` [N] of ``slots`` int64 [N]."""
        if self.lanes == 1:
            return slots
        lanes: Tensor = lane_of(slots, positions, self.num_slots, self.lanes)
        return torch.where(slots > 0, lanes, 0).long()

    def next_lanes(self, lanes: Tensor) -> Tensor:
        """Lanes of the positions behind those of ``lanes`` int64 [N]."""
        return lanes if self.lanes == 1 else self.next_lane.index_select(0, lanes)

    def gather_item(self, lanes: Tensor) -> WorkItem:
        """The work items of the rows, each [N, D]; lanes int64 [N]."""
        return tuple(tensor.index_select(0, lanes) for tensor in self.item)

    def scatter_item(self, lanes: Tensor, item: WorkItem) -> None:
        """Puts the rows' work items back; lanes int64 [N]. ModelError when the model does not give as many tensors as it
        declares; the warm-up shows it."""
        if len(item) != len(self.item):
            raise ModelError(
                f"{self._model}: 'work_item' names {len(self.item)} tensors ({', '.join(self._names)}),"
                f" the stages give {len(item)}"
            )
        for tensor, rows in zip(self.item, item, strict=True):
            tensor.index_copy_(0, lanes, rows)

    def put_blocks(self, slots: Tensor, columns: Tensor, blocks: Tensor) -> None:
        """block_table[slot, column] = block where block > 0; slots, columns int64 [N], blocks int32 [N]."""
        flat = self.block_table.view(-1)
        index = slots * self.max_blocks + columns
        flat.index_copy_(0, index, torch.where(blocks > 0, blocks, flat.index_select(0, index)))
