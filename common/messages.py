"""Every message that crosses a process boundary, one union a direction; decoding is strict.

Wire form: msgpack arrays with the tag first (msgspec). Bulk numbers travel as raw little-endian bytes (``bytes``
fields, or the int32 frames of ``common.frames`` as further parts of a multipart message). Nothing is ever
unpickled and no type name is taken from the wire.

    frontend -> scheduler   FrontendMessage      hello, submit, abort, stats, shutdown
    scheduler -> frontend   SchedulerMessage     loading, engine ready, tokens, rejected, heartbeat, stats, fatal
    scheduler -> worker     WorkerCommand        prepare grammar, stage batch (+ frames), shutdown
    worker -> scheduler     WorkerMessage        loading, worker ready, grammar prepared, stage result, heartbeat, fatal
    frontend -> frontend    SiblingMessage       abort by a client's name, write your metrics; answer
"""

import zlib
from enum import IntFlag, StrEnum
from pathlib import Path

import msgspec

from depthbatch.common.errors import DecodeError
from depthbatch.common.gates import HEAD_THRESHOLD, Gate
from depthbatch.common.stats import CoreStats, WorkerStats

_SOURCES = (Path(__file__).with_name(name).read_bytes() for name in ("messages.py", "frames.py", "stats.py"))
WIRE_VERSION = f"{zlib.crc32(b''.join(_SOURCES)):08x}"
"""What is said first, by frontends and workers. An upgrade below a running engine replaces its processes one by one, and
two that read the same bytes differently would wait for each other for ever."""


class FinishReason(StrEnum):
    """Why a request has ended; its text is what every API shows. TIMEOUT is the frontend's own."""

    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


MAX_PRIORITY = 1 << 20  # a request's priority lies within it, either way


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class RequestParams(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What scheduler and worker need of a request's parameters; validated and resolved at the edge.

    ``gate``, ``exit_threshold``, ``min_loops`` and ``max_loops`` are final here: no defaults are left to apply.
    ``seed`` is 64 bits; random draws are a function of (seed, position) only.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, empty with ignore_eos
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    gate: Gate = Gate.NONE
    exit_threshold: float = 1.0
    min_loops: int = 1
    max_loops: int = 1
    exit_depths: bytes = b""  # replay: uint8 a decode token; missing entries mean max_loops
    priority: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: bytes = b""  # int32 [n, 2]: token, float32 bits
    bad_sequences: bytes = b""  # int32 [n, BAD_SEQUENCE_TOKENS] (common.frames)
    allow_list: bytes = b""  # int32 [mask_words(vocab_size)], empty = everything
    logprobs: bool = False  # output tokens come with theirs (common.frames)
    prompt_logprobs: bool = False  # so do the prompt's tokens, all but the first
    grammar: str = ""  # what the worker's matcher allows (frontend.grammar), "" = everything
    speculation: bool = True  # may have draft lanes, where the engine has some
    cache_salt: str = ""  # cached prefixes are shared with requests of the same salt only

    @property
    def filters(self) -> bool:
        """A token is drawn from some of the vocabulary only: by top-k, top-p or min-p."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def changes_logits(self) -> bool:
        """Logits are changed before a token is chosen: penalties, bias, or stop tokens held off by min_tokens."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or (self.min_tokens and self.stop_token_ids)
        )

    @property
    def forbids_tokens(self) -> bool:
        """Some tokens are ruled out, always or after certain others: bad words, allowed tokens."""
        return bool(self.bad_sequences or self.allow_list)


# --- frontend -> scheduler


class Hello(Message, frozen=True):
    """First message of a frontend: from now on it gets heartbeats; EngineReady follows once a worker is ready. A
    scheduler of another WIRE_VERSION answers with a Fatal instead."""

    wire_version: str


class Submit(Message, frozen=True):
    request_id: int
    prompt: bytes  # int32 token ids
    params: RequestParams
    generated: bytes = b""  # int32 tokens already produced, when a request is resubmitted after a crash
    generated_depths: bytes = b""  # uint8, their exit depths
    prompt_logprobs_sent: int = 0  # rows of prompt logprobs that were delivered, likewise
    cuts: bytes = b""  # int32 tokens of each chunk of the prompt's prefill, where a TokenEvent has told
    client: int = 0  # whose it is: among requests of equal priority clients take turns


class SubmitAll(Message, frozen=True):
    """Several requests at once: all of them are queued before a stage is chosen."""

    requests: tuple[Submit, ...]


class Abort(Message, frozen=True):
    request_id: int


class GetStats(Message, frozen=True):
    pass


