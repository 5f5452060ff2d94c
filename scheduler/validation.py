"""What a frontend cannot know of a request is checked at submit: that it fits the cache, and what is said of one resumed.

The frontend has checked parameters and token ids; the worker checks ids once more before its kernels. Also builds the
Request of what can be served.
"""

import numpy as np

from depthbatch.common.errors import RequestError
from depthbatch.common.frames import Int32Array
from depthbatch.common.gates import Gate
from depthbatch.common.messages import MAX_PRIORITY, RequestParams, Submit
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.requests import Request


def make_request(submit: Submit, config: SchedulerConfig, full_depth: bool, arrival: int) -> Request:
    """The request in its initial state. Raises RequestError naming the field that makes it impossible."""
    params = submit.params
    _check_bytes(submit)
    prompt = np.frombuffer(submit.prompt, dtype="<i4").astype(np.int32)
    generated = np.frombuffer(submit.generated, dtype="<i4")
    _check_resumed(submit, generated, config)
    forced_decode = not config.kv_layout.keeps_every_loop(config.r_max)
    cuts = np.frombuffer(submit.cuts, "<i4").tolist()
    if forced_decode and generated.size and not cuts and prompt.size <= config.max_num_batched_tokens:
        cuts = [prompt.size]  # none were told because the prompt was prefilled whole, and so it must be again
    gate = _gate_in_force(params, config, full_depth)
    limit = min(params.max_tokens, config.max_model_len - prompt.size)
    _check_fits(prompt.size, limit, config)
    return Request(
        request_id=submit.request_id,
        prompt=prompt,
        params=params,
        gate=gate,
        limit=limit,
        client=submit.client,
        order=(MAX_PRIORITY - params.priority) * (1 << 40) + arrival,
        stop_ids=frozenset(params.stop_token_ids),
        first_exit=gate is Gate.LOOKAHEAD and Gate.PRELOOP in config.gates and params.min_loops == 1,
        output=generated.tolist(),
        depths=bytearray(submit.generated_depths),
        forced_decode=forced_decode,
        cuts=cuts,
        dispatched=generated.size,
        targets_sent=submit.prompt_logprobs_sent,
        targets_known=submit.prompt_logprobs_sent,
    )


def _gate_in_force(params: RequestParams, config: SchedulerConfig, full_depth: bool) -> Gate:
    """Gates that cannot fire are not asked: one of probabilities with a threshold of 1, any under a full-depth policy.
    Distances may be below any threshold."""
    gate = params.gate
    if full_depth and gate.may_exit_early:
        return Gate.NONE
    if gate.decides_on_device and not gate.compares_distances(config.gates) and params.exit_threshold >= 1.0:
        return Gate.NONE
    return gate


def _check_bytes(submit: Submit) -> None:
    """Bytes of int32 that are none, or whole ones."""
    for name in ("prompt", "generated", "cuts"):
        size = len(getattr(submit, name))
        _require(size % 4 == 0, name, f"{name} has {size} bytes, not whole int32")


def _check_resumed(submit: Submit, generated: Int32Array, config: SchedulerConfig) -> None:
    """What a frontend says of a request that it submits again."""
    depths, count = submit.generated_depths, generated.size
    _require(len(depths) == count, "generated_depths", f"{count} tokens so far came with {len(depths)} depths")
    _require(
        not count or 1 <= min(depths) <= max(depths) <= config.r_max,
        "generated_depths",
        f"generated_depths holds a depth outside 1..{config.r_max}",
    )
    _require(
        not count or 0 <= int(generated.min()) <= int(generated.max()) < config.vocab_size,
        "generated",
        f"generated holds a token id outside the vocabulary of {config.vocab_size}",
    )
    prompt_tokens = len(submit.prompt) // 4
    cuts, most = np.frombuffer(submit.cuts, "<i4").tolist(), config.max_num_batched_tokens
    _require(
        not cuts or (0 < min(cuts) <= max(cuts) <= most and sum(cuts) == prompt_tokens),
        "cuts",
        f"cuts {cuts} do not divide the prompt into prefills of at most {most} tokens",
    )
    sent = submit.prompt_logprobs_sent
    _require(0 <= sent <= prompt_tokens, "prompt_logprobs_sent", f"{sent} of {prompt_tokens} prompt logprobs sent")


def _check_fits(prompt_tokens: int, limit: int, config: SchedulerConfig) -> None:
    """The last output token is never written to the cache."""
    _require(prompt_tokens > 0, "prompt", "prompt is empty")
    _require(
        prompt_tokens < config.max_model_len,
        "prompt",
        f"prompt has {prompt_tokens} tokens; with one output token that is above max-model-len {config.max_model_len}",
    )
    needed = config.blocks_for(prompt_tokens + limit - 1)
    _require(
        needed <= config.usable_blocks,
        "max_tokens",
        f"{prompt_tokens} prompt + {limit} output tokens need {needed} KV blocks of {config.block_size} tokens, "
        f"the cache has {config.usable_blocks}",
    )


def _require(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise RequestError(message, param)
