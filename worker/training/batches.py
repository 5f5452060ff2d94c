"""Token batches for training: encoded examples, plain or as chat, grouped by length.

A step's batches are a function of (seed, step) alone, so a resumed run sees the same data.
"""

import itertools
import random
from typing import NamedTuple

import torch
from depthbatch.worker.training.data import Example, draw, draw_training
from depthbatch.worker.training.tokenizer import END_OF_TEXT, IM_END, chat_text
from tokenizers import Tokenizer
from torch import Tensor

IGNORED = -100
CHAT_SHARE = 0.25
GROUPS = 4


class Batch(NamedTuple):
    """Right-padded rows: input ids [B, T] and the next token at each supervised position, else -100."""

    ids: Tensor
    targets: Tensor


def render(example: Example, rng: random.Random) -> str:
    """The prompt as plain text or, for a quarter of the draws, as a chat with up to two earlier turns."""
    if rng.random() >= CHAT_SHARE:
        return example.prompt
    earlier = [draw(rng, rng.choice(("copy", "count", "add"))) for _ in range(rng.choice((0,) * 6 + (1, 2)))]
    return chat_text([(turn.prompt, turn.answer) for turn in earlier], example.prompt)


def collate(rows: list[tuple[list[int], list[int]]]) -> Batch:
    """Pad (prompt ids, answer ids) rows; answers are supervised, prompts and padding are not."""
    length = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    ids = torch.full((len(rows), length), END_OF_TEXT)
    targets = torch.full((len(rows), length), IGNORED)
    for i, (prompt, answer) in enumerate(rows):
        whole = prompt + answer
        ids[i, : len(whole) - 1] = torch.tensor(whole[:-1])
        targets[i, len(prompt) - 1 : len(whole) - 1] = torch.tensor(answer)
    return Batch(ids, targets)


def step_batches(tokenizer: Tokenizer, seed: int, step: int, size: int) -> list[Batch]:
    """The batches of one training step: `size` examples sorted by length and cut in up to four groups.

    Args:
        tokenizer: encodes text to ids.
        seed: seed of the run.
        step: step number from 0.
        size: examples in the step, at least 1.
    """
    rng = random.Random(f"batch-{seed}-{step}")
    rows = []
    for _ in range(size):
        example = draw_training(rng)
        answer = [*tokenizer.encode(example.answer).ids, IM_END]
        rows.append((tokenizer.encode(render(example, rng)).ids, answer))
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    # Most rows are long pointer prompts; the first third holds all the short ones.
    cuts = sorted({size * group // GROUPS for group in range(GROUPS + 1)})
    return [collate(rows[start:end]) for start, end in itertools.pairwise(cuts)]
