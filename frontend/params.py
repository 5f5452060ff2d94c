"""SamplingParams: what a user may ask of one request, its validation, and its resolution against the running engine.

Two steps. Construction checks each field by itself (type and range, from one table). ``resolve`` fills in the
engine's defaults and refuses what this engine cannot do; what comes out, RequestParams, has no default left to apply.
Every refusal is a RequestError that names the field.
"""

import argparse
import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from depthbatch.common.errors import RequestError, shown
from depthbatch.common.frames import MAX_BAD_SEQUENCES, MAX_DEPTH, MAX_LOGPROBS
from depthbatch.common.gates import GATE_BY_LABEL, Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import MAX_PRIORITY, EngineInfo, RequestParams
from depthbatch.common.splitmix64 import ALL_BITS, UNSIGNED, mix_int
from depthbatch.frontend.grammar import canonical_constraint, constraint_name, grammar_text
from depthbatch.frontend.prompt_checks import check_length
from depthbatch.frontend.token_bans import Encode, allow_list, bad_sequences

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 512
MAX_STOP_TOKEN_IDS = 256
MAX_EXIT_DEPTHS = 1 << 20
MAX_BAD_WORDS = MAX_BAD_SEQUENCES // 2  # each may be two: at the start of a text, and behind a space
MAX_BAD_WORD_CHARS = 64
MAX_ALLOWED_TOKEN_IDS = 1 << 20
MAX_CACHE_SALT_CHARS = 1024
INT32_MAX = 2**31 - 1


class Range(NamedTuple):
    """What a number may be. ``low_open``: low itself is refused; ``help``: what OpenAPI says of it."""

    kind: type
    low: float
    high: float
    low_open: bool = False
    help: str | None = None

    def __str__(self) -> str:
        what = "a whole number" if self.kind is int else "a number"
        low = f"above {_digits(self.low)}" if self.low_open else f"at least {_digits(self.low)}"
        return f"{what}, {low} and at most {_digits(self.high)}"


