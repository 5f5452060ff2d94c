"""An engine of eight slots and a hundred blocks of four tokens, and requests for it."""

import numpy as np

from depthbatch.common.messages import RequestParams, Submit
from depthbatch.scheduler.config import SchedulerConfig

BASE = SchedulerConfig(
    policy="refill",
    max_num_seqs=8,
    max_num_batched_tokens=16,
    min_free_slots=1,
    min_coda_batch=1,
    r_max=4,
    block_size=4,
    num_blocks=101,
    max_model_len=64,
    buckets=(8,),
    vocab_size=40,
)


def submit(request_id: int, prompt: int | list[int] = 5, tokens: int = 4, client: int = 0, **params: object) -> Submit:
    """``prompt``: its tokens, or how many; ``tokens``: of its output."""
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    fields = {"max_tokens": tokens, "max_loops": 4, "seed": request_id} | params
    data = (np.asarray(ids, np.int32) % 40).tobytes()
    return Submit(request_id, data, RequestParams(**fields), client=client)  # type: ignore[arg-type]
