"""The engine's configuration: frozen, built and validated once at the edge, passed down.

Command-line options, TOML keys and DEPTHBATCH_* variables are derived from the fields of EngineConfig, so that an
option exists exactly when its field does. Knows nothing of models: what depends on one (a layout it lacks, a gate it
has not) is refused where the model is known.
"""

import argparse
import json
import os
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from depthbatch.common.errors import ConfigError
from depthbatch.common.gates import GATE_BY_LABEL, Gate
from depthbatch.common.kv_layout import KVLayout

POLICIES = ("auto", "refill", "no-refill", "cb")
OBJECTIVES = ("throughput", "latency", "goodput")
ASYNC_MODES = ("off", "async", "lookahead")
PREEMPTION = ("off", "recompute")
PREFIX_CACHING = ("off", "on")


ENGINE_GATES = tuple(gate.label for gate in Gate if gate not in (Gate.FIXED, Gate.REPLAY))  # those need request fields
ENVIRONMENT_PREFIX = "DEPTHBATCH_"


def option(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    bare: str | None = None,
) -> Any:
    """A field with what its command-line option needs: help, the values or the (inclusive) range it may take, and what
    it means without a value."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high, "bare": bare})


@dataclass(frozen=True)
class EngineConfig:
    """Every option of the engine. None means: found out at start (the help says from what)."""

    model: str = option("demo", "model directory, Hugging Face repo id, or 'demo'")
    load_format: str = option("auto", "'dummy' makes seeded random weights from config.json", ("auto", "dummy"))
    device: str = option("auto", "auto, cpu, cuda or simulated:PROFILE.json")
    dtype: str = option("auto", "dtype of weights and KV; auto = the checkpoint's", ("auto", "float32", "bfloat16"))
    policy: str = option("auto", "how stages are ordered; auto learns when from measured costs and exits", POLICIES)
    objective: str = option("throughput", "what auto aims at; the others than throughput have targets", OBJECTIVES)
    ttft_target_ms: float | None = option(
        None, "time to first token that latency and goodput aim at, from arrival (default there: 1000)", low=1.0
    )
    itl_target_ms: float | None = option(
        None,
        "inter-token latency that latency (between any two tokens) and goodput (mean of a request) aim at "
        "(default there: 100)",
        low=0.1,
    )
    max_num_seqs: int = option(64, "W: most sequences that are active at a time", low=1, high=65535)
    max_num_batched_tokens: int = option(8192, "M: most prompt tokens in one prefill batch", low=1)
    min_free_slots: int | None = option(
        None, "S: free slots that a prefill waits for (default max(1, W // 8)); auto starts with it", low=1
    )
    min_coda_batch: int | None = option(
        None,
        "K: exited rows that coda waits for under refill (default 1, or W // 4 with layers outside the core)",
        low=1,
    )
    kv_headroom: float = option(0.0, "share of the KV blocks kept free at admission", low=0.0, high=0.9)
    kv_layout: str | None = option(
        None,
        "KV layout (default: the model's)",
        tuple(KVLayout),
    )
    kv_blocks: int | None = option(None, "KV blocks (default: from the free memory)", low=1)
    block_size: int | None = option(None, "tokens per KV block (default: the attention backend's)", low=1)
    max_model_len: int | None = option(None, "longest sequence, prompt and output (default: the model's)", low=1)
    gate: str | None = option(None, "exit gate of requests that name none (default: the model's)", ENGINE_GATES)
    exit_threshold: float | None = option(
        None, "exit threshold of requests that name none (default: the model's)", low=0.0
    )
    min_loops: int | None = option(None, "fewest loops before a gate may exit (default: the model's)", low=1)
    max_loops: int | None = option(None, "r_max: loops of a full-depth token (default: the model's)", low=1)
    state_init: str = option(
        "zero",
        "initial recurrent state of models that have one: zeros, or a function of (seed, position)",
        ("zero", "seeded"),
    )
    preemption: str = option("recompute", "what happens when KV blocks run out", PREEMPTION)
    prefix_caching: str = option(
        "off", "keep the K/V of prompts, so that prompts which begin alike share them", PREFIX_CACHING, bare="on"
    )
    stage_trace: str | None = option(None, "file that gets one JSON line a stage, in launch order (scheduling trace)")
    async_scheduling: str = option("lookahead", "how far the scheduler runs ahead of the worker", ASYNC_MODES)
    threads: int | None = option(None, "threads of the CPU worker (default: the cores it may use)", low=1)
    seed: int = option(0, "seed of dummy weights and of requests that name none", low=0, high=2**63 - 1)

    def __post_init__(self) -> None:
        for entry in fields(self):
            check_option(entry, getattr(self, entry.name), entry.name)
        if self.device not in ("auto", "cpu", "cuda") and not self.device.startswith("simulated:"):
            raise ConfigError(f"device must be auto, cpu, cuda or simulated:PROFILE.json, not {self.device!r}")
        if self.min_loops is not None and self.max_loops is not None and self.min_loops > self.max_loops:
            raise ConfigError(f"min_loops {self.min_loops} is more than max_loops {self.max_loops}")
        if self.min_free_slots is not None and self.min_free_slots > self.max_num_seqs:
            raise ConfigError(f"min_free_slots {self.min_free_slots} is more than max_num_seqs {self.max_num_seqs}")
        if self.min_coda_batch is not None and self.min_coda_batch > self.max_num_seqs:
            raise ConfigError(f"min_coda_batch {self.min_coda_batch} is more than max_num_seqs {self.max_num_seqs}")
        if self.min_coda_batch is not None and self.policy != "refill":
            raise ConfigError(f"min_coda_batch {self.min_coda_batch} needs policy refill, not {self.policy}")
        if self.objective != "throughput" and self.policy != "auto":
            raise ConfigError(f"objective {self.objective} needs policy auto, not {self.policy}")
        for name in ("ttft_target_ms", "itl_target_ms"):
            if getattr(self, name) is not None and self.objective == "throughput":
                raise ConfigError(f"{name} needs policy auto with objective latency or goodput")
        gate = GATE_BY_LABEL[self.gate] if self.gate is not None else Gate.NONE
        if self.kv_layout is not None and not KVLayout(self.kv_layout).allows_early_exit and gate.may_exit_early:
            raise ConfigError(f"kv_layout {self.kv_layout} cannot run gate {self.gate}: early exits leave holes in it")

    def to_json(self) -> str:
        """The form in which it is passed to child processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineConfig":
        """The inverse of to_json; raises ConfigError on anything else."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--config is not JSON: {error}") from None
        return cls.from_values(values, "--config")

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "option") -> "EngineConfig":
        """From typed values by name (Python keywords, TOML, JSON). Raises ConfigError on unknown names."""
        for key in values:
            if key not in FIELD_NAMES:
                raise ConfigError(f"unknown {source} {key!r}{_did_you_mean(key, FIELD_NAMES)}")
        return cls(**values)


FIELDS = {entry.name: entry for entry in fields(EngineConfig)}
FIELD_NAMES = tuple(FIELDS)


# --- the four sources, weakest first: defaults, TOML file, environment, command line


def add_config_arguments(parser: argparse.ArgumentParser, names: Collection[str] = ()) -> None:
    """Adds --config and an option for every engine field (or those of ``names``) but ``model``. An option that is not
    given leaves no attribute."""
    parser.add_argument("--config", metavar="FILE.toml", help="options from a TOML file, by name")
    add_option_arguments(parser, FIELDS, "engine options", names)


def add_option_arguments(
    parser: argparse.ArgumentParser, options: Mapping[str, Any], title: str, names: Collection[str] = ()
) -> None:
    """An argument for every field of a configuration dataclass (name -> dataclasses.Field)."""
    group = parser.add_argument_group(title)
    for name, entry in options.items():
        if name == "model" or (names and name not in names):
            continue
        default = "" if entry.default is None else f" (default {entry.default})"
        choices = entry.metadata["choices"]
        bare = entry.metadata.get("bare")
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            default=argparse.SUPPRESS,
            nargs=None if bare is None else "?",
            const=bare,
            metavar="|".join(choices) if choices else plain_type(entry).__name__.upper(),
            help=entry.metadata["help"].replace("%", "%%") + default,
        )


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


def values_from_sources(
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    options: Mapping[str, Any],
    others: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The values of ``options`` that some source gives. ``others``: fields of other configurations, which the TOML
    file may hold too. Raises ConfigError."""
    values: dict[str, Any] = {}
    path = getattr(arguments, "config", None)
    if path is not None:
        table = read_toml(Path(path), {**options, **others})
        values |= {name: value for name, value in table.items() if name in options}
    for name, entry in options.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environ:
            values[name] = _parse(entry, environ[variable], variable)
    for name, entry in options.items():
        if name in arguments and name != "model":
            values[name] = _parse(entry, getattr(arguments, name), "--" + name.replace("_", "-"))
    return values


