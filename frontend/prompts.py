"""From what callers write (a model's name, a prompt, parameters) to what runs: tokenizer, token ids, one output's assembler."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from depthbatch.common.errors import RequestError
from depthbatch.common.messages import EngineInfo
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend.output import OutputAssembler, Scoring
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.tokenizer import Tokenizer, check_fewest, load_tokenizer

Prompt = str | Sequence[int]


def describe(info: EngineInfo) -> str:
    """The line that every start prints: what runs, and how much fits."""
    tokens = (info.num_blocks - 1) * info.block_size
    return (
        f"{info.model} ({info.architecture}, {info.r_max} loops) on {info.device}, {info.dtype}: "
        f"{info.kv_bytes_per_token / 1024:.1f} KiB of KV per token ({info.kv_layout}), {tokens} tokens fit"
    )


def load_model_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a MODEL argument. Raises ModelError when there is no such model."""
    return load_tokenizer(resolve_model_dir(model))


def encode_prompt(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None, max_tokens: int | None = None
) -> list[int]:
    """Token ids of a prompt, or of token ids themselves. Raises RequestError when text cannot be served, which it is
    not even encoded for when it is certain to have more than ``max_tokens``, and naming the argument when it is of
    another type."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be a SamplingParams, not {repr(params)[:80]}", "params")
    check_stop(params, tokenizer)
    if not isinstance(prompt, str):
        try:
            if isinstance(prompt, bytes | bytearray | memoryview | set | frozenset | Mapping):  # numbers, but no ids
                raise TypeError
            return [_token_id(token) for token in prompt]
        except TypeError:
            raise RequestError("prompt: neither a text nor a list of token ids", "prompt") from None
    if tokenizer is None:
        raise RequestError("prompt: this model has no tokenizer; give token ids", "prompt")
    if max_tokens is not None:
        check_fewest(tokenizer.fewest_tokens(prompt), max_tokens, "prompt")
    return tokenizer.encode(prompt)


def _token_id(token: Any) -> int:
    """Raises TypeError."""
    if isinstance(token, bool):
        raise TypeError
    return operator.index(token)


def check_stop(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Raises RequestError for stop strings where there is no text."""
    if tokenizer is None and params.stop:
        raise RequestError("stop: this model has no tokenizer, so there is no text to search", "stop")


def assembler_of(
    name: str, prompt_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
) -> OutputAssembler:
    """What turns the token events of one request into its deltas, which carry ``name``."""
    detokenizer = tokenizer.detokenizer(prompt_ids, params.skip_special_tokens) if tokenizer is not None else None
    scoring = Scoring(params.logprobs, params.prompt_logprobs, prompt_ids)
    shows_stop = params.include_stop_str_in_output
    return OutputAssembler(name, detokenizer, params.stop, params.min_tokens, scoring, shows_stop)
