"""Huginn (tomg-group-umd Huginn-0125 3.5B): 2-4-2, recurrent state with injection, exit by convergence.

Source: models.md, section 2 (published configuration and reference forward). Norms sit on the sum of stream and branch,
unlike Ouro. The loop is s <- core(adapter(cat[s, e])) with the injection e from the prelude; no norm between loops.
Models with Huginn's class name but other blocks are retrofitted.py's or refused, not misloaded.
Knows nothing of slots, blocks or requests.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.layers.blocks import AttentionContext
from depthbatch.worker.layers.linear import Linear
from depthbatch.worker.layers.ops import rms_norm
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import BuildInputs
from depthbatch.worker.models.interface import WorkItem
from depthbatch.worker.models.llama_like import (
    KNOWN_DEPTHS,
    BlockNames,
    LlamaLikeFamily,
    Loops,
    Parts,
    Plan,
    StackedModel,
    Stage,
)
from depthbatch.worker.sampling.random_numbers import STATE_LANE, row_key, uniform_of_key

R_MIN = 2  # the first distance that counts is that of s_2 and s_1; a delayed decision so exits at 3 or later
DEFAULT_R_MAX = 16  # accuracy is flat above (paper, E.2)
R_LIMIT = 64  # at least; recurrence may be run beyond the training mean
DEFAULT_THRESHOLD = (
    0.03  # the published reference's own value for the distance of states; the paper's speed runs use 0.28
)
STATE_STD = math.sqrt(0.4)  # of the normal that is cut: sqrt(2 / (5 D)) times the embedding scale sqrt(D)
STATE_CUT = 3.0  # standard deviations
PUBLISHED_VOCAB_SIZE = 65536
END_TURN = 65508  # ends a chat turn in the published tokenizer; the published config lists only 65505
ADAPTER = "transformer.adapter.weight"
BLOCK = BlockNames(
    qkv=("attn.Wqkv.weight",),
    out="attn.proj.weight",
    gate_up=("mlp.fc.weight",),
    down="mlp.proj.weight",
    norm_in="norm_1.weight",
    norm_out="norm_2.weight",
    norm_mlp_in="norm_3.weight",
    norm_mlp_out="norm_4.weight",
    qk_bias="attn.qk_bias",
)


def seeded_state(
    seeds: torch.Tensor, positions: torch.Tensor, width: int, dtype: torch.dtype, std: float = STATE_STD
) -> torch.Tensor:
    """Initial states [N, D]: a normal of ``std`` cut at STATE_CUT deviations, a function of (seed, position) only.

    seeds [N] int32, positions [N] int32. By inversion: the normal's quantile at a uniform of the cut's probability.
    """
    key = row_key(seeds, torch.zeros_like(seeds), positions)
    lanes = torch.arange(width, device=seeds.device) + STATE_LANE
    symmetric = 2.0 * uniform_of_key(key.unsqueeze(-1), lanes) - 1.0  # [N, D] in (-1, 1)
    inside = math.erf(STATE_CUT / math.sqrt(2.0))  # probability within the cut
    return (torch.erfinv(symmetric * inside) * (math.sqrt(2.0) * std)).to(dtype)


@dataclass(frozen=True)
class Recurrence:
    """What is between the stacks."""

    adapter: Linear  # 2D -> D, state first
    embed_scale: float
    state_std: float
    seeded: bool  # the initial state is drawn instead of zero


class Huginn(StackedModel):
    """LoopedModel with the work item (state, injection). A loop is the adapter on both, then the core blocks."""

    def __init__(self, parts: Parts, recurrence: Recurrence) -> None:
        super().__init__(parts)
        self.recurrence, self.adapter = recurrence, recurrence.adapter

    def prelude(
        self, token_ids: torch.Tensor, positions: torch.Tensor, state_seeds: torch.Tensor, attend: AttentionContext
    ) -> WorkItem:
        """Injection e from the scaled embedding and the prelude blocks; initial state zero or seeded."""
        x = F.embedding(token_ids, self.weights.embedding) * self.recurrence.embed_scale
        e = self.weights.prelude(x, self.rotary.at(positions), attend)
        if self.recurrence.seeded:
            std = self.recurrence.state_std
            return seeded_state(state_seeds, positions, self.spec.hidden_size, e.dtype, std), e
        return torch.zeros_like(e), e

    def coda(self, item: WorkItem, positions: torch.Tensor, attend: AttentionContext) -> torch.Tensor:
        """Final norm, coda blocks, the same final norm again."""
        x = rms_norm(item[0], self.weights.final_norm, self.weights.coda.eps)
        return self.weights.coda(x, self.rotary.at(positions), attend)

    def convergence(self, before: WorkItem, after: WorkItem) -> torch.Tensor:
        """|s_r - s_{r-1}| / |s_r| of the raw states in fp32, the denominator clamped away from 0; fp32 [N]."""
        new = after[0].float()
        step = new - before[0].float()
        return step.square().sum(-1).sqrt() / new.square().sum(-1).sqrt().clamp(min=1e-12)


class HuginnFamily(LlamaLikeFamily):
    """Recognises, sizes and builds Huginn models."""

    name = "huginn"

    def claims(self, config: ConfigReader) -> bool:
        return is_raven(config) and not is_retrofitted(config)

    def plan(self, config: ConfigReader) -> Plan:
        _refuse_variants(config)
        hidden, heads, vocab = (config.integer(n) for n in ("n_embd", "n_heads", "vocab_size"))
        if hidden % heads or hidden // heads % 2:
            raise config.fail(f"n_embd {hidden} must be an even multiple of n_heads {heads}")
        multiple = config.integer("padding_multiple") if config.has("padding_multiple") else 1
        return raven_plan(
            config,
            sizes=(heads, heads, hidden // heads),
            block=BLOCK,
            rows=-(-vocab // multiple) * multiple,
            rope=config.rope("rope_base", interleaved=True),
            max_positions=config.integer("block_size"),
            norm_on_sum=True,
        )

    def loops(self, config: ConfigReader) -> Loops:
        return raven_loops(config)

    def stop_ids(self, config: ConfigReader, vocab: int) -> set[int]:
        return super().stop_ids(config, vocab) | ({END_TURN} if vocab == PUBLISHED_VOCAB_SIZE else set())

    def model(self, config: ConfigReader, parts: Parts, inputs: BuildInputs) -> Huginn:
        adapter, seeded = Linear(inputs.take(ADAPTER)), inputs.state_init == "seeded"
        return Huginn(parts, Recurrence(adapter, math.sqrt(parts.spec.hidden_size), STATE_STD, seeded))


def is_raven(config: ConfigReader) -> bool:
    """Whether the config has the class name that Huginn and models retrofitted after it share."""
    return config.is_named("huginn_raven", "RavenForCausalLM")


def is_retrofitted(config: ConfigReader) -> bool:
    """Whether a Raven is made of a Llama-like model; those alone read these two fields."""
    return config.has("rope_theta") and config.has("num_key_value_heads")


def raven_plan(config: ConfigReader, sizes: tuple[int, int, int], **differs: Any) -> Plan:
    """The plan of a Raven of heads, KV heads and head_dim ``sizes``, with what ``differs`` between its kinds."""
    hidden = config.integer("n_embd")
    heads, kv_heads, head_dim = sizes
    return Plan(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        eps=config.number("norm_eps"),
        tied=config.tied_head(("tie_embeddings", "tie_word_embeddings")),
        prelude=Stage("transformer.prelude.{}.", config.integer("n_layers_in_prelude", minimum=0)),
        core=Stage("transformer.core_block.{}.", config.integer("n_layers_in_recurrent_block")),
        coda=Stage("transformer.coda.{}.", config.integer("n_layers_in_coda", minimum=0)),
        embedding="transformer.wte.weight",
        final_norm="transformer.ln_f.weight",
        core_extra={ADAPTER: (hidden, 2 * hidden)},
        ignored_suffixes=("freqs_cis",),
        **differs,
    )


def raven_loops(config: ConfigReader) -> Loops:
    """Any number of loops; exits by the distance of states."""
    mean = config.integer("mean_recurrence")
    default = min(DEFAULT_R_MAX, mean)
    own = config.has("early_exit_threshold")
    return Loops(
        default=default,
        limit=max(R_LIMIT, 2 * mean),
        minimum=R_MIN,
        layouts=tuple(KVLayout),
        default_layout=KVLayout.SINGLE,
        gates=(*KNOWN_DEPTHS, Gate.OWN, Gate.DELAYED, Gate.CONVERGENCE),
        default_gate=Gate.CONVERGENCE,
        threshold=config.number("early_exit_threshold") if own else DEFAULT_THRESHOLD,
        work_item=("state", "injection"),
        head_depths=default,
        first_loop_usable=True,
    )


def refuse_raven_variants(config: ConfigReader) -> None:
    """Fields of the class that would change the forward pass, whatever its blocks are."""
    config.expect("block_class_name", ("SandwichBlock",))
    config.expect("norm_class_name", ("RMSNorm_llama", "RMSNorm"))
    config.expect("mlp_class_name", ("GatedMLP",))
    config.expect("nonlin_name", ("SiLU",))
    config.expect("injection_type", ("linear",))
    config.expect("bias", (False,))
    config.expect("qk_norm", (False,), optional=True)
    config.refuse("test_time_noise")


def _refuse_variants(config: ConfigReader) -> None:
    """Fields that tell Huginn from models that share its class name; each would change the forward pass."""
    refuse_raven_variants(config)
    config.expect("qk_bias", (True,))
    if config.has("num_key_value_heads") and config.integer("num_key_value_heads") != config.integer("n_heads"):
        raise config.fail("grouped-query attention ('num_key_value_heads') is not supported for this architecture")


FAMILY = HuginnFamily()
