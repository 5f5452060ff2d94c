"""The engine's configuration: frozen, built and validated once at the edge, passed down.

Command-line options, TOML keys and DEPTHBATCH_* variables are derived from the fields of EngineConfig, so that an
option exists exactly when its field does.
"""

from dataclasses import dataclass, field, fields
from typing import Any

POLICIES = ("refill", "no-refill", "cb")
ASYNC_MODES = ("off", "async", "lookahead")
PREEMPTION = ("off", "recompute")


def option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field with what its command-line option needs."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class EngineConfig:
    """Every option of the engine. None means: found out at start (the help says from what)."""

    model: str = option("demo", "model directory, Hugging Face repo id, or 'demo'")
    load_format: str = option("auto", "'dummy' makes seeded random weights from config.json", ("auto", "dummy"))
    device: str = option("auto", "auto, cpu, cuda or simulated:PROFILE.json")
    dtype: str = option("auto", "dtype of weights and KV; auto = the checkpoint's", ("auto", "float32", "bfloat16"))
    policy: str = option("refill", "how stages are ordered", POLICIES)
    max_num_seqs: int = option(64, "W: most sequences that are active at a time")
    max_num_batched_tokens: int = option(8192, "M: most prompt tokens in one prefill batch")
    min_free_slots: int | None = option(None, "S: free slots that a prefill waits for (default max(1, W // 8))")
    min_coda_batch: int | None = option(
        None,
        "K: exited rows that coda waits for under refill (default 1, or W // 4 with layers outside the core)",
    )
    kv_headroom: float = option(0.0, "share of the KV blocks kept free at admission")
    kv_layout: str | None = option(
        None,
        "KV layout (default: the model's)",
        ("single", "first_then_shared", "last_exited", "depth_indexed"),
    )
    kv_blocks: int | None = option(None, "KV blocks (default: from the free memory)")
    block_size: int | None = option(None, "tokens per KV block (default: the attention backend's)")
    max_model_len: int | None = option(None, "longest sequence, prompt and output (default: the model's)")
    gate: str | None = option(None, "exit gate of requests that name none (default: the model's)")
    exit_threshold: float | None = option(None, "threshold of requests that name none (default: the model's)")
    min_loops: int | None = option(None, "fewest loops before a gate may exit (default: the model's)")
    max_loops: int | None = option(None, "r_max: loops of a full-depth token (default: the model's)")
    state_init: str = option(
        "zero",
        "initial recurrent state of models that have one: zeros, or a function of (seed, position)",
        ("zero", "seeded"),
    )
    preemption: str = option("recompute", "what happens when KV blocks run out", PREEMPTION)
    async_scheduling: str = option("off", "how far the scheduler runs ahead of the worker", ASYNC_MODES)
    threads: int | None = option(None, "threads of the CPU worker (default: the cores it may use)")
    seed: int = option(0, "seed of dummy weights and of requests that name none")


FIELD_NAMES = tuple(f.name for f in fields(EngineConfig))