def _digits(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"


# the one home of what a request's numbers may be, for HTTP, ZMQ, Python and the command line
RANGES = {
    "max_tokens": Range(int, 1, INT32_MAX),
    "temperature": Range(float, 0.0, 2.0, help="0 is greedy; default 1"),
    "top_p": Range(float, 0.0, 1.0, low_open=True),
    "top_k": Range(int, -1, INT32_MAX, help="0 and -1: off"),
    "min_p": Range(float, 0.0, 1.0),
    "seed": Range(int, -(2**63), ALL_BITS, help="best effort: same seed, same tokens"),
    "min_tokens": Range(int, 0, INT32_MAX),
    "exit_threshold": Range(float, 0.0, 1e6, help="threshold of the gate"),
    "min_loops": Range(int, 1, MAX_DEPTH, help="fewest loops a decoded token runs"),
    "max_loops": Range(int, 1, MAX_DEPTH, help="most loops a decoded token runs"),
    "num_loops": Range(int, 1, MAX_DEPTH, help="fixed depth: every decoded token runs this many loops"),
    "priority": Range(int, 1 - MAX_PRIORITY, MAX_PRIORITY - 1, help="larger goes first"),
    "timeout_s": Range(float, 0.0, 86400.0, low_open=True, help="limit for waiting and running together"),
    "presence_penalty": Range(float, -2.0, 2.0, help="off tokens that the output holds"),
    "frequency_penalty": Range(float, -2.0, 2.0, help="the same, times how often"),
    "repetition_penalty": Range(float, 0.0, 10.0, low_open=True, help="of tokens in prompt or output; 1: off"),
    "logprobs": Range(int, 0, MAX_LOGPROBS),
    "prompt_logprobs": Range(int, 0, MAX_LOGPROBS),
}
BIAS = Range(float, -100.0, 100.0)
FLAGS = ("ignore_eos", "speculation", "include_stop_str_in_output", "skip_special_tokens")


class SamplingParams(msgspec.Struct, frozen=True):
    """Parameters of one request; None means the engine's default.

    Raises RequestError (``param`` names the field) on a value that no engine could take.
    """

    max_tokens: int | None = 16  # None: up to max_model_len
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    seed: int | None = None  # None: drawn from the engine's seed and the request's number
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    exit_threshold: float | None = None
    min_loops: int | None = None
    max_loops: int | None = None
    num_loops: int | None = None  # every token at this depth; implies gate "fixed"
    gate: str | None = None
    exit_depths: Sequence[int] | None = None  # replay: depth of each decode token; implies gate "replay"
    priority: int = 0
    timeout_s: float | None = None  # from submission to the last token
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # of tokens in prompt or output, 1 = off
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these tokens; kept as sorted pairs
    bad_words: Sequence[str] = ()  # texts whose tokens may not be generated
    allowed_token_ids: Sequence[int] | None = None  # the only tokens that may be generated
    logprobs: int | None = None  # output tokens come with their logprob and those of this many likeliest tokens
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    json_schema: Mapping[str, Any] | str | bool | None = None  # the output is JSON of this schema; kept as JSON text
    regex: str | None = None  # the output matches this expression
    choice: Sequence[str] | None = None  # the output is one of these texts
    speculation: bool = True  # may have draft lanes, where the engine has some; the output is the same
    include_stop_str_in_output: bool = False  # the text ends with the stop string, or the stop token's text
    skip_special_tokens: bool = True  # they have no text; False: the text shows them
    cache_salt: str | None = None  # cached prefixes are shared with requests of the same salt only

    def __post_init__(self) -> None:
        for name, bounds in RANGES.items():
            value = getattr(self, name)
            if value is not None or (_DEFAULTS[name] is not None and name != "max_tokens"):
                _check_number(name, value, bounds)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {shown(getattr(self, name))}", name)
        for name, value in self._as_kept().items():
            msgspec.structs.force_setattr(self, name, value)
        for name in ("ignore_eos", "min_tokens", "bad_words", "allowed_token_ids"):
            if self.constraint is not None and getattr(self, name):
                raise RequestError(f"{name} cannot be combined with {self.constraint}", name)
        if self.gate is not None and (not isinstance(self.gate, str) or self.gate not in GATE_BY_LABEL):
            raise RequestError(f"gate must be one of {', '.join(GATE_BY_LABEL)}, not {shown(self.gate)}", "gate")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", "min_tokens")

    def _as_kept(self) -> dict[str, Any]:
        """What a caller may write in several ways, in the one way that it is kept. Raises RequestError."""
        json_schema, regex, choice = canonical_constraint(self.json_schema, self.regex, self.choice)
        kept: dict[str, Any] = {
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _whole_numbers("stop_token_ids", self.stop_token_ids, 0, INT32_MAX, MAX_STOP_TOKEN_IDS),
            "logit_bias": _bias_pairs(self.logit_bias),
            "bad_words": _bad_words(self.bad_words),
            "json_schema": json_schema,
            "regex": regex,
            "choice": choice,
            "cache_salt": _cache_salt(self.cache_salt),
        }
        if self.allowed_token_ids is not None:
            kept["allowed_token_ids"] = _allowed(self.allowed_token_ids)
        if self.exit_depths is not None:
            kept["exit_depths"] = _whole_numbers("exit_depths", self.exit_depths, 1, MAX_DEPTH, MAX_EXIT_DEPTHS)
        return kept

    @property
    def constraint(self) -> str | None:
        """The field that constrains the output, if one does."""
        if self.json_schema is None and self.regex is None and not self.choice:
            return None
        assert self.json_schema is None or isinstance(self.json_schema, str)
        return constraint_name(self.json_schema, self.regex)

    def grammar(self) -> str:
        """What the constraint allows, as the worker reads it; "" without one. Raises RequestError."""
        assert self.json_schema is None or isinstance(self.json_schema, str)
        return grammar_text(self.json_schema, self.regex, self.choice or ())


_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))


def complaint(name: str, value: Any) -> str | None:
    """What is wrong with one field's value by itself, in the words of every way in; None when nothing is, or when
    ``name`` is no field."""
    try:
        if name in _DEFAULTS:
            SamplingParams(**{name: value})
    except RequestError as error:
        return str(error)
    return None


