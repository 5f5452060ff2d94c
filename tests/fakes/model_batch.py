"""Runs the stages of a model over rows of several sequences, with an attention as plain as can be."""

import torch

from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.models.interface import LoopedModel, WorkItem
from fakes.contiguous_attention import ContiguousMemory, Row


class Batch:
    """Runs stages of a model over rows of several sequences."""

    def __init__(self, model: LoopedModel, layout: KVLayout, sequences: int, state_seed: int = 0) -> None:
        self.model, self.state_seed = model, state_seed
        self.memory = ContiguousMemory(model.spec, layout, sequences, capacity=80)

    def prelude(self, ids: list[int], rows: list[Row]) -> WorkItem:
        seeds = torch.full((len(rows),), self.state_seed, dtype=torch.int32)
        return self.model.prelude(torch.tensor(ids, dtype=torch.int32), positions(rows), seeds, self.memory.rows(rows))

    def core(self, item: WorkItem, rows: list[Row]) -> WorkItem:
        loops = torch.tensor([row.loop for row in rows], dtype=torch.int32)
        return self.model.core(item, positions(rows), loops, self.memory.rows(rows))

    def logits(self, item: WorkItem, rows: list[Row]) -> torch.Tensor:
        for row in rows:
            self.memory.fill(row)
        return self.model.logits(self.model.coda(item, positions(rows), self.memory.rows(rows)))

    def prefill(self, prompts: list[list[int]]) -> torch.Tensor:
        """All prompts packed, at full depth: logits [sequences, V] of the last positions."""
        rows = packed_rows(prompts, 1)
        item = self.prelude([token for prompt in prompts for token in prompt], rows)
        for loop in range(1, self.model.spec.r_max + 1):
            rows = [row._replace(loop=loop) for row in rows]
            item = self.core(item, rows)
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        return self.logits(item, rows)[ends]


def positions(rows: list[Row]) -> torch.Tensor:
    return torch.tensor([row.position for row in rows], dtype=torch.int32)


def packed_rows(prompts: list[list[int]], loop: int) -> list[Row]:
    """A row for every token of every prompt."""
    return [Row(s, p, loop) for s, prompt in enumerate(prompts) for p in range(len(prompt))]
