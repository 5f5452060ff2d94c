"""What can never be served is refused at submit, with the numbers. Also builds the Request of what can."""

import math
from collections.abc import Callable

import numpy as np

from depthbatch.common.errors import RequestError
from depthbatch.common.frames import MAX_ADJUSTMENTS
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams, Submit
from depthbatch.scheduler.config import MAX_PRIORITY, SchedulerConfig
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.stage_batch import num_adjustments


def make_request(submit: Submit, config: SchedulerConfig, full_depth: bool, arrival: int) -> Request:
    """The request in its initial state. Raises RequestError naming the field that makes it impossible."""
    params = submit.params
    for check in _CHECKS:
        check(submit, config)
    prompt = np.frombuffer(submit.prompt, dtype="<i4").astype(np.int32)
    generated = np.frombuffer(submit.generated, dtype="<i4")
    _check_tokens(prompt, config, "prompt")
    _check_tokens(generated, config, "generated")
    forced_decode = not config.kv_layout.keeps_every_loop(config.r_max)
    cuts = np.frombuffer(submit.cuts, "<i4").tolist()
    if forced_decode and generated.size and not cuts and prompt.size <= config.max_num_batched_tokens:
        cuts = [prompt.size]  # none were told because the prompt was prefilled whole, and so it must be again
    limit = min(params.max_tokens, config.max_model_len - prompt.size)
    _check_fits(prompt.size, limit, config)
    return Request(
        request_id=submit.request_id,
        prompt=prompt,
        params=params,
        gate=_gate_in_force(params, config, full_depth),
        limit=limit,
        order=(MAX_PRIORITY - params.priority) * (1 << 40) + arrival,
        stop_ids=frozenset(params.stop_token_ids),
        output=generated.tolist(),
        depths=bytearray(submit.generated_depths),
        forced_decode=forced_decode,
        cuts=cuts,
        dispatched=generated.size,
        targets_sent=submit.prompt_logprobs_sent,
        targets_known=submit.prompt_logprobs_sent,
    )


def _gate_in_force(params: RequestParams, config: SchedulerConfig, full_depth: bool) -> Gate:
    """Gates that cannot fire are not asked: a cumulative one with a threshold of 1, any under a full-depth policy.
    OWN and DELAYED of a model with a convergence test are that test, which may fire at any threshold."""
    gate = params.gate
    if full_depth and gate.may_exit_early:
        return Gate.NONE
    cumulative = gate is Gate.LOOKAHEAD or (gate in (Gate.OWN, Gate.DELAYED) and Gate.CONVERGENCE not in config.gates)
    if cumulative and params.exit_threshold >= 1.0:
        return Gate.NONE
    return gate


def _check_prompt(submit: Submit, config: SchedulerConfig) -> None:
    for name in ("prompt", "generated", "cuts"):
        size = len(getattr(submit, name))
        _require(size % 4 == 0, name, f"{name} has {size} bytes, not whole int32")
    _require(len(submit.params.logit_bias) % 8 == 0, "logit_bias", "logit_bias is not pairs of token and float32")
    tokens = len(submit.prompt) // 4
    _require(tokens > 0, "prompt", "prompt is empty")
    _require(
        tokens < config.max_model_len,
        "prompt",
        f"prompt has {tokens} tokens; with one output token that is above max-model-len {config.max_model_len}",
    )