def add_number_argument(group: argparse._ArgumentGroup, name: str, default: float | None, text: str) -> None:
    """A command line's option for the field ``name``. Parsing raises RequestError, in the same words."""
    bounds = RANGES[name]

    def parse(given: str) -> Any:
        value: Any = given
        with contextlib.suppress(ValueError):
            value = bounds.kind(given)
        _check_number(name, value, bounds)
        return value

    metavar = bounds.kind.__name__.upper()
    group.add_argument("--" + name.replace("_", "-"), type=parse, default=default, metavar=metavar, help=text)


def _check_number(name: str, value: Any, bounds: Range, place: str = "") -> None:
    """Raises RequestError about the field ``name``, or about a ``place`` in it."""
    accepted = (int, float) if bounds.kind is float else (int,)
    fits = isinstance(value, accepted) and not isinstance(value, bool) and _is_finite(value)
    if not fits or not bounds.low <= value <= bounds.high or (bounds.low_open and value == bounds.low):
        raise RequestError(f"{place or name} must be {bounds}, not {shown(value)}", name)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _stop_strings(given: Any) -> tuple[str, ...]:
    stop = (given,) if isinstance(given, str) else given
    if not isinstance(stop, list | tuple) or not all(isinstance(entry, str) and entry for entry in stop):
        raise RequestError(f"stop must be a string or a list of strings, none empty, not {shown(given)}", "stop")
    if len(stop) > MAX_STOP_STRINGS or any(len(entry) > MAX_STOP_CHARS for entry in stop):
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters", "stop")
    return tuple(stop)


