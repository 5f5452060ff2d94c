"""The next token of every row, as a function of its logits, its parameters, its seed and its position alone.

Semantics of vLLM: logits / temperature, then top-k, top-p, min-p on what is left. One uniform number a row, a hash of
(seed, position of the new token), is put through the inverse of the cumulated distribution in vocabulary order, so
neither neighbours nor batch shape can change a draw. Fixed shapes, no host synchronisation. Knows nothing of slots.
"""

import numpy as np
import torch
from torch import Tensor

from depthbatch.worker.layers.ops import temper
from depthbatch.worker.sampling.random_numbers import uniform
from depthbatch.worker.sampling.slot_params import SlotParams

TOKEN_LANE = 0  # draws of one (seed, position) that serve different ends use different lanes


def greedy_tokens(logits: Tensor) -> Tensor:
    """Exact argmax; logits fp32 [N, V] -> int32 [N]."""
    return logits.argmax(-1).to(torch.int32)


def sample_tokens(logits: Tensor, params: SlotParams, positions: Tensor, filtered: bool) -> Tensor:
    """Draws the tokens of ``positions`` int32 [N] (where the new token goes); logits fp32 [N, V] -> int32 [N].

    Rows with temperature 0 are greedy. ``filtered`` False leaves out top-k, top-p and min-p: right exactly when no row
    uses them; it skips the sort, and cannot change what a row without them draws.
    """
    hot = params.temperature > 0
    weights = temper(logits, torch.where(hot, params.temperature, 1.0))
    if filtered:
        weights = _filter(weights, params)
    number = uniform(params.seed_low, params.seed_high, positions, TOKEN_LANE)
    drawn = _inverse_cdf(weights, number)
    return torch.where(hot, drawn, greedy_tokens(logits))


def _filter(weights: Tensor, params: SlotParams) -> Tensor:
    """Zeroes what top-k, then top-p, then min-p leave out; the likeliest token always stays. fp32 [N, V].

    Each filter keeps a head of the descending order, so together they keep what is at least the last weight kept.
    Cutting by value needs the sorted values alone, and treats equal weights alike whatever the sort does with them.
    """
    ordered = _descending(weights)
    vocab = weights.shape[1]
    rank = torch.arange(vocab, dtype=torch.int32, device=weights.device)
    top_k = torch.where(params.top_k > 0, params.top_k, vocab).unsqueeze(1)
    head = torch.where(rank < top_k, ordered, 0.0)
    above = head.cumsum(-1, dtype=torch.float64) - head  # weight of all likelier tokens
    total = head.sum(-1, keepdim=True, dtype=torch.float64)
    top_p = params.top_p.unsqueeze(1)
    kept = (rank < top_k) & ((above < top_p * total) | (top_p >= 1.0)) & (ordered >= params.min_p.unsqueeze(1))
    last = (kept.sum(-1, keepdim=True) - 1).clamp_min(0)
    return torch.where(weights >= ordered.gather(1, last), weights, 0.0)


def _descending(weights: Tensor) -> Tensor:
    """The values of each row, largest first. On the CPU by numpy, whose vectorised sort takes a quarter of the time."""
    if weights.device.type == "cpu":
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
    return torch.sort(weights, dim=-1, descending=True).values


def _inverse_cdf(weights: Tensor, number: Tensor) -> Tensor:
    """First index whose cumulated weight exceeds number * total; weights fp32 [N, V], number [N] in [0, 1) -> int32 [N]."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    target = number.double().unsqueeze(1) * cumulated[:, -1:]
    index = torch.searchsorted(cumulated, target, right=True).squeeze(1)
    return index.clamp_max(weights.shape[1] - 1).to(torch.int32)
