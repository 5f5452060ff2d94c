"""Options from four sources: each field reachable from each, the stronger one wins, and nothing wrong gets through."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from depthbatch.common.config import FIELD_NAMES, FIELDS, EngineConfig, add_config_arguments, config_from_sources
from depthbatch.common.errors import ConfigError
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.options import read_toml, to_toml

# a value for every field that is valid and not the default
OTHER: dict[str, Any] = {
    "model": "elsewhere", "load_format": "dummy", "device": "simulated:x.json", "dtype": "bfloat16", "policy": "refill",
    "max_num_seqs": 7, "max_num_batched_tokens": 99, "min_free_slots": 3, "min_coda_batch": 2, "kv_headroom": 0.25,
    "kv_layout": "single", "kv_blocks": 11, "block_size": 32, "max_model_len": 128, "gate": "own", "gate_weights": "gates",
    "exit_threshold": 0.5, "min_loops": 2, "max_loops": 3, "state_init": "seeded", "preemption": "offload",
    "swap_space": 2.5, "quantization": "int8", "kv_cache_dtype": "fp8",
    "async_scheduling": "async", "stage_trace": "stages.jsonl", "threads": 1, "seed": 5,
    "tensor_parallel_size": 4,
    "objective": "goodput", "ttft_target_ms": 500.0, "itl_target_ms": 50.0, "prefix_caching": "on",
    "speculation": "2", "draft_depth": 3, "draft_acceptance": 0.5, "hang_s": 20.0,
    "kv_events_config": '{"enable_kv_cache_events": true, "endpoint": "ipc://kv"}',
    "chat_template": "chat.jinja", "generation_config": "off", "run_dir": "run",
}  # fmt: skip
TARGETS = ("objective", "ttft_target_ms", "itl_target_ms")
# what else must be set for a value to be accepted
BESIDE: dict[str, dict[str, Any]] = {
    "min_coda_batch": {"policy": "refill"},
    "ttft_target_ms": {"objective": "latency"},
    "itl_target_ms": {"objective": "latency"},
    "swap_space": {"preemption": "offload"},
    "draft_depth": {"speculation": 1},
    "kv_events_config": {"prefix_caching": "on"},
    "draft_acceptance": {"speculation": "auto", "device": "simulated:x.json"},
}
NOT_SIMULATED = ("tensor_parallel_size", "quantization", "kv_cache_dtype")  # not of a simulated device
ALL_OF_REFILL = {name: value for name, value in OTHER.items() if name not in (*TARGETS, *NOT_SIMULATED)}
ALL_OF_AUTO = {name: value for name, value in OTHER.items() if name not in ("policy", "min_coda_batch", *NOT_SIMULATED)}


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return parser.parse_args(words)


def test_table_covers_every_field() -> None:
    """The tests below run over OTHER: a field that is missing there would not be tested at all."""
    assert set(OTHER) == set(FIELD_NAMES)
    defaults = EngineConfig()
    assert all(getattr(defaults, name) != value for name, value in OTHER.items())


@pytest.mark.parametrize("name", [name for name in FIELD_NAMES if name != "model"])
def test_precedence(name: str, tmp_path: Path) -> None:
    """Command line > environment > TOML > default, for every option by itself. Each step removes the strongest source
    of the last one, and the value below it must show."""
    value, default = OTHER[name], getattr(EngineConfig(), name)
    file = tmp_path / "options.toml"
    file.write_text(to_toml(EngineConfig(**BESIDE.get(name, {}) | {name: value})))
    from_file = ("--config", str(file))
    option, variable = "--" + name.replace("_", "-"), "DEPTHBATCH_" + name.upper()
    as_default = "" if default is None else str(default)
    assert getattr(config_from_sources(parse(), {}), name) == default
    assert getattr(config_from_sources(parse(*from_file), {}), name) == value
    from_environment = value if default is None else default  # an empty variable is none
    assert getattr(config_from_sources(parse(*from_file), {variable: as_default}), name) == from_environment
    assert getattr(config_from_sources(parse(*from_file, option, as_default), {}), name) == default
    assert getattr(config_from_sources(parse(*from_file, option, str(value)), {variable: as_default}), name) == value


@pytest.mark.parametrize("values", [ALL_OF_REFILL, ALL_OF_AUTO])
def test_round_trips(values: dict[str, Any]) -> None:
    """What a child process and what --print-config | --config get is the same configuration."""
    config = EngineConfig(**values)
    assert EngineConfig.from_json(config.to_json()) == config


def test_print_config_says_which_keys_are_unset() -> None:
    """Bug: options that stay unset for good (a trace file, targets) were said to be found at start."""
    printed = to_toml(EngineConfig(kv_blocks=7)).splitlines()
    unset = {line[2:].removesuffix(" = (unset)") for line in printed if line.endswith(" = (unset)")}
    values = msgspec.structs.asdict(EngineConfig(kv_blocks=7))
    assert unset == {name for name, value in values.items() if value is None} and "stage_trace" in unset
    assert "kv_blocks = 7" in printed and len(printed) == len(values)


def test_print_config_reads_back(tmp_path: Path) -> None:
    for config in (EngineConfig(), EngineConfig(**ALL_OF_REFILL), EngineConfig(**ALL_OF_AUTO)):
        file = tmp_path / "printed.toml"
        file.write_text(to_toml(config))
        assert EngineConfig.from_values(read_toml(file, FIELDS)) == config


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"polcy": "cb"}, ("polcy", "policy")),
        ({"policy": "auto-magic"}, ("policy", "auto-magic")),
        ({"policy": "\udcff"}, ("policy", "udcff")),  # bug: bytes that are no UTF-8 ended with a traceback
        ({"max_num_seqs": 0}, ("max_num_seqs", "0")),
        ({"max_num_seqs": "8"}, ("max_num_seqs", "'8'")),
        ({"max_num_seqs": True}, ("max_num_seqs", "True")),
        ({"max_num_seqs": 2.5}, ("max_num_seqs", "2.5")),
        ({"max_num_seqs": None}, ("max_num_seqs", "None")),
        ({"kv_headroom": -0.1}, ("kv_headroom", "-0.1")),
        ({"kv_headroom": float("nan")}, ("kv_headroom", "nan")),
        ({"exit_threshold": -1.0}, ("exit_threshold", "-1.0")),
        ({"exit_threshold": "x"}, ("exit_threshold", "x")),
        ({"kv_blocks": -5}, ("kv_blocks", "-5")),
        ({"device": "tpu"}, ("device", "tpu")),
        ({"gate": "fixed"}, ("gate", "fixed")),
        ({"min_loops": 4, "max_loops": 2}, ("min_loops 4", "max_loops 2")),
        ({"prefix_caching": True}, ("prefix_caching must be one of off, on, generated", "True")),
        ({"min_free_slots": 9, "max_num_seqs": 8}, ("min_free_slots 9", "max_num_seqs 8")),
        ({"min_coda_batch": 9}, ("min_coda_batch 9", "policy refill", "auto")),
        ({"policy": "refill", "min_coda_batch": 9, "max_num_seqs": 8}, ("min_coda_batch 9", "max_num_seqs 8")),
        ({"kv_layout": "depth_indexed", "gate": "own"}, ("depth_indexed", "own")),
        ({"seed": -1}, ("seed", "-1")),
        ({"objective": "speed"}, ("objective", "'speed'")),
        ({"policy": "refill", "objective": "goodput"}, ("objective goodput", "policy auto", "refill")),
        ({"policy": "auto", "ttft_target_ms": 500.0}, ("ttft_target_ms", "objective latency or goodput")),
        ({"policy": "auto", "objective": "latency", "itl_target_ms": 0.0}, ("itl_target_ms", "0.0")),
        ({"speculation": "on"}, ("speculation", "'on'")),
        ({"speculation": 0}, ("speculation", "0")),
        ({"speculation": 9}, ("speculation", "9")),
        ({"speculation": 2, "policy": "cb"}, ("speculation 2", "policy refill or auto", "cb")),
        ({"speculation": 2, "policy": "no-refill"}, ("speculation 2", "policy refill or auto", "no-refill")),
        ({"draft_depth": 1}, ("draft_depth 1", "needs speculation")),
        ({"speculation": 2, "draft_depth": 0}, ("draft_depth", "0")),
        ({"speculation": 2, "draft_acceptance": 0.5, "device": "cpu"}, ("draft_acceptance 0.5", "simulated")),
        ({"draft_acceptance": 0.5, "device": "simulated:x.json"}, ("draft_acceptance 0.5", "speculation")),
        ({"speculation": 2, "draft_acceptance": 1.5, "device": "simulated:x.json"}, ("draft_acceptance", "1.5")),
    ],
)
def test_bad_values(values: dict[str, Any], names: tuple[str, ...]) -> None:
    """The message names the option and the value: a user must not have to guess."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_values(values)
    assert all(name in str(caught.value) for name in names), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("polcy = 'cb'", ("polcy", "did you mean 'policy'")),
        ("max-num-seqs = 'many'", ("max-num-seqs", "'many'")),
        ("policy = 3", ("policy", "3")),
        ("policy = ", ("not TOML",)),
        ("[policy]\nname = 'cb'", ("policy", "{'name': 'cb'}")),
        ("\xff", ("not TOML",)),
    ],
)
def test_bad_toml(text: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """The message names file, key and value."""
    file = tmp_path / "bad.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        config_from_sources(parse("--config", str(file)), {})
    assert all(name in str(caught.value) for name in ("bad.toml", *names)), caught.value


def test_gate_none_is_a_gate() -> None:
    """``--gate none`` asks for full depth; it must not be taken for "no gate given"."""
    assert config_from_sources(parse("--gate", "none"), {}).gate == "none"


def test_missing_toml_file() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        config_from_sources(parse("--config", "/nowhere.toml"), {})


def test_bad_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="DEPTHBATCH_MAX_NUM_SEQS must be a whole number, not 'x'"):
        config_from_sources(parse(), {"DEPTHBATCH_MAX_NUM_SEQS": "x"})


@pytest.mark.parametrize(
    ("options", "layout", "r_max", "says"),
    [
        ({}, KVLayout.SINGLE, 16, r"\(last_exited or depth_indexed\): not single with 16"),
        ({}, KVLayout.LAST_EXITED, 1, "not last_exited with 1"),
        ({"draft_depth": 4}, KVLayout.LAST_EXITED, 4, "draft_depth 4 leaves no loop to go: a token has 4"),
        ({"draft_depth": 9}, KVLayout.LAST_EXITED, 4, "draft_depth 9 leaves"),
    ],
)
def test_drafts_that_a_model_cannot_have(options: dict[str, Any], layout: KVLayout, r_max: int, says: str) -> None:
    """Bug: a draft depth of all loops or more was accepted, and no draft was ever read; which layouts would do was not said."""
    with pytest.raises(ConfigError, match=says):
        EngineConfig(speculation="2", **options).draft_lanes_under(layout, r_max)
    assert EngineConfig(speculation="2", draft_depth=3).draft_lanes_under(KVLayout.LAST_EXITED, 4) == 2