def _whole_numbers(name: str, values: Any, low: int, high: int, most: int) -> tuple[int, ...]:
    whole = isinstance(values, list | tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    if not whole or any(not low <= v <= high for v in values):
        raise RequestError(f"{name} must be a list of whole numbers from {low} to {high}, not {shown(values)}", name)
    if len(values) > most:
        raise RequestError(f"{name} takes at most {most} numbers, not {len(values)}", name)
    return tuple(values)


def _bad_words(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not all(isinstance(word, str) and word.strip() for word in given):
        raise RequestError(f"bad_words must be a list of texts, none of them blank, not {shown(given)}", "bad_words")
    if len(given) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD_CHARS for word in given):
        raise RequestError(
            f"bad_words takes at most {MAX_BAD_WORDS} texts of {MAX_BAD_WORD_CHARS} characters", "bad_words"
        )
    return tuple(given)


def _cache_salt(given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not 0 < len(given) <= MAX_CACHE_SALT_CHARS or not _is_utf8(given):
        raise RequestError(
            f"cache_salt must be a text of 1 to {MAX_CACHE_SALT_CHARS} characters, not {shown(given)}", "cache_salt"
        )
    return given


def _is_utf8(text: str) -> bool:
    """JSON may hold half of a surrogate pair, which no message can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _allowed(given: Any) -> tuple[int, ...]:
    token_ids = _whole_numbers("allowed_token_ids", given, 0, INT32_MAX, MAX_ALLOWED_TOKEN_IDS)
    if not token_ids:
        raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")
    return token_ids


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """Token and addition, ascending. Keys may be the decimal strings that JSON has instead of numbers."""
    if bias is None:
        return ()
    if not isinstance(bias, Mapping):
        if isinstance(bias, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in bias):
            return _bias_pairs(dict(bias))  # replace hands back what we made of it
        raise RequestError(f"logit_bias must map token ids to numbers, not {shown(bias)}", "logit_bias")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, not {len(bias)}", "logit_bias")
    pairs = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise RequestError(f"logit_bias: {shown(key)} is not a token id", "logit_bias")
        _check_number("logit_bias", value, BIAS, f"logit_bias[{token}]")
        pairs[token] = float(value)
    return tuple(sorted(pairs.items()))


# --- resolution against the running engine


class Depth(NamedTuple):
    """How deep a request's decode tokens go."""

    gate: Gate
    exit_threshold: float
    min_loops: int
    max_loops: int


SENT_FIELDS = frozenset(RequestParams.__struct_fields__)


def _as_sent(params: SamplingParams, name: str) -> Any:
    """A field that has one name and one meaning on both sides."""
    value = getattr(params, name)
    return RANGES[name].kind(value) if name in RANGES else value


class RequestDefaults:
    """What the running engine gives to requests that do not say, and what it refuses."""

    def __init__(self, info: EngineInfo, seed: int) -> None:
        """``seed``: the engine's, mixed with a request's number where the request names none."""
        self.info = info
        self._seed = seed
        self._layout = KVLayout(info.kv_layout)

    def resolve(
        self, params: SamplingParams, prompt_tokens: int, ordinal: int, encode: Encode | None = None
    ) -> RequestParams:
        """Final parameters of a request with a prompt of ``prompt_tokens``; ``ordinal`` varies the default seed.
        ``encode`` gives bad words their tokens.

        Raises RequestError naming the field that this engine cannot serve.
        """
        max_tokens = check_length(prompt_tokens, params.max_tokens, self.info.max_model_len)
        if params.min_tokens > max_tokens:
            raise RequestError(f"min_tokens {params.min_tokens} is more than the {max_tokens} that fit", "min_tokens")
        stop_token_ids = self._stop_token_ids(params)
        if params.min_tokens and len(stop_token_ids) >= self.info.vocab_size:
            raise RequestError("min_tokens: every token of the vocabulary is a stop token", "min_tokens")
        depth = self._depth(params)
        seed = _mix(self._seed, ordinal) if params.seed is None else params.seed & ALL_BITS
        resolved = {
            "max_tokens": max_tokens,
            "stop_token_ids": stop_token_ids,
            "top_k": max(params.top_k, 0),
            "seed": seed,
            **depth._asdict(),
            "exit_depths": bytes(params.exit_depths or ()),
            "logit_bias": self._logit_bias(params),
            "bad_sequences": bad_sequences(params.bad_words, encode),
            "allow_list": self._allow_list(params, stop_token_ids),
            "logprobs": self._wants("logprobs", params.logprobs),
            "prompt_logprobs": self._wants("prompt_logprobs", params.prompt_logprobs),
            "grammar": self._grammar(params),
            "cache_salt": params.cache_salt or "",
        }
        return RequestParams(**resolved, **{name: _as_sent(params, name) for name in SENT_FIELDS - resolved.keys()})

    def _grammar(self, params: SamplingParams) -> str:
        name = params.constraint
        if name is not None and not self.info.grammars:
            raise RequestError(f"{name}: this engine cannot constrain output (it has no tokenizer that fits)", name)
        return params.grammar()

    def _logit_bias(self, params: SamplingParams) -> bytes:
        """int32 [n, 2]: token, float32 bits."""
        assert isinstance(params.logit_bias, tuple)
        rows = np.empty((len(params.logit_bias), 2), np.int32)
        for row, (token, value) in zip(rows, params.logit_bias, strict=True):
            if token >= self.info.vocab_size:
                raise RequestError(
                    f"logit_bias: {token} is not below the vocabulary size {self.info.vocab_size}", "logit_bias"
                )
            row[0], row[1] = token, np.float32(value).view(np.int32)
        return rows.tobytes()

    def _allow_list(self, params: SamplingParams, stop_token_ids: tuple[int, ...]) -> bytes:
        if params.allowed_token_ids is None:
            return b""
        if params.min_tokens and set(params.allowed_token_ids) <= set(stop_token_ids):
            raise RequestError("min_tokens: every allowed token is a stop token", "min_tokens")
        return allow_list(params.allowed_token_ids, self.info.vocab_size)

    def _wants(self, name: str, count: int | None) -> bool:
        """Whether logprobs are asked for; RequestError when this engine has fewer, or none."""
        if count is None:
            return False
        if not self.info.max_logprobs:
            raise RequestError(f"{name}: this engine gives none", name)
        if count > self.info.max_logprobs:
            raise RequestError(f"{name} must be at most {self.info.max_logprobs}, not {count}", name)
        return True

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        for token in params.stop_token_ids:
            if token >= self.info.vocab_size:
                raise RequestError(
                    f"stop_token_ids: {token} is not below the vocabulary size {self.info.vocab_size}", "stop_token_ids"
                )
        eos = () if params.ignore_eos else self.info.eos_token_ids
        return tuple(sorted({*params.stop_token_ids, *eos}))

    def _gate(self, params: SamplingParams) -> Gate:
        """The gate that the fields ask for together."""
        implied = {Gate.FIXED: params.num_loops is not None, Gate.REPLAY: params.exit_depths is not None}
        asked = [gate for gate, given in implied.items() if given]
        if len(asked) > 1:
            raise RequestError("num_loops and exit_depths exclude each other", "num_loops")
        if params.gate is None:
            return asked[0] if asked else self.info.default_gate
        gate = GATE_BY_LABEL[params.gate]
        for other, param in ((Gate.FIXED, "num_loops"), (Gate.REPLAY, "exit_depths")):
            if gate is other and not implied[other]:
                raise RequestError(f"gate {gate.label} needs {param}", param)
            if gate is not other and implied[other]:
                raise RequestError(f"{param} has no effect with gate {gate.label}", param)
        return gate

    def _depth(self, params: SamplingParams) -> Depth:
        info, gate = self.info, self._gate(params)
        param = {Gate.FIXED: "num_loops", Gate.REPLAY: "exit_depths"}.get(gate, "gate")
        if gate.may_exit_early and not self._layout.allows_early_exit:
            raise RequestError(
                f"gate {gate.label} cannot run with kv_layout {info.kv_layout}: early exits leave holes in it", param
            )
        if gate not in info.gates:
            raise RequestError(f"gate {gate.label} is not one of this model's: {_labels(info.gates)}", param)
        for name in ("num_loops", "min_loops", "max_loops"):
            value = getattr(params, name)
            if value is not None and value > info.r_max:
                raise RequestError(f"{name} {value} is more than the {info.r_max} loops of this engine", name)
        if not gate.takes_threshold:
            self._refuse_gate_fields(params, gate)
        if gate is Gate.FIXED:
            assert params.num_loops is not None
            return Depth(gate, 1.0, params.num_loops, params.num_loops)
        max_loops = info.r_max if params.max_loops is None else params.max_loops
        if gate is Gate.REPLAY and max(params.exit_depths or (1,)) > max_loops:
            raise RequestError(
                f"exit_depths holds {max(params.exit_depths or (1,))}, more than {max_loops} loops", "exit_depths"
            )
        if not gate.takes_threshold:
            return Depth(gate, 1.0, 1, max_loops)
        return self._gated_depth(params, gate, max_loops)

    def _refuse_gate_fields(self, params: SamplingParams, gate: Gate) -> None:
        """Nothing is accepted and ignored."""
        for name in ("exit_threshold", "min_loops", *(("max_loops",) if gate is Gate.FIXED else ())):
            if getattr(params, name) is not None:
                raise RequestError(f"{name} has no effect with gate {gate.label}", name)

    def _gated_depth(self, params: SamplingParams, gate: Gate, max_loops: int) -> Depth:
        r_min = self.info.r_min
        if max_loops < r_min:
            raise RequestError(
                f"max_loops must be at least {r_min} with gate {gate.label}, not {max_loops}", "max_loops"
            )
        min_loops = r_min if params.min_loops is None else params.min_loops
        if params.max_loops is not None and r_min <= params.max_loops < min_loops:
            raise RequestError(f"min_loops {min_loops} is more than max_loops {max_loops}", "min_loops")
        if not r_min <= min_loops <= max_loops:
            raise RequestError(f"min_loops must be between {r_min} and {max_loops}, not {min_loops}", "min_loops")
        threshold = self.info.threshold_of(gate) if params.exit_threshold is None else params.exit_threshold
        return Depth(gate, float(threshold), min_loops, max_loops)


def _labels(gates: Sequence[Gate]) -> str:
    return ", ".join(gate.label for gate in gates)


def _mix(seed: int, ordinal: int) -> int:
    """64 well-mixed bits of (seed, ordinal)."""
    return mix_int(seed + (ordinal + 1) * UNSIGNED.golden)
