"""Token batches for training: encoded examples, plain or as chat, grouped by length.

A step's batches are a function of (seed, step) alone, so a resumed run sees the same data.
"""

import itertools
import random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from depthbatch.training.data import CHAIN_LENGTH, Example, draw, draw_training, partial_answer
from depthbatch.training.demo_tokenizer import END_OF_TEXT, IM_END, chat_text

IGNORED = -100
CHAT_SHARE = 0.25
GROUPS = 4


class Batch(NamedTuple):
    """Right-padded rows.

    ``ids``: input ids [B, T].
    ``targets``: the next token at each supervised position, else -100, [B, T].
    ``partial``: the same with the answers after 0, 1, 2, .. look-ups; the last is ``targets``, [1 + look-ups, B, T].
    """

    ids: Tensor
    targets: Tensor
    partial: Tensor


def render(example: Example, rng: random.Random) -> str:
    """The prompt as plain text or, for a quarter of the draws, as a chat with up to two earlier turns."""
    if rng.random() >= CHAT_SHARE:
        return example.prompt
    earlier = [draw(rng, rng.choice(("copy", "count", "add"))) for _ in range(rng.choice((0,) * 6 + (1, 2)))]
    return chat_text([(turn.prompt, turn.answer) for turn in earlier], example.prompt)


class Row(NamedTuple):
    """Token ids of a prompt, of its answer, and of the answer after 0, 1, 2, .. look-ups."""

    prompt: list[int]
    answer: list[int]
    partial: list[list[int]]


def encode_row(tokenizer: Tokenizer, example: Example, prompt: str) -> Row:
    """Encode an example whose prompt text is ``prompt``; answers end with the end marker."""
    answer = [*tokenizer.encode(example.answer).ids, IM_END]
    partial = [[*tokenizer.encode(partial_answer(example, lookups)).ids, IM_END] for lookups in range(CHAIN_LENGTH)]
    return Row(tokenizer.encode(prompt).ids, answer, [*partial, answer])


def collate(rows: list[Row]) -> Batch:
    """Pad rows; answers are supervised, prompts and padding are not."""
    length = max(len(row.prompt) + len(row.answer) for row in rows) - 1
    ids = torch.full((len(rows), length), END_OF_TEXT)
    partial = torch.full((1 + CHAIN_LENGTH, len(rows), length), IGNORED)
    for i, row in enumerate(rows):
        whole = row.prompt + row.answer
        ids[i, : len(whole) - 1] = torch.tensor(whole[:-1])
        partial[:, i, len(row.prompt) - 1 : len(whole) - 1] = torch.tensor(row.partial)
    return Batch(ids, partial[-1], partial)


def step_batches(tokenizer: Tokenizer, seed: int, step: int, size: int) -> list[Batch]:
    """The batches of one training step: ``size`` examples sorted by length and cut in up to four groups.

    ``tokenizer``: encodes text to ids.
    ``seed``: seed of the run.
    ``step``: step number from 0.
    ``size``: examples in the step, at least 1.
    """
    rng = random.Random(f"batch-{seed}-{step}")
    rows = []
    for _ in range(size):
        example = draw_training(rng)
        rows.append(encode_row(tokenizer, example, render(example, rng)))
    rows.sort(key=lambda row: len(row.prompt) + len(row.answer))
    # Most rows are long pointer prompts; the first third holds all the short ones.
    cuts = sorted({size * group // GROUPS for group in range(GROUPS + 1)})
    return [collate(rows[start:end]) for start, end in itertools.pairwise(cuts)]