class Shutdown(Message, frozen=True):
    drain: bool = False


FrontendMessage = Hello | Submit | SubmitAll | Abort | GetStats | Shutdown


# --- scheduler -> frontend


class EngineInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the running engine is; sent by the worker at start, passed on to the frontend."""

    model: str
    architecture: str
    vocab_size: int
    r_max: int  # loops of a full-depth token
    r_min: int  # fewest loops after which a gate may let a token go
    default_gate: Gate
    gates: tuple[Gate, ...]  # gates this engine can run
    default_threshold: float  # of the default gate and of those that compare the same
    kv_layout: str
    block_size: int
    num_blocks: int  # logical blocks, the dummy block 0 included
    kv_bytes_per_token: int
    max_model_len: int
    boundary_layers: int  # transformer layers outside the core; decides the default K
    buckets: tuple[int, ...]  # ascending row counts of decode stages
    device: str
    dtype: str
    eos_token_ids: tuple[int, ...] = ()  # end of sequence by the model's files
    max_logprobs: int = 0  # likeliest tokens a logprob comes with; 0 = this device gives no logprobs
    grammars: bool = False  # can constrain output
    draft_lanes: int = 0  # successors of a token that may be on their way with it
    coda_layers: int = 0  # layers whose K/V a final readout writes
    quantization: str | None = None  # how the weights of the layers are stored, where not in ``dtype``
    host_blocks: int = 0  # KV blocks in host memory, for preempted sequences
    notes: tuple[str, ...] = ()  # what who starts it should know, a line each
    # Of gates that compare probabilities where the default one compares distances, or the other way round.
    other_threshold: float = HEAD_THRESHOLD
    kv_cache_dtype: str = "auto"  # how K and V are stored

    def threshold_of(self, gate: Gate) -> float:
        """The exit threshold of requests that name this gate and none."""
        alike = gate.compares_distances(self.gates) == self.default_gate.compares_distances(self.gates)
        return self.default_threshold if alike else self.other_threshold


class EngineReady(Message, frozen=True):
    info: EngineInfo


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step's news of one request. ``finish_reason`` is set on the last event, which may carry no token.

    ``logprobs``: rows of common.frames, one a token of this event; ``prompt_logprobs``: one a prompt token, in
    their order, before the first output token. ``cuts`` comes with the first token where a sequence can only be rebuilt
    with its prompt cut as it was: int32 tokens of each chunk.
    """

    request_id: int
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    cuts: bytes = b""
    failure: str = ""  # with "error": why the request's grammar cannot be followed,
    kills_worker: bool = False  # or what its worker did while it ran
    accepted_drafts: int = 0  # its tokens that a draft had said,
    rejected_drafts: int = 0  # and those for which another had been said
    cached_tokens: int = 0  # of the prompt, found in the prefix cache; comes with the first token


class Tokens(Message, frozen=True):
    events: tuple[TokenEvent, ...]


class Rejected(Message, frozen=True):
    request_id: int
    reason: str
    param: str | None = None


class Loading(Message, frozen=True):
    """How far the weights are, in bytes as stored."""

    done: int
    total: int


class SchedulerHeartbeat(Message, frozen=True):
    steps: int  # stages completed since start
    oldest_work_age_s: float  # age of the oldest unfinished stage or runnable request, 0 when idle
    worker_pid: int
    worker_steps: int
    num_running: int
    num_waiting: int


class SchedulerStats(Message, frozen=True):
    """Counters since start."""

    core: CoreStats | None = None  # None until a worker has been ready
    worker: WorkerStats | None = None  # None until it has told
    verb_seconds: dict[str, float] = {}  # of the scheduler's loop
    us_per_stage: dict[str, float] = {}  # of the scheduler, by quantile ("0.50", "0.99")
    stale_worker_results: int = 0
    decode_errors: int = 0


class Fatal(Message, frozen=True):
    """The sender cannot go on; it exits after this message."""

    process: str
    message: str
    user_error: bool = False  # True: a bad option or model, exit code 2
    other_version: bool = False  # True: the sender goes on; it is the receiver that has to go


SchedulerMessage = Loading | EngineReady | Tokens | Rejected | SchedulerHeartbeat | SchedulerStats | Fatal


# --- scheduler -> worker


class Variant(IntFlag):
    """What a stage must do beyond its cheapest form."""

    SAMPLE = 1  # some row has temperature > 0
    GATES = 2  # some row has a gate that decides on the device
    LOGITS = 4  # some row has penalties, a bias or min_tokens (prefill: some chunk's request)
    LOGPROBS = 8  # some row that gets a token wants its logprobs
    CONSTRAIN = 16  # some row has a grammar (prefill: some chunk's request)
    FORBID = 64  # some row has bad words or an allow list (prefill: some chunk's request)
    FILTER = 32  # some sampled row has top-k, top-p or min-p


