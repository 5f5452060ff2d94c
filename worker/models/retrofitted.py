"""Retrofitted recurrence (Recurrent-Llama-3.2, -TinyLlama, -OLMo-2): a loop cut into a pretrained Llama-like model.

Source: the published code (models.md, section 5). The class name and most fields are Huginn's. Blocks are Llama's (norm
before each branch) or, where the checkpoint has q and k norms, OLMo's (norm on each branch's result). One final norm,
after the coda.
"""

from dataclasses import replace

import torch

from depthbatch.worker.layers.blocks import AttentionContext
from depthbatch.worker.layers.linear import Linear
from depthbatch.worker.layers.rotary import RotaryTable
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import BuildInputs, SpecOptions, TensorTable
from depthbatch.worker.models.huginn import (
    ADAPTER,
    Huginn,
    Recurrence,
    is_raven,
    is_retrofitted,
    raven_loops,
    raven_stages,
    refuse_raven_variants,
)
from depthbatch.worker.models.huginn import BLOCK as SANDWICH_BLOCK
from depthbatch.worker.models.interface import ModelSpec, WorkItem
from depthbatch.worker.models.llama_like import (
    LlamaLikeFamily,
    Loops,
    Plan,
    StackedModel,
    Weights,
    head_sizes,
    rotary_of,
)

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

    def __init__(
        self, spec: ModelSpec, weights: Weights, rotary: RotaryTable, recurrence: Recurrence, start: str
    ) -> None:
        super().__init__(spec, weights, rotary, recurrence)
        self._start = start

    def prelude(
        self, token_ids: torch.Tensor, positions: torch.Tensor, state_seeds: torch.Tensor, attend: AttentionContext
    ) -> WorkItem:
        """As Huginn's; or the state starts as the injection."""
        state, injection = super().prelude(token_ids, positions, state_seeds, attend)
        return (state if self._start == "random" else injection), injection

    def core(self, item: WorkItem, positions: torch.Tensor, loops: torch.Tensor, attend: AttentionContext) -> WorkItem:
        """As Huginn's; or the first loop takes the injection as it is."""
        x = self.recurrence.adapter(torch.cat(item, -1))
        if self._start == "skip-adapter":
            x = torch.where((loops == 1).unsqueeze(-1), item[1], x)
        return self.weights.core(x, self._rotary.at(positions), attend), item[1]

    def coda(self, item: WorkItem, positions: torch.Tensor, attend: AttentionContext) -> torch.Tensor:
        """Coda blocks and the final norm, which is not applied before them."""
        return StackedModel.coda(self, item, positions, attend)


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
        hidden, vocab = config.integer("n_embd"), config.integer("vocab_size")
        if config.has("padded_vocab_size"):
            config.expect("padded_vocab_size", (vocab,))
        heads, kv_heads, head_dim = head_sizes(config, hidden, "n_heads", "num_key_value_heads")
        prelude, core, coda = raven_stages(config)
        return Plan(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            inner=config.integer("intermediate_size"),
            vocab=vocab,
            eps=config.number("norm_eps"),
            rope=config.rope("rope_theta", interleaved=False, scaled=True),
            max_positions=config.integer("max_position_embeddings"),
            tied=config.tied_head(("tie_embeddings", "tie_word_embeddings")),
            prelude=prelude,
            core=core,
            coda=coda,
            block=LLAMA_BLOCK,
            embedding="transformer.wte.weight",
            final_norm="transformer.ln_f.weight",
            core_extra={ADAPTER: (hidden, 2 * hidden)},
            ignored_suffixes=("freqs_cis",),
        )

    def loops(self, config: ConfigReader, options: SpecOptions) -> Loops:
        return raven_loops(config)

    def tensors(self, config: ConfigReader) -> TensorTable:
        """The q and k norms are optional: no field of the config tells OLMo's blocks from Llama's. They are over all
        heads, of which a rank has its share alone."""
        plan = self.plan(config)
        table, norms = plan.tensors(), _qk_norms(plan)
        return replace(table, optional=table.optional | norms, of_one_rank=frozenset(norms))

    def build(self, config: ConfigReader, spec: ModelSpec, inputs: BuildInputs) -> Retrofitted:
        plan = self.plan(config)
        norms = _qk_norms(plan).keys()
        if present := norms & inputs.optional_present:
            if missing := sorted(norms - present):
                raise config.fail(f"tensor '{missing[0]}' is missing, while '{min(present)}' is there")
            plan = replace(plan, block=OLMO_BLOCK)
        init = ConfigReader(config.values.get("init_values") or {}, f"{config.path}: init_values")
        recurrence = Recurrence(
            adapter=Linear(inputs.take(ADAPTER)),
            embed_scale=init.number("embed_scale"),
            state_std=init.number("std") * init.number("embed_scale"),
            seeded=inputs.state_init == "seeded",
        )
        start = config.text("initial_state_mode") if config.has("initial_state_mode") else "random"
        weights = self.weights(config, plan, inputs)
        return Retrofitted(spec, weights, rotary_of(plan, inputs), recurrence, start)


def _qk_norms(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the q and k norms of every layer."""
    names = OLMO_BLOCK.q_norm, OLMO_BLOCK.k_norm
    shapes = {n: plan.block_shapes(OLMO_BLOCK)[n] for n in names}
    prefixes = [p for stage in (plan.prelude, plan.core, plan.coda) for p in stage.prefixes()]
    return {prefix + name: shape for prefix in prefixes for name, shape in shapes.items()}


FAMILY = RetrofittedFamily()
