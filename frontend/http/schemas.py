"""Request and response bodies: types and documentation of every field. Knows nothing of the engine; what the numbers of
a request may be is in frontend.params. Lists fail with their first bad element: an error of each of a million would take
seconds, in which nothing else runs.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, create_model, model_validator

from depthbatch.common.frames import MAX_DEPTH
from depthbatch.common.gates import GATE_BY_LABEL
from depthbatch.frontend.params import (
    INT32_MAX,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_EXIT_DEPTHS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    Range,
)

MAX_N = 128
MAX_PROMPTS = 1024

HTTP_RANGES = {  # of the numbers that only HTTP has, or that mean something else there
    "n": Range(int, 1, MAX_N),
    "top_logprobs": RANGES["logprobs"],
    "max_completion_tokens": RANGES["max_tokens"],
}
WHOLE = frozenset(name for name, bounds in {**RANGES, **HTTP_RANGES}.items() if bounds.kind is int)
# what a field of several types may be, for the one line that an error is
SHAPES = {
    "prompt": f"a text, a list of token ids, or a list of at most {MAX_PROMPTS} of either, none of them empty",
    "messages": "a list of 1 to 4096 messages, each with role and content",
    "content": "a text, or a list of text parts",
    "role": "1 to 32 lower-case letters",
    "tokens": "a list of token ids",
    "request_id": "1 to 128 visible ASCII characters (for /abort also a list of such names)",
    "stream_options": 'an object, {"include_usage": true}',
    "response_format": 'an object whose type is "text", "json_object" or "json_schema"',
    "structured_outputs": "an object with exactly one of json, regex and choice, none of them empty",
    "chat_template_kwargs": "an object",
}


def ranged(name: str, description: str | None = None) -> Any:
    """An optional number's field, with the bounds of the table for OpenAPI."""
    bounds = HTTP_RANGES.get(name) or RANGES[name]
    limits: dict[str, Any] = {"gt" if bounds.low_open else "ge": bounds.low, "le": bounds.high}
    return Field(None, description=description, **limits)


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair; no tokenizer and no UTF-8 answer can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text holds an unpaired surrogate") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
BadWord = Annotated[Text, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
StopString = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]
CacheSalt = Annotated[Text, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)]
Depth = Annotated[int, Field(ge=1, le=MAX_DEPTH)]
Prompt = (
    Text
    | Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
    | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[
        list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
    ]
)


class Body(BaseModel):
    """Strict types: "1" is no number and true no integer. Fields nobody knows are kept, to be warned about."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="a last chunk carries the usage of the whole request")


class NamedSchema(Body):
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """vLLM's way: exactly one of the three."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: Annotated[list[StopString], Field(fail_fast=True)] | None = Field(None, min_length=1, max_length=1024)


if TYPE_CHECKING:

    class EngineNumbers(Body):
        """What code reads by name; all of them are made below."""

        seed: int | None
        timeout_s: float | None

else:  # one optional number for each that a request has one of: name, type, range and text stand in frontend.params
    EngineNumbers = create_model(
        "EngineNumbers",
        __base__=Body,
        **{
            name: (bounds.kind | None, ranged(name, bounds.help))
            for name, bounds in RANGES.items()
            if name not in ("max_tokens", "logprobs", "prompt_logprobs")  # each route has them in its own way
        },
    )


class GenerationFields(EngineNumbers):
    """What completions and chat completions share."""

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, values: Any) -> Any:
        """16.0 is what some JSON writers make of 16."""
        if not isinstance(values, dict):
            return values
        whole = {name: int(v) for name, v in values.items() if type(v) is float and name in WHOLE and v.is_integer()}
        return {**values, **whole} if whole else values

    model: str | None = Field(None, description="name of the served model, as /v1/models lists it")
    n: int | None = ranged("n", "choices a prompt; choice i draws with seed + i")
    stream: bool | None = Field(None, description="answer with server-sent events")
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = Field(None, description="the text ends with what stopped it")
    skip_special_tokens: bool | None = Field(None, description="false: the text shows special tokens")
    speculation: bool | None = Field(None, description="false: no draft lanes; the output is the same")
    cache_salt: CacheSalt | None = Field(
        None, description="cached prefixes are shared with requests of the same salt only"
    )
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = Field(
        None, description="token id -> what is added to its logit, -100 to 100"
    )
    bad_words: Annotated[list[BadWord], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = Field(
        None, description="texts whose tokens may not be generated"
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = Field(None, description="the only tokens that may be generated")
    response_format: ResponseFormat | None = Field(None, description="JSON, of any kind or of a schema")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="the output is JSON of the schema json, matches regex, or is one of choice"
    )
    gate: Literal[tuple(GATE_BY_LABEL)] | None = Field(None, description="exit gate of this request")  # type: ignore[valid-type]
    exit_depths: Annotated[list[Depth], Field(fail_fast=True, max_length=MAX_EXIT_DEPTHS)] | None = Field(
        None, description="replay: the loops of each decoded token in turn; those beyond the list run all"
    )
    return_exit_depths: bool | None = Field(None, description="each choice carries one depth a token")
    return_token_ids: bool | None = Field(None, description="each choice carries its token ids")
    return_tokens_as_token_ids: bool | None = Field(None, description="logprobs name tokens token_id:N")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$", description="name for /abort; need not be unique")


class CompletionRequest(GenerationFields):
    prompt: Prompt = Field(description="text, token ids, or a list of either")
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX, description="default 16; 0 only with echo")
    echo: bool | None = Field(None, description="the text starts with the prompt")
    logprobs: int | None = ranged(
        "logprobs", "logprobs of the tokens, and of so many likeliest ones; with echo, the prompt's too"
    )
    add_special_tokens: bool | None = Field(None, description="let the tokenizer add its own (default true)")
    parse_special_tokens: bool | None = Field(
        None, description="special tokens typed in the prompt act as such (default: they are plain text)"
    )


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: str = Field(pattern=r"^[a-z_]{1,32}$")  # goes into the template as it is: no room for control tokens
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(
        description="null: an assistant's message without a text"
    )
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")