def read_toml(path: Path, options: Mapping[str, Any] = FIELDS) -> dict[str, Any]:
    """The options of a TOML file; names with dashes or underscores. Raises ConfigError naming file, key and value."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in options:
            raise ConfigError(f"{path}: unknown key {key!r}{_did_you_mean(name, options)}")
        check_option(options[name], value, f"{path}: {key}")
        values[name] = value
    return values


def to_toml(config: Any) -> str:
    """What --print-config prints: a file that --config reads back as the same configuration."""
    lines = []
    for name, value in asdict(config).items():
        lines.append(f"# {name} = (found at start)" if value is None else f"{name} = {json.dumps(value)}")
    return "\n".join(lines)


def plain_type(entry: Any) -> type:
    """int, float or str: a field's type without None."""
    hint = entry.type
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    assert isinstance(hint, type)
    return hint


def _parse(entry: Any, text: str, source: str) -> Any:
    """A value from text; an empty one clears a field that may be None."""
    if entry.default is None and not text:
        return None
    kind = plain_type(entry)
    try:
        value = kind(text)
    except ValueError:
        article = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{source} must be {article}, not {text!r}") from None
    check_option(entry, value, source)
    return value


def check_option(entry: Any, value: Any, source: str) -> None:
    """Type, choices and range of one value; raises ConfigError naming ``source`` and the value."""
    if value is None and entry.default is None:
        return
    kind = plain_type(entry)
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ConfigError(f"{source} must be {kind.__name__}, not {value!r}")
    choices, low, high = (entry.metadata[key] for key in ("choices", "low", "high"))
    if choices is not None and value not in choices:
        raise ConfigError(f"{source} must be one of {', '.join(choices)}, not {value!r}")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{source} must be {bounds}, not {value!r}")


def _did_you_mean(name: str, known: Collection[str]) -> str:
    import difflib  # only on the way to an error

    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
