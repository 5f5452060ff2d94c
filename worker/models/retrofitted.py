"""Retrofitted recurrence (Recurrent-Llama-3.2, -TinyLlama, -OLMo-2): a loop cut into a pretrained Llama-like model.

Source: the published code (models.md, section 5). The class name and most fields are Huginn's. Blocks are Llama's (norm
before each branch) or, where the checkpoint has q and k norms, OLMo's (norm on each branch's result). One final norm,
after the coda.
"""

from dataclasses import replace

import torch

from depthbatch.worker.layers.blocks import AttentionContext
from depthbatch.worker.layers.linear import Linear
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import BuildInputs
from depthbatch.worker.models.huginn import (
    ADAPTER,
    Huginn,
    Recurrence,
    is_raven,
    is_retrofitted,
    raven_loops,
    raven_plan,
    refuse_raven_variants,
)
from depthbatch.worker.models.huginn import BLOCK as SANDWICH_BLOCK
from depthbatch.worker.models.interface import WorkItem
from depthbatch.worker.models.llama_like import LlamaLikeFamily, Loops, Parts, Plan, StackedModel, head_sizes

LLAMA_BLOCK = replace(
    SANDWICH_BLOCK, norm_out="", norm_mlp_in="norm_2.weight", norm_mlp_out="", qk_bias=""
)  # norms on the branches' inputs
OLMO_BLOCK = replace(
    LLAMA_BLOCK,
    norm_in="",
    norm_mlp_in="",
    norm_out="norm_1.weight",
    norm_mlp_out="norm_2.weight",
    q_norm="attn.q_norm.weight",
    k_norm="attn.k_norm.weight",
)
START_MODES = ("random", "embed-init", "skip-adapter")


class Retrofitted(Huginn):
    """LoopedModel with the work item (state, injection). ``start``: one of START_MODES."""

    def __init__(self, parts: Parts, recurrence: Recurrence, start: str) -> None:
        super().__init__(parts, recurrence)
        self._start = start

    def prelude(
        self, token_ids: torch.Tensor, positions: torch.Tensor, state_seeds: torch.Tensor, attend: AttentionContext
    ) -> WorkItem:
        """As Huginn's; or the state starts as the injection."""
        state, injection = super().prelude(token_ids, positions, state_seeds, attend)
        return (state if self._start == "random" else injection), injection

    def coda(self, item: WorkItem, positions: torch.Tensor, attend: AttentionContext) -> torch.Tensor:
        """Coda blocks and the final norm, which is not applied before them."""
        return StackedModel.coda(self, item, positions, attend)


class SkipsAdapter(Retrofitted):
    """The same for the start mode of that name."""

    def core(self, item: WorkItem, positions: torch.Tensor, loops: torch.Tensor, attend: AttentionContext) -> WorkItem:
        """As Huginn's, but the first loop takes the injection as it is."""
        x = self.recurrence.adapter(torch.cat(item, -1))
        x = torch.where((loops == 1).unsqueeze(-1), item[1], x)
        return self.weights.core(x, self.rotary.at(positions), attend), item[1]


class RetrofittedFamily(LlamaLikeFamily):
    """Recognises, sizes and builds retrofitted models."""

    name = "retrofitted"
    eos_of_tokenizer = True  # the configs' special ids are Huginn's

    def claims(self, config: ConfigReader) -> bool:
        return is_raven(config) and is_retrofitted(config)

    def plan(self, config: ConfigReader) -> Plan:
        refuse_raven_variants(config)
        config.expect("qk_bias", (False,))
        config.expect("initial_state_mode", START_MODES, optional=True)
        if config.has("padded_vocab_size"):
            config.expect("padded_vocab_size", (config.integer("vocab_size"),))
        return raven_plan(
            config,
            sizes=head_sizes(config, config.integer("n_embd"), "n_heads", "num_key_value_heads"),
            block=LLAMA_BLOCK,
            normed_block=OLMO_BLOCK,
            rope=config.rope("rope_theta", interleaved=False, scaled=True),
            max_positions=config.integer("max_position_embeddings"),
        )

    def loops(self, config: ConfigReader) -> Loops:
        return raven_loops(config)

    def model(self, config: ConfigReader, parts: Parts, inputs: BuildInputs) -> Retrofitted:
        init = ConfigReader(config.values.get("init_values") or {}, f"{config.path}: init_values")
        scale = init.number("embed_scale")
        adapter, seeded = Linear(inputs.take(ADAPTER)), inputs.state_init == "seeded"
        start = config.text("initial_state_mode") if config.has("initial_state_mode") else "random"
        kind = SkipsAdapter if start == "skip-adapter" else Retrofitted
        return kind(parts, Recurrence(adapter, scale, init.number("std") * scale, seeded), start)


FAMILY = RetrofittedFamily()