class TemplateFields(Body):
    """What a client may say about the model's own chat template; never a template of its own."""

    chat_template_kwargs: dict[str, Any] | None = Field(None, description="values from the server's allow-list")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(GenerationFields, TemplateFields):
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = ranged("max_tokens", "default: what the context leaves")
    logprobs: bool | None = Field(None, description="logprobs of the output tokens")
    top_logprobs: int | None = ranged("top_logprobs", "and of so many likeliest ones")
    max_completion_tokens: int | None = ranged("max_completion_tokens")


class TokenizeRequest(TemplateFields):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(max_length=1 << 20)


class AbortRequest(Body):
    request_id: Text | Annotated[list[Text], Field(fail_fast=True, max_length=4096)]


# --- answers; documentation and the contract that tests hold them to


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class TokenDetails(BaseModel):
    accepted_prediction_tokens: int = Field(description="drafts that were the token they stood for")
    rejected_prediction_tokens: int = Field(description="drafts that were not")


class PromptTokenDetails(BaseModel):
    cached_tokens: int = Field(description="prompt tokens found in the prefix cache, by every choice of their prompt")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    mean_exit_depth: float | None = Field(description="loops a decoded token took (the first token comes from prefill)")
    loops: int = Field(description="core steps spent on the output tokens")
    completion_tokens_details: TokenDetails
    prompt_tokens_details: PromptTokenDetails


class Choice(BaseModel):
    index: int
    finish_reason: str | None
    stop_reason: int | str | None = None
    exit_depths: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionLogprobsAnswer(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobsAnswer | None = None


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatToken(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenWithTop(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobsAnswer(BaseModel):
    content: list[ChatTokenWithTop]


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobsAnswer | None = None


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    min_loops: int = Field(description="fewest loops after which a gate may let a token go")
    max_loops: int = Field(description="loops of a full-depth token")
    gates: list[str] = Field(description="what a request's gate may be")
    gate: str = Field(description="gate of requests that name none")
    exit_threshold: float = Field(description="threshold of requests that name none")
    max_logprobs: int = Field(description="most logprobs a token; 0: this device gives none")
    draft_lanes: int = Field(description="drafts of a sequence that may be on their way at once; 0: no speculation")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(BaseModel):
    prompt: str


class AbortAnswer(BaseModel):
    aborted: list[str]


class ProcessHealth(BaseModel):
    pid: int | None
    state: str
    steps: int
    last_step_age_s: float
    restarts: int


class HealthAnswer(BaseModel):
    status: str
    processes: dict[str, ProcessHealth]


class ReadyAnswer(BaseModel):
    status: str


class LoadAnswer(BaseModel):
    load: int = Field(description="sequences that run and wait")


class RankLoad(BaseModel):
    dp_rank: int
    num_running_reqs: int = Field(description="sequences that hold a slot")
    num_waiting_reqs: int = Field(description="sequences that wait for one")
    num_used_tokens: int = Field(description="tokens that the KV blocks in use hold")
    num_total_tokens: int = Field(description="these, and the tokens of what waits")
    max_total_num_tokens: int = Field(description="tokens that all KV blocks hold")
    max_running_requests: int
    token_usage: float = Field(description="share of the KV blocks in use, 0 to 1")
    cache_hit_rate: float = Field(description="share of the prompt tokens found in the prefix cache since its start")


class LoadsAnswer(BaseModel):
    version: str
    loads: list[RankLoad]


class ServerInfoAnswer(BaseModel):
    version: str
    model_path: str
    served_model_name: str
    tp_size: int
    dp_size: int
    context_length: int
    page_size: int
    max_total_num_tokens: int
    max_running_requests: int
    device: str
    dtype: str
    kv_layout: str
    kv_cache_dtype: str


class ModelInfoAnswer(BaseModel):
    model_path: str
    model_type: str
    is_generation: bool
    has_image_understanding: bool
    has_audio_understanding: bool
    preferred_sampling_params: dict[str, Any] | None


class RenderedPrompt(BaseModel):
    request_id: str
    model: str
    token_ids: list[int]


class RenderedPrompts(RootModel[list[RenderedPrompt]]):
    """One a prompt."""


class VersionAnswer(BaseModel):
    version: str


class StageTraceAnswer(BaseModel):
    stages: list[dict[str, Any]] = Field(description="oldest first, as --stage-trace writes them")
