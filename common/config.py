"""The engine's configuration: frozen, built and validated once at the edge, passed down.

Command-line options, TOML keys and DEPTHBATCH_* variables are derived from the fields of EngineConfig, so that an
option exists exactly when its field does. Knows nothing of models: what depends on one (a layout it lacks, a gate it
has not) is refused where the model is known.
"""

import argparse
import json
import os
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from depthbatch.common.errors import ConfigError
from depthbatch.common.gates import GATE_BY_LABEL, Gate
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.common.kv_events import KvEventsConfig
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.options import (
    Natural,
    Options,
    add_option_arguments,
    did_you_mean,
    option,
    options_of,
    values_from_sources,
)

POLICIES = ("auto", "refill", "no-refill", "cb")
OBJECTIVES = ("throughput", "latency", "goodput")
ASYNC_MODES = ("off", "async", "lookahead")
PREEMPTION = ("off", "recompute", "offload")
DEFAULT_SWAP_SPACE = 4.0  # GiB
PREFIX_CACHING = ("off", "on", "generated")
QUANTIZATIONS = ("int8",)
LOAD_FORMATS = ("auto", "dummy")
STATE_INITS = ("zero", "seeded")
DTYPE_NAMES = ("float32", "bfloat16", "float16")
KV_LAYOUTS = tuple(layout.value for layout in KVLayout)
KV_CACHE_DTYPES = tuple(kind.value for kind in KVCacheDtype)
ENGINE_GATES = tuple(gate.label for gate in Gate if gate not in (Gate.FIXED, Gate.REPLAY))  # those need request fields
MAX_DRAFT_LANES = 8
AUTO_DRAFT_LANES = 4  # of which auto uses as many as pay