def _check_resumed(submit: Submit, config: SchedulerConfig) -> None:
    """What a frontend says of a request that it submits again."""
    depths, count = submit.generated_depths, len(submit.generated) // 4
    _require(len(depths) == count, "generated_depths", f"{count} tokens so far came with {len(depths)} depths")
    _require(
        not count or 1 <= min(depths) <= max(depths) <= config.r_max,
        "generated_depths",
        f"generated_depths holds a depth outside 1..{config.r_max}",
    )
    cuts, most = np.frombuffer(submit.cuts, "<i4").tolist(), config.max_num_batched_tokens
    _require(
        not cuts or (0 < min(cuts) <= max(cuts) <= most and sum(cuts) == len(submit.prompt) // 4),
        "cuts",
        f"cuts {cuts} do not divide the prompt into prefills of at most {most} tokens",
    )


def _check_limits(submit: Submit, config: SchedulerConfig) -> None:
    params = submit.params
    _require(params.max_tokens >= 1, "max_tokens", f"max_tokens must be at least 1, not {params.max_tokens}")
    _require(
        0 <= params.min_tokens <= params.max_tokens,
        "min_tokens",
        f"min_tokens must be in 0..max_tokens ({params.max_tokens}), not {params.min_tokens}",
    )
    _require(
        abs(params.priority) < MAX_PRIORITY,
        "priority",
        f"priority must be within +-{MAX_PRIORITY - 1}, not {params.priority}",
    )
    _require(
        math.isfinite(params.temperature) and params.temperature >= 0.0,
        "temperature",
        f"temperature must be finite and not negative, not {params.temperature}",
    )
    _require(-(1 << 63) <= params.seed < 1 << 64, "seed", f"seed must fit 64 bits, not {params.seed}")
    _require(0 <= params.top_k < 1 << 31, "top_k", f"top_k must be in 0..2^31-1, not {params.top_k}")


def _check_logits(submit: Submit, config: SchedulerConfig) -> None:
    params = submit.params
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    for name, value in zip(("presence_penalty", "frequency_penalty", "repetition_penalty"), penalties, strict=True):
        _require(math.isfinite(value), name, f"{name} must be finite, not {value}")
    _require(
        params.repetition_penalty > 0,
        "repetition_penalty",
        f"repetition_penalty must be above 0, not {params.repetition_penalty}",
    )
    bias = np.frombuffer(params.logit_bias, "<i4").reshape(-1, 2)
    tokens = bias[:, 0]
    _require(
        bool(((tokens >= 0) & (tokens < config.vocab_size)).all()),
        "logit_bias",
        f"logit_bias holds a token id outside the vocabulary of {config.vocab_size}",
    )
    _require(bool(np.isfinite(bias[:, 1].view(np.float32)).all()), "logit_bias", "logit_bias must be finite")
    entries = num_adjustments(params)
    _require(
        entries <= MAX_ADJUSTMENTS,
        "logit_bias",
        f"logit_bias and the stop tokens of min_tokens are {entries} tokens, more than {MAX_ADJUSTMENTS}",
    )
    stops = params.stop_token_ids
    _require(
        not stops or (min(stops) >= 0 and max(stops) < config.vocab_size),
        "stop_token_ids",
        f"stop_token_ids holds an id outside the vocabulary of {config.vocab_size}",
    )
    _require(
        not params.min_tokens or len(set(stops)) < config.vocab_size,
        "min_tokens",
        "min_tokens: every token of the vocabulary is a stop token",
    )


def _check_features(submit: Submit, config: SchedulerConfig) -> None:
    params = submit.params
    for name in ("logprobs", "prompt_logprobs"):
        _require(config.max_logprobs > 0 or not getattr(params, name), name, f"{name}: this device gives none")
    _require(config.grammars or not params.grammar, "grammar", "this engine cannot constrain output by a grammar")
    prompt_tokens = len(submit.prompt) // 4
    _require(
        0 <= submit.prompt_logprobs_sent <= prompt_tokens,
        "prompt_logprobs_sent",
        f"{submit.prompt_logprobs_sent} prompt logprobs sent of {prompt_tokens} prompt tokens",
    )


def _check_depth(submit: Submit, config: SchedulerConfig) -> None:
    params = submit.params
    _require(params.min_loops >= 1, "min_loops", f"min_loops must be at least 1, not {params.min_loops}")
    _require(
        params.max_loops <= config.r_max,
        "max_loops",
        f"max_loops {params.max_loops} is above the engine's {config.r_max} loops",
    )
    _require(
        params.min_loops <= params.max_loops,
        "min_loops",
        f"min_loops {params.min_loops} is above max_loops {params.max_loops}",
    )


def _check_gate(submit: Submit, config: SchedulerConfig) -> None:
    params = submit.params
    label = params.gate.label
    known = ", ".join(gate.label for gate in config.gates)
    _require(params.gate in config.gates, "gate", f"gate {label} is not one of this engine's: {known}")
    _require(math.isfinite(params.exit_threshold), "exit_threshold", "exit_threshold must be finite")
    _require(
        config.kv_layout.allows_early_exit or not params.gate.may_exit_early,
        "gate",
        f"gate {label} exits early, which KV layout {config.kv_layout} cannot serve",
    )
    _require(0 not in params.exit_depths, "exit_depths", "exit_depths holds a depth of 0")


def _check_tokens(tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]], config: SchedulerConfig, name: str) -> None:
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    bad = low if low < 0 else high
    _require(
        low >= 0 and high < config.vocab_size,
        name,
        f"{name} holds token id {bad}, outside the vocabulary of {config.vocab_size}",
    )


def _check_fits(prompt_tokens: int, limit: int, config: SchedulerConfig) -> None:
    """The last output token is never written to the cache."""
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


_CHECKS: tuple[Callable[[Submit, SchedulerConfig], None], ...] = (
    _check_prompt,
    _check_resumed,
    _check_limits,
    _check_logits,
    _check_features,
    _check_depth,
    _check_gate,
)
