"""From what callers write (a model's name, a prompt, parameters) to what runs: tokenizer, token ids, one output's assembler."""

import operator
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, ModelError, RequestError
from depthbatch.common.messages import EngineInfo
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.common.text_files import read_json, read_text
from depthbatch.frontend.output import OutputAssembler, Scoring
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.tokenizer import Tokenizer, check_fewest, load_tokenizer

Prompt = str | Sequence[int]
GENERATION_FIELDS = {  # of generation_config.json; what vLLM takes from there
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def describe(info: EngineInfo) -> str:
    """The line that every start prints: what runs, and how much fits."""
    tokens = (info.num_blocks - 1) * info.block_size
    weights = f" with {info.quantization} layers" if info.quantization else ""
    stored = info.kv_layout if info.kv_cache_dtype == "auto" else f"{info.kv_layout}, {info.kv_cache_dtype}"
    return (
        f"{info.model} ({info.architecture}, {info.r_max} loops) on {info.device}, {info.dtype}{weights}: "
        f"{info.kv_bytes_per_token / 1024:.1f} KiB of KV per token ({stored}), {tokens} tokens fit"
    )


def print_start(info: EngineInfo, sampling_defaults: Mapping[str, Any]) -> None:
    """What every start says on stderr."""
    defaults = [describe_defaults(sampling_defaults)] if sampling_defaults else []
    for line in (describe(info), *info.notes, *defaults):
        print(f"depthbatch: {line}", file=sys.stderr)


class ModelTexts(NamedTuple):
    """What a model directory says to the frontend."""

    tokenizer: Tokenizer | None
    sampling_defaults: dict[str, Any]  # fields of SamplingParams for requests that do not say


def load_texts(config: EngineConfig) -> ModelTexts:
    """Raises ModelError when there is no such model or a file of it is broken, ConfigError for the chat template's."""
    directory = resolve_model_dir(config.model)
    template = None if config.chat_template is None else _template(Path(config.chat_template).expanduser())
    tokenizer = load_tokenizer(directory, template)
    if tokenizer is None and template is not None:
        raise ConfigError(f"chat_template {config.chat_template}: this model has no tokenizer")
    return ModelTexts(tokenizer, sampling_defaults(directory) if config.generation_config == "auto" else {})


def _template(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: cannot read {path}: {getattr(error, 'strerror', error)}") from None


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """What a model's generation_config.json says of sampling. Raises ModelError naming the file."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = read_json(path)
        given = {name: values[key] for key, name in GENERATION_FIELDS.items() if values.get(key) is not None}
        SamplingParams(**given)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, RequestError) as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())}; --generation-config off leaves it out") from None
    return given


def describe_defaults(defaults: Mapping[str, Any]) -> str:
    """The line of what requests that do not say are sampled with."""
    return "sampling defaults of generation_config.json: " + ", ".join(f"{k} {v}" for k, v in defaults.items())


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