class EngineConfig(Options, frozen=True):
    """Every option of the engine. None means: found out at start (the help says from what)."""

    model: Annotated[str, option("model directory, Hugging Face repo id, or 'demo'")] = "demo"
    load_format: Annotated[str, option("'dummy' makes seeded random weights from config.json", LOAD_FORMATS)] = "auto"
    device: Annotated[str, option("auto, cpu, cuda or simulated:PROFILE.json")] = "auto"
    dtype: Annotated[str, option("dtype of weights and KV; auto = the checkpoint's", ("auto", *DTYPE_NAMES))] = "auto"
    quantization: Annotated[
        str | None,
        option(
            "weights of the layers in a byte each, quantised as they are loaded, on device cpu (default: as stored)",
            QUANTIZATIONS,
        ),
    ] = None
    policy: Annotated[
        str, option("how stages are ordered; auto learns when from measured costs and exits", POLICIES)
    ] = "auto"
    objective: Annotated[str, option("what auto aims at; the others than throughput have targets", OBJECTIVES)] = (
        "throughput"
    )
    ttft_target_ms: Annotated[
        Annotated[float, Meta(ge=1.0)] | None,
        option("time to first token that latency and goodput aim at, from arrival (default there: 1000)"),
    ] = None
    itl_target_ms: Annotated[
        Annotated[float, Meta(ge=0.1)] | None,
        option(
            "inter-token latency that latency (between any two tokens) and goodput (mean of a request) aim at "
            "(default there: 100)"
        ),
    ] = None
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=65535)], option("W: most sequences that are active at a time")
    ] = 64
    max_num_batched_tokens: Annotated[Natural, option("M: most prompt tokens in one prefill batch")] = 8192
    min_free_slots: Annotated[
        Natural | None, option("S: free slots that a prefill waits for (default max(1, W // 8)); auto starts with it")
    ] = None
    min_coda_batch: Annotated[
        Natural | None,
        option(
            "K: exited rows that coda waits for under refill, unless drafts ask for one (default 1; with layers outside the core W // 4, with a fixed number of drafts W)"
        ),
    ] = None
    kv_headroom: Annotated[
        Annotated[float, Meta(ge=0.0, le=0.9)], option("share of the KV blocks kept free at admission")
    ] = 0.0
    kv_layout: Annotated[str | None, option("KV layout (default: the model's)", KV_LAYOUTS)] = None
    kv_cache_dtype: Annotated[
        str,
        option("how K and V are stored: auto = in dtype; int8 or fp8 (e4m3): a byte a number", KV_CACHE_DTYPES),
    ] = "auto"
    kv_blocks: Annotated[Natural | None, option("KV blocks (default: from the free memory)")] = None
    block_size: Annotated[Natural | None, option("tokens per KV block (default: the attention backend's)")] = None
    max_model_len: Annotated[Natural | None, option("longest sequence, prompt and output (default: the model's)")] = (
        None
    )
    gate: Annotated[str | None, option("exit gate of requests that name none (default: the model's)", ENGINE_GATES)] = (
        None
    )
    gate_weights: Annotated[
        str | None,
        option(
            "file of a trained gate, or directory of such files, instead of those of their kind beside the model "
            "(default: those)"
        ),
    ] = None
    exit_threshold: Annotated[
        Annotated[float, Meta(ge=0.0)] | None,
        option("exit threshold of requests that name none (default: the model's)"),
    ] = None
    min_loops: Annotated[Natural | None, option("fewest loops before a gate may exit (default: the model's)")] = None
    max_loops: Annotated[Natural | None, option("r_max: loops of a full-depth token (default: the model's)")] = None
    state_init: Annotated[
        str,
        option(
            "initial recurrent state of models that have one: zeros, or a function of (seed, position)",
            STATE_INITS,
        ),
    ] = "zero"
    preemption: Annotated[
        str,
        option("when KV blocks run out: a victim is computed again, or copied to host memory and back", PREEMPTION),
    ] = "recompute"
    swap_space: Annotated[
        Annotated[float, Meta(ge=0.001, le=1048576.0)] | None,
        option("GiB of host memory for the K/V of preempted sequences (default with preemption offload: 4)"),
    ] = None
    prefix_caching: Annotated[
        str | None,
        option(
            "keep the K/V of prompts (generated: and outputs), so that prompts which begin alike share them (default: on "
            "where every loop has a KV plane: there no answer changes)",
            PREFIX_CACHING,
            bare="on",
        ),
    ] = None
    kv_events_config: Annotated[
        str | None,
        option(
            "what happens to cached prefixes, published for routers as vLLM does: a JSON object, "
            '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "topic": ...}'
        ),
    ] = None
    stage_trace: Annotated[
        str | None, option("file that gets one JSON line a stage, in launch order (scheduling trace)")
    ] = None
    async_scheduling: Annotated[str, option("how far the scheduler runs ahead of the worker", ASYNC_MODES)] = (
        "lookahead"
    )
    speculation: Annotated[
        str | int,
        option(
            "draft lanes of a sequence: its next tokens start from drafts, the output stays the same; off, auto or N"
        ),
    ] = "off"
    draft_depth: Annotated[
        Natural | None,
        option(
            "loops after which a token is read for the draft of the next (default max(1, r_max // 8); auto finds the best)"
        ),
    ] = None
    draft_acceptance: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        option("of a simulated device: share of the drafts that are right (default there: 0.9)"),
    ] = None
    chat_template: Annotated[
        str | None, option("file with the chat template, a jinja text (default: the model's own)")
    ] = None
    generation_config: Annotated[
        str,
        option(
            "auto: temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of the model's "
            "generation_config.json hold for requests that do not say; off: they do not",
            ("auto", "off"),
        ),
    ] = "auto"
    run_dir: Annotated[
        str | None,
        option("directory of the sockets and logs, the native address among them (default: a new one of each engine)"),
    ] = None
    hang_s: Annotated[
        Annotated[float, Meta(ge=0.5)],
        option(
            "with work waiting, no step for this long: the worker's stacks are logged, it is killed and started again"
        ),
    ] = 300.0
    threads: Annotated[Natural | None, option("threads of the CPU worker (default: the cores it may use)")] = None
    tensor_parallel_size: Annotated[
        Natural, option("ranks that share the layers and the KV memory of one worker: processes, on GPUs one each")
    ] = 1
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)],
        option("seed of dummy weights, and of requests that name none (a server's differ from start to start)"),
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device not in ("auto", "cpu", "cuda") and not self.device.startswith("simulated:"):
            raise ConfigError(f"device must be auto, cpu, cuda or simulated:PROFILE.json, not {self.device!r}")
        if self.tensor_parallel_size > 1 and self.device.startswith("simulated:"):
            raise ConfigError(f"tensor_parallel_size {self.tensor_parallel_size}: a simulated device is one rank")
        if self.quantization is not None and self.device.startswith("simulated:"):
            raise ConfigError(f"quantization {self.quantization}: a simulated device has no weights")
        if self.kv_cache_dtype != "auto" and self.device.startswith("simulated:"):
            raise ConfigError(f"kv_cache_dtype {self.kv_cache_dtype}: a simulated device has no K and V")
        if self.quantization is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"quantization {self.quantization} is for one rank, not for tensor_parallel_size {self.tensor_parallel_size}"
            )
        if self.min_loops is not None and self.max_loops is not None and self.min_loops > self.max_loops:
            raise ConfigError(f"min_loops {self.min_loops} is more than max_loops {self.max_loops}")
        if self.min_free_slots is not None and self.min_free_slots > self.max_num_seqs:
            raise ConfigError(f"min_free_slots {self.min_free_slots} is more than max_num_seqs {self.max_num_seqs}")
        if self.min_coda_batch is not None and self.min_coda_batch > self.max_num_seqs:
            raise ConfigError(f"min_coda_batch {self.min_coda_batch} is more than max_num_seqs {self.max_num_seqs}")
        if self.min_coda_batch is not None and self.policy != "refill":
            raise ConfigError(f"min_coda_batch {self.min_coda_batch} needs policy refill, not {self.policy}")
        if self.draft_lanes is None:
            raise ConfigError(
                f"speculation must be off, auto or a number from 1 to {MAX_DRAFT_LANES}, not {self.speculation!r}"
            )
        if self.draft_lanes and self.policy in ("cb", "no-refill"):
            raise ConfigError(
                f"speculation {self.speculation} needs policy refill or auto: {self.policy} has no rows to give"
            )
        if self.draft_depth is not None and not self.draft_lanes:
            raise ConfigError(f"draft_depth {self.draft_depth} needs speculation")
        if self.draft_acceptance is not None and not (self.draft_lanes and self.device.startswith("simulated:")):
            raise ConfigError(f"draft_acceptance {self.draft_acceptance:g} needs speculation on a simulated device")
        if self.objective != "throughput" and self.policy != "auto":
            raise ConfigError(f"objective {self.objective} needs policy auto, not {self.policy}")
        for name in ("ttft_target_ms", "itl_target_ms"):
            if getattr(self, name) is not None and self.objective == "throughput":
                raise ConfigError(f"{name} needs policy auto with objective latency or goodput")
        if self.swap_space is not None and self.preemption != "offload":
            raise ConfigError(f"swap_space {self.swap_space:g} needs preemption offload, not {self.preemption}")
        gate = GATE_BY_LABEL[self.gate] if self.gate is not None else Gate.NONE
        if self.kv_events is not None and self.prefix_caching == "off":
            raise ConfigError("kv_events_config needs prefix_caching: there are no cached prefixes to tell of")
        if self.kv_layout is not None and not KVLayout(self.kv_layout).allows_early_exit and gate.may_exit_early:
            raise ConfigError(f"kv_layout {self.kv_layout} cannot run gate {self.gate}: early exits leave holes in it")

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """Of ``kv_events_config``; None where nothing is published. Raises ConfigError."""
        config = None if self.kv_events_config is None else KvEventsConfig.parse(self.kv_events_config)
        return config if config is not None and config.enable_kv_cache_events else None

    @property
    def draft_lanes(self) -> int | None:
        """N, the most draft lanes of a sequence; 0 = no speculation, None = ``speculation`` says nothing that can be."""
        match str(self.speculation):
            case "off":
                return 0
            case "auto":
                return AUTO_DRAFT_LANES
            case text if text.isdecimal() and 1 <= int(text) <= MAX_DRAFT_LANES:
                return int(text)
        return None

    def draft_lanes_under(self, layout: KVLayout, r_max: int) -> int:
        """N for a model. Raises ConfigError where a draft would be read by other rows before it is final."""
        lanes = self.draft_lanes or 0
        if lanes and (not layout.keeps_every_loop(r_max) or r_max < 2):
            raise ConfigError(
                f"speculation needs more than one loop, and a KV layout with a plane for each (last_exited or depth_indexed):"
                f" not {layout} with {r_max}"
            )
        if lanes and (self.draft_depth or 1) >= r_max:
            raise ConfigError(f"draft_depth {self.draft_depth} leaves no loop to go: a token has {r_max}")
        return lanes

    @property
    def swap_bytes(self) -> int:
        """Of host memory for preempted sequences."""
        return int((self.swap_space or DEFAULT_SWAP_SPACE) * (1 << 30)) if self.preemption == "offload" else 0

    def to_json(self) -> str:
        """The form in which it is passed to child processes."""
        return json.dumps(msgspec.structs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineConfig":
        """The inverse of to_json; raises ConfigError on anything else."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--config is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError("--config is no JSON object")
        return cls.from_values(values, "--config")

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "option") -> "EngineConfig":
        """From typed values by name (Python keywords, TOML, JSON). Raises ConfigError on unknown names."""
        for key in values:
            if key not in FIELD_NAMES:
                raise ConfigError(f"unknown {source} {key!r}{did_you_mean(key, FIELD_NAMES)}")
        return cls(**values)


FIELDS = options_of(EngineConfig)
FIELD_NAMES = tuple(FIELDS)


def add_config_arguments(parser: argparse.ArgumentParser, names: Collection[str] = ()) -> None:
    """Adds --config and an option for every engine field (or those of ``names``) but ``model``. An option that is not
    given leaves no attribute."""
    parser.add_argument("--config", metavar="FILE.toml", help="options from a TOML file, by name")
    add_option_arguments(parser, FIELDS, "engine options", names)


def config_from_sources(
    arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ, model: str | None = None
) -> EngineConfig:
    """The configuration a command runs with. Command line > DEPTHBATCH_* > TOML file > default.

    Raises ConfigError that names the option, key or variable and the value.
    """
    values = values_from_sources(arguments, environ, FIELDS)
    if model is not None:
        values["model"] = model
    return EngineConfig.from_values(values)
