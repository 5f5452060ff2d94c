"""What the GPU check runs: model shapes as configurations for dummy weights, their batches, and workloads.

Real shapes are the published ones of Ouro-1.4B and Huginn-3.5B (models.md); the tiny ones stand in where no GPU is.
"""

import json
from bisect import bisect_left
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from depthbatch.benchmarks.workload import Workload, WorkloadRequest

OURO = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "hidden_act": "silu",
    "eos_token_id": 0,
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "tie_word_embeddings": False,
}
HUGINN = {
    "architectures": ["RavenForCausalLM"],
    "model_type": "huginn_raven",
    "eos_token_id": 65505,
    "n_embd": 5280,
    "n_heads": 55,
    "n_layers": 8,
    "block_size": 4096,
    "vocab_size": 65536,
    "padding_multiple": 4096,
    "tie_embeddings": True,
    "intermediate_size": 17920,
    "bias": False,
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "norm_eps": 1e-6,
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "state_init": "like-init",
    "injection_type": "linear",
    "n_layers_in_recurrent_block": 4,
    "mean_recurrence": 32,
    "n_layers_in_prelude": 2,
    "n_layers_in_coda": 2,
    "qk_bias": True,
    "rope_base": 50000,
}
TINY_OURO = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
TINY_HUGINN = {
    "eos_token_id": 0,
    "n_embd": 64,
    "n_heads": 4,
    "vocab_size": 320,
    "padding_multiple": 64,
    "intermediate_size": 160,
}


class Shape(NamedTuple):
    """A model to measure, and how."""

    config: dict[str, Any]
    dtype: str
    width: int  # W of the captured runner
    batches: tuple[int, ...]  # rows of the measured core steps
    contexts: tuple[int, ...]  # tokens in each row's cache
    prefill_tokens: tuple[int, ...]
    served_width: int  # W of the engines
    requests: int
    prompt_tokens: int
    output_tokens: int
    depths: tuple[float, ...]  # replayed share of each depth from 1 on


# Shares as recorded at thresholds where many tokens exit (paper, Fig. 11, by eye): mean 2.7 of 4, and 8.5 of 16.
_OURO_DEPTHS = (0.0, 0.5, 0.3, 0.2)
_HUGINN_DEPTHS = (0.0, 0.0, 0.0, 0.05, 0.1, 0.15, 0.15, 0.15, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.02)


def shapes(tiny: bool) -> dict[str, Shape]:
    """The models by name."""
    if tiny:
        common = ("float32", 12, (1, 8), (32,), (8, 40), 4, 6, 10, 6)
        return {
            "ouro": Shape(OURO | TINY_OURO, *common, _OURO_DEPTHS),
            "huginn": Shape(HUGINN | TINY_HUGINN | {"mean_recurrence": 4}, *common, (0.0, 0.5, 0.25, 0.25)),
        }
    batches, contexts, prefills = (1, 8, 64, 256), (128, 512), (16, 64, 256, 1000, 4096)
    return {
        "ouro": Shape(OURO, "bfloat16", 256, batches, contexts, prefills, 64, 256, 128, 128, _OURO_DEPTHS),
        "huginn": Shape(HUGINN, "bfloat16", 256, batches, contexts, prefills, 64, 192, 128, 64, _HUGINN_DEPTHS),
    }


def write_config(shape: Shape, folder: Path) -> str:
    """A directory with the shape's config.json; its name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config | {"torch_dtype": shape.dtype}))
    return str(folder)


def workload_of(shape: Shape, seed: int = 0) -> Workload:
    """Requests around the shape's lengths, half to one and a half times, with replayed depths."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(shape.requests):
        prompt, output = (int(rng.integers(n // 2, n + n // 2 + 1)) for n in (shape.prompt_tokens, shape.output_tokens))
        depths = rng.choice(len(shape.depths), output - 1, p=shape.depths) + 1
        requests.append(WorkloadRequest(prompt, output, exit_depths=tuple(int(depth) for depth in depths)))
    return Workload(tuple(requests))


def power_of_two_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, ... and ``max_rows``: the paper's buckets, to compare with."""
    return (*(1 << e for e in range(max_rows.bit_length()) if 1 << e < max_rows), max_rows)


def bucket_for(buckets: tuple[int, ...], rows: int) -> int:
    """The smallest bucket that holds ``rows``."""
    return buckets[bisect_left(buckets, rows)]
