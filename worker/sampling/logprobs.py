"""Logprobs of tokens and of the likeliest ones beside them, as rows of int32 (common.frames).

From the raw logits: before temperature, penalties, filters and grammars, as OpenAI and vLLM report them.
"""

import torch
from torch import Tensor

from depthbatch.common.frames import MAX_LOGPROBS

SLICE_ROWS = 256  # prompt positions whose logits exist at a time


def num_likeliest(vocab_size: int) -> int:
    """Likeliest tokens in a row of logprobs: a small vocabulary may have fewer than asked for."""
    return min(MAX_LOGPROBS, vocab_size)


def logprob_rows(logits: Tensor, tokens: Tensor) -> Tensor:
    """logits fp32 [N, V], tokens int32 [N] -> int32 [N, 1 + 2 k]."""
    total = torch.logsumexp(logits, -1, keepdim=True)
    own = logits.gather(1, tokens.long().unsqueeze(1)) - total
    values, likeliest = torch.topk(logits, num_likeliest(logits.shape[1]), dim=-1)
    floats = torch.cat([own, values - total], 1).view(torch.int32)
    return torch.cat([floats[:, :1], likeliest.to(torch.int32), floats[:, 1:]], 1)
