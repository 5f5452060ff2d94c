"""What the memory of a device goes to, counted before any of it is taken: weights, what runs beside the KV cache, and
the KV cache, which gets a share of the rest. An option that asks for more than there is ends the start with one line.
"""

from typing import NamedTuple

import torch

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import lanes_of_a_slot, logprob_fields, prefill_words
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.common.kv_layout import KVLayout, swap_blocks
from depthbatch.worker.attention.select import default_block_size
from depthbatch.worker.device import GIB, KVPlan, KVRequest, plan_kv
from depthbatch.worker.models.interface import ModelSpec
from depthbatch.worker.runner.stage_input import bucket_sizes, most_rows
from depthbatch.worker.runner.stage_tensors import DecodeBuffers
from depthbatch.worker.sampling.logprobs import num_likeliest
from depthbatch.worker.slots import SlotState

LOGIT_BYTES = 24  # of a row and vocabulary entry at a coda's peak: fp32 logits, shaped, sorted with int64 places
ACTIVATION_WIDTH = 16  # of a prompt token at a prefill's peak, in hidden sizes: the residual, q, k, v and a wide MLP
FRAMES_IN_FLIGHT = 8  # of a prefill, as staging holds them


class BesideKV(NamedTuple):
    """Bytes, by what needs them."""

    slots: int  # states, parameters, block tables, counts and masks of every slot
    logits: int
    decode_frames: int  # the static buffers of decode stages
    prefill: int  # frames and activations of the largest batch

    @property
    def total(self) -> int:
        return sum(self)

    def describe(self) -> str:
        """The parts, in GiB."""
        return ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in self._asdict().items())


def beside_kv(config: EngineConfig, spec: ModelSpec, device: torch.device) -> BesideKV:
    """What a worker of these options has beside weights and KV cache at its peak; ``spec``: of one rank."""
    width, length = config.max_num_seqs, config.max_model_len or spec.max_positions
    drafts = config.draft_lanes or 0
    rows = most_rows(width, 1 + drafts)
    prompt_tokens = min(config.max_num_batched_tokens, width * length)
    columns = logprob_fields(num_likeliest(spec.vocab_size))
    captured = device.type == "cuda"  # a buffer for each size, else one for all
    decode_rows = sum(bucket_sizes(rows)) if captured else rows
    staged = config.max_num_batched_tokens if captured else prompt_tokens
    return BesideKV(
        slots=SlotState.bytes_needed(
            width, -(-length // _block_size(config, spec, device)), spec, lanes_of_a_slot(drafts)
        ),
        logits=rows * spec.vocab_size * LOGIT_BYTES,
        decode_frames=decode_rows * (2 * DecodeBuffers.bytes_a_row(0) + DecodeBuffers.bytes_a_row(columns)),
        prefill=prompt_tokens * ACTIVATION_WIDTH * spec.hidden_size * spec.dtype.itemsize
        + FRAMES_IN_FLIGHT * 4 * prefill_words(width, staged, width),
    )


def plan_memory(
    config: EngineConfig, spec: ModelSpec, layout: KVLayout, device: torch.device, free_bytes: int
) -> KVPlan:
    """The KV memory where ``free_bytes`` are left by the weights. Raises ConfigError with the numbers."""
    request = kv_request(config, spec, layout, device)
    beside = beside_kv(config, spec, device)
    if beside.total >= free_bytes:
        raise ConfigError(
            f"max_num_seqs {config.max_num_seqs} and max_num_batched_tokens {config.max_num_batched_tokens} need "
            f"{beside.total / GIB:.2f} GiB beside the KV cache ({beside.describe()}), but only {free_bytes / GIB:.2f} GiB "
            "are free"
        )
    host_bytes = config.swap_bytes // config.tensor_parallel_size
    room = free_bytes - beside.total - (host_bytes if device.type == "cpu" else 0)
    if room <= 0:
        raise ConfigError(
            f"swap_space {config.swap_bytes / GIB:g} GiB: only {(free_bytes - beside.total) / GIB:.2f} GiB are free beside "
            "what the worker needs"
        )
    plan = plan_kv(request, room, device.type)
    block_bytes = plan.block_size * plan.bytes_per_token
    return plan._replace(host_blocks=swap_blocks(host_bytes, block_bytes, config.max_num_seqs * plan.max_blocks))


def check_weights(name: str, weight_bytes: int, free_bytes: int) -> None:
    """Raises ConfigError when the weights of the model ``name`` do not fit."""
    if weight_bytes > free_bytes:
        raise ConfigError(
            f"model '{name}': its weights take {weight_bytes / GIB:.2f} GiB, but only {free_bytes / GIB:.2f} GiB are free"
        )


def kv_request(config: EngineConfig, spec: ModelSpec, layout: KVLayout, device: torch.device) -> KVRequest:
    """What the options ask for."""
    return KVRequest(
        bytes_per_token=spec.kv_bytes_per_token(layout, KVCacheDtype(config.kv_cache_dtype)),
        block_size=_block_size(config, spec, device),
        max_positions=spec.max_positions,
        max_num_seqs=config.max_num_seqs,
        kv_blocks=config.kv_blocks,
        max_model_len=config.max_model_len,
    )


def _block_size(config: EngineConfig, spec: ModelSpec, device: torch.device) -> int:
    return config.block_size or default_block_size(device, spec.dtype, KVCacheDtype(config.kv_cache_dtype))