PLAIN = Variant(0)


class GrammarStart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The slot's request is constrained; ``prompt_tokens``: what a prefill runs over beyond these it has generated."""

    slot: int
    prompt_tokens: int
    grammar: str


class StageExtra(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Inputs that few prefills, and preludes (``forced_tokens`` and ``offloads`` only), have (common.frames)."""

    adjustments: bytes = b""  # int32 [n, 4]
    targets: bytes = b""  # int32 [n, 2], ascending by index
    grammars: tuple[GrammarStart, ...] = ()
    depths: bytes = b""  # uint8 [n_tokens]
    forced_tokens: bytes = b""  # int32 [n, 2]
    bad_sequences: bytes = b""  # int32 [n, 2 + BAD_SEQUENCE_TOKENS]
    allow_lists: bytes = b""  # int32 [n, 1 + mask_words(vocab_size)]
    offloads: bytes = b""  # int32 [n, 2]
    restores: bytes = b""  # int32 [n, 2]


class StageBatch(Message, frozen=True):
    """Header of a stage; the int32 frame of ``common.frames`` is the next part, slot parameters the one after it.

    ``after_no_work`` tells the worker how to book the wait before this stage: True when nothing was runnable.
    """

    step_id: int
    stage: int  # frames.Stage
    bucket: int  # rows of the frame; prefill: 0
    rows: int  # real rows; prefill: sequences
    n_tokens: int = 0  # prefill only
    n_updates: int = 0  # prefill only
    variant: Variant = PLAIN
    n_slot_params: int = 0  # rows of the slot parameter frame; 0 = no such frame
    after_no_work: bool = False
    extra: StageExtra | None = None  # prefill and prelude only


class PrepareGrammar(Message, frozen=True):
    """The request is kept back until GrammarPrepared answers: its stages must not wait for a compiler."""

    request_id: int
    grammar: str


WorkerCommand = StageBatch | PrepareGrammar | Shutdown


# --- worker -> scheduler


class WorkerReady(Message, frozen=True):
    pid: int
    info: EngineInfo
    wire_version: str


class GrammarPrepared(Message, frozen=True):
    """The request's grammar has its first mask; with a ``failure``, never will."""

    request_id: int
    failure: str = ""


class RowFailure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The request of one row cannot go on; its token means nothing."""

    row: int  # among the sampled sequences, in batch order
    reason: str


class StageResult(Message, frozen=True):
    """``token_ids``: int32, one a sampled sequence in batch order (prefill, coda). With Variant.GATES, uint8 a row:
    ``fired`` (core; 1 = the row's gate fired at this loop) or ``predicted_depths`` (prelude). ``logprobs``: one row
    (common.frames) a sampled sequence, with Variant.LOGPROBS; ``prompt_logprobs``: one a target. Times are seconds on the
    worker's clock."""

    step_id: int
    start_s: float
    end_s: float
    token_ids: bytes = b""
    fired: bytes = b""
    predicted_depths: bytes = b""
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    failed: tuple[RowFailure, ...] = ()
    moved_s: float = 0.0  # what the copies between KV and host memory took that came before the stage


class WorkerHeartbeat(Message, frozen=True):
    steps: int
    busy_s: float
    idle_scheduler_s: float
    idle_no_work_s: float


WorkerMessage = Loading | WorkerReady | GrammarPrepared | StageResult | WorkerHeartbeat | Fatal


# --- frontend -> frontend, of those that share a scheduler


class AbortNamed(Message, frozen=True):
    """``ask``: the sender's number of the question, which the answer carries."""

    ask: int
    name: str


class WriteMetrics(Message, frozen=True):
    """What you have counted, where others read it."""

    ask: int


class SiblingAnswer(Message, frozen=True):
    ask: int
    known: bool = False  # some request of the name ran


SiblingMessage = AbortNamed | WriteMetrics | SiblingAnswer

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """A message as msgpack bytes."""
    return _encoder.encode(message)


class MessageDecoder:
    """Strict decoder of one direction's union, e.g. ``MessageDecoder(FrontendMessage)``."""

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes | memoryview) -> object:
        """The message; raises DecodeError on anything that is not a member of the union."""
        try:
            return self._decoder.decode(data)
        except Exception as error:  # also RecursionError, of a few kB of nesting, and MemoryError, of a false length
            raise DecodeError(f"bad message: {error}") from None
