"""What looped families of Llama-like blocks share: a declared plan of sizes and tensor names, and a model of three stacks.

A family says which config fields mean what (``Plan``) and how loops may end (``Loops``); names, shapes, FLOPs, the
spec, the weights and trained exit heads follow. Its model overrides the stages that differ; gates it does not have raise.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.layers.blocks import AttentionContext, Block, BlockStack
from depthbatch.worker.layers.int8 import Weight
from depthbatch.worker.layers.linear import GatedLinear, Linear
from depthbatch.worker.layers.rotary import Rope, RotaryTable
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.exit_heads import ExitHeads, exit_heads, head_gates, head_tables
from depthbatch.worker.models.family import BuildInputs, Shapes, SpecOptions, TensorTable, checked_r_max
from depthbatch.worker.models.interface import LoopedModel, ModelSpec, WorkItem
from depthbatch.worker.models.tensor_parallel import Split

KNOWN_DEPTHS = (Gate.NONE, Gate.FIXED, Gate.REPLAY)  # gates that need nothing of the model


@dataclass(frozen=True)
class BlockNames:
    """A block's tensors by their names behind the layer's prefix; empty: it has none.

    Several names are parts of one matrix, in order: (q, k, v) or one, (gate, up) or one. Norms of q and k are over all heads
    together (OLMo), [H Dh] and [Hkv Dh], or with ``qk_norm_by_head`` one [Dh] for each head by itself (Qwen3).
    """

    qkv: tuple[str, ...]
    out: str
    gate_up: tuple[str, ...]
    down: str
    norm_in: str = ""
    norm_out: str = ""
    norm_mlp_in: str = ""
    norm_mlp_out: str = ""
    qk_bias: str = ""  # [2, 1, H, Dh]
    q_norm: str = ""
    k_norm: str = ""
    qk_norm_by_head: bool = False

    def linears(self) -> tuple[str, ...]:
        """Those of the linear layers."""
        return *self.qkv, self.out, *self.gate_up, self.down

    def norms_all_heads(self) -> bool:
        """Whether a norm is over all heads of q or of k, of which a rank has its share alone."""
        return bool(self.q_norm or self.k_norm) and not self.qk_norm_by_head


LLAMA_BLOCK = BlockNames(
    qkv=tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    out="self_attn.o_proj.weight",
    gate_up=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    down="mlp.down_proj.weight",
    norm_in="input_layernorm.weight",
    norm_mlp_in="post_attention_layernorm.weight",
)


@dataclass(frozen=True)
class Stage:
    """The layers of one stage: ``layers`` blocks behind ``prefix``, in which {} is the layer's number."""

    prefix: str = ""
    layers: int = 0
    first: int = 0  # number of the first

    def prefixes(self) -> list[str]:
        return [self.prefix.format(self.first + index) for index in range(self.layers)]


@dataclass(frozen=True)
class Plan:
    """Sizes, and where a checkpoint keeps what."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    eps: float
    rope: Rope
    max_positions: int
    tied: bool
    core: Stage
    block: BlockNames
    embedding: str
    final_norm: str
    prelude: Stage = Stage()
    coda: Stage = Stage()
    rows: int = 0  # of the embedding and the head, when more than the vocabulary
    norm_on_sum: bool = False
    norm_each_loop: bool = False  # the final norm ends every loop instead of the coda
    head: str = "lm_head.weight"
    core_extra: Shapes = field(default_factory=dict)  # other tensors that every loop uses: adapters, norms
    extra: Shapes = field(default_factory=dict)  # those used once a token
    lookups: Shapes = field(default_factory=dict)  # those that no token is multiplied by: gates, tables
    ignored_suffixes: tuple[str, ...] = ("inv_freq",)
    normed_block: BlockNames | None = None  # the blocks where the checkpoint has these q and k norms: no field says so

    def block_shapes(self, names: BlockNames) -> Shapes:
        """Shapes of the tensors that ``names`` has."""
        d, i, q, kv = self.hidden, self.inner, self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv = (q, kv, kv) if len(names.qkv) == 3 else (q + 2 * kv,)
        gate_up = (i, i) if len(names.gate_up) == 2 else (2 * i,)
        shapes: Shapes = {name: (rows, d) for name, rows in zip(names.qkv, qkv, strict=True)}
        shapes |= {name: (rows, d) for name, rows in zip(names.gate_up, gate_up, strict=True)}
        normed = (self.head_dim, self.head_dim) if names.qk_norm_by_head else (q, kv)
        shapes |= {names.out: (d, q), names.down: (d, i), names.q_norm: normed[:1], names.k_norm: normed[1:]}
        shapes |= dict.fromkeys((names.norm_in, names.norm_out, names.norm_mlp_in, names.norm_mlp_out), (d,))
        shapes |= {names.qk_bias: (2, 1, self.heads, self.head_dim)}
        return {name: shape for name, shape in shapes.items() if name}

    def block_splits(self, names: BlockNames) -> dict[str, Split]:
        """What ranks share of a block: the heads and the MLP. qkv and gate, up by their outputs, out and down by their
        inputs, so that the sum over ranks is the whole. Nothing where a norm is over all heads."""
        if names.norms_all_heads():
            return {}
        heads, kv, inner, unit = self.heads, self.kv_heads, self.inner, self.head_dim
        qkv = [(heads,), (kv,), (kv,)] if len(names.qkv) == 3 else [(heads, kv, kv)]
        gate_up = [(inner,), (inner,)] if len(names.gate_up) == 2 else [(inner, inner)]
        splits = {name: Split(0, counts, unit) for name, counts in zip(names.qkv, qkv, strict=True)}
        splits |= {name: Split(0, counts) for name, counts in zip(names.gate_up, gate_up, strict=True)}
        splits |= {names.out: Split(1, (heads,), unit), names.down: Split(1, (inner,))}
        return splits | ({names.qk_bias: Split(2, (heads,))} if names.qk_bias else {})

    def stage_shapes(self, stage: Stage, names: BlockNames) -> Shapes:
        """Shapes of all layers of a stage."""
        of_block = self.block_shapes(names)
        return {prefix + name: shape for prefix in stage.prefixes() for name, shape in of_block.items()}

    def tensors(self) -> TensorTable:
        """The whole checkpoint; a tied head may be stored as a second copy."""
        rows = max(self.rows, self.vocab)
        core = self.stage_shapes(self.core, self.block) | self.core_extra
        shapes: Shapes = {self.embedding: (rows, self.hidden), self.final_norm: (self.hidden,)}
        shapes |= self.lookups | self.extra
        for of_stage in (self.stage_shapes(self.prelude, self.block), core, self.stage_shapes(self.coda, self.block)):
            shapes |= of_stage
        head: Shapes = {self.head: (rows, self.hidden)}
        qk_norms = self.qk_norm_shapes()
        return TensorTable(
            required=shapes if self.tied else shapes | head,
            optional=(head if self.tied else {}) | qk_norms,
            ignored_suffixes=self.ignored_suffixes,
            core=frozenset(core),
            looked_up=frozenset(self.lookups) | (frozenset() if self.tied else {self.embedding}),
            linears=frozenset(prefix + name for prefix in self.prefixes() for name in self.block.linears()),
            splits={
                prefix + name: split
                for prefix in self.prefixes()
                for name, split in self.block_splits(self.block).items()
            },
            of_one_rank=frozenset(qk_norms if self.normed_block and self.normed_block.norms_all_heads() else ()),
        )

    def prefixes(self) -> list[str]:
        """Of all layers."""
        return [prefix for stage in (self.prelude, self.core, self.coda) for prefix in stage.prefixes()]

    def qk_norm_shapes(self) -> Shapes:
        """Shapes of the q and k norms that tell ``normed_block`` from ``block``."""
        if self.normed_block is None:
            return {}
        shapes = self.block_shapes(self.normed_block)
        names = self.normed_block.q_norm, self.normed_block.k_norm
        return {prefix + name: shapes[name] for prefix in self.prefixes() for name in names}

    def as_stored(self, config: ConfigReader, present: frozenset[str]) -> "Plan":
        """The plan with the block that the checkpoint has. Raises ModelError where some of the q and k norms are missing."""
        norms = self.qk_norm_shapes().keys()
        found = norms & present
        if not found or self.normed_block is None:
            return self
        if missing := sorted(norms - found):
            raise config.fail(f"tensor '{missing[0]}' is missing, while '{min(found)}' is there")
        return replace(self, block=self.normed_block)

    def stack(self, inputs: BuildInputs, stage: Stage, first_layer: int, ending: torch.Tensor | None) -> BlockStack:
        """A stage's blocks on cache layers first_layer and up."""
        blocks = tuple(_block(inputs, prefix, self.block) for prefix in stage.prefixes())
        return BlockStack(blocks, first_layer, self.norm_on_sum, self.eps, ending)


@dataclass(frozen=True)
class Loops:
    """How often the core may run, and what may end a token's loops."""

    default: int
    limit: int
    minimum: int
    layouts: tuple[KVLayout, ...]
    default_layout: KVLayout
    gates: tuple[Gate, ...] = KNOWN_DEPTHS
    default_gate: Gate = Gate.NONE
    threshold: float = 1.0
    work_item: tuple[str, ...] = ("h",)
    head_depths: int = 0  # that a trained pre-loop head tells apart; 0: the model takes no trained heads
    first_loop_usable: bool = False  # a pre-loop head beside a lookahead head may end a token's loops after the first


@dataclass(frozen=True)
class Weights:
    """All weights of three stacks."""

    embedding: torch.Tensor  # [V, D]
    prelude: BlockStack
    core: BlockStack
    coda: BlockStack
    head: Linear  # D -> V
    final_norm: torch.Tensor  # [D]


class GatelessModel:
    """The gates of a model that has none."""

    spec: ModelSpec

    def gate_logit(self, item: WorkItem) -> torch.Tensor:
        raise NotImplementedError(f"{self.spec.architecture} has no trained gate")

    def lookahead_logit(self, item: WorkItem) -> torch.Tensor:
        raise NotImplementedError(f"{self.spec.architecture} has no lookahead gate")

    def preloop_depth(self, item: WorkItem, threshold: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"{self.spec.architecture} has no pre-loop gate")

    def convergence(self, before: WorkItem, after: WorkItem) -> torch.Tensor:
        raise NotImplementedError(f"{self.spec.architecture} does not decide exits by convergence")


class Parts(NamedTuple):
    """What a StackedModel is made of."""

    spec: ModelSpec
    weights: Weights
    rotary: RotaryTable
    heads: ExitHeads


class StackedModel(GatelessModel):
    """LoopedModel with the work item (h,): embedding and prelude blocks, core blocks, coda blocks, head.

    With an ``adapter`` the core's blocks start from its product with the whole work item, of which they replace the first
    tensor. A stage that no subclass overrides may run as one call (worker/runner/fused_stages.py). Trained exit heads read the
    last tensor of the work item before the loop, and the first one in it.
    """

    adapter: Linear | None = None

    def __init__(self, parts: Parts) -> None:
        self.spec, self.weights, self.rotary, self.heads = parts

    def lookahead_logit(self, item: WorkItem) -> torch.Tensor:
        """Raw output of the trained lookahead head after a loop, fp32 [N]."""
        return super().lookahead_logit(item) if self.heads.lookahead is None else self.heads.lookahead(item[0])

    def preloop_depth(self, item: WorkItem, threshold: torch.Tensor) -> torch.Tensor:
        """Depth that the trained pre-loop head predicts, int32 [N]; with a threshold of 1 or more all loops, of which the
        head may tell fewer apart than are run."""
        if self.heads.preloop is None:
            return super().preloop_depth(item, threshold)
        depth = self.heads.preloop(item[-1], threshold)
        return torch.where(threshold >= 1.0, self.spec.r_max, depth)

    def prelude(
        self, token_ids: torch.Tensor, positions: torch.Tensor, state_seeds: torch.Tensor, attend: AttentionContext
    ) -> WorkItem:
        """h [N, D] from the embedding and the prelude blocks."""
        x = F.embedding(token_ids, self.weights.embedding)
        return (self.weights.prelude(x, self.rotary.at(positions), attend),)

    def core(self, item: WorkItem, positions: torch.Tensor, loops: torch.Tensor, attend: AttentionContext) -> WorkItem:
        """One loop of the core blocks."""
        x = item[0] if self.adapter is None else self.adapter(torch.cat(item, -1))
        return self.weights.core(x, self.rotary.at(positions), attend), *item[1:]

    def coda(self, item: WorkItem, positions: torch.Tensor, attend: AttentionContext) -> torch.Tensor:
        """The coda blocks, and the final norm where the plan puts it there."""
        return self.weights.coda(item[0], self.rotary.at(positions), attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] -> fp32 [N, V]."""
        return self.weights.head(hidden).float()


class LlamaLikeFamily(ABC):
    """A ModelFamily from a plan. Subclasses say ``claims``, ``plan`` and ``loops``."""

    name: str
    eos_of_tokenizer = False

    @abstractmethod
    def claims(self, config: ConfigReader) -> bool:
        """See ModelFamily."""

    @abstractmethod
    def plan(self, config: ConfigReader) -> Plan:
        """Sizes and names; refuses what would change the forward pass and is not built."""

    @abstractmethod
    def loops(self, config: ConfigReader) -> Loops:
        """Loop counts, layouts and gates."""

    def stop_ids(self, config: ConfigReader, vocab: int) -> set[int]:
        """Token ids that end a text."""
        return set(config.eos_token_ids(vocab))

    def model(self, config: ConfigReader, parts: Parts, inputs: BuildInputs) -> LoopedModel:
        """The model of its parts."""
        return StackedModel(parts)

    def spec(self, config: ConfigReader, options: SpecOptions) -> ModelSpec:
        plan, loops = self.plan(config), self.loops(config)
        r_max = checked_r_max(options.r_max, loops.default, loops.limit)
        trained = head_gates(options.side_files)
        first = loops.first_loop_usable and len(trained) == 2
        hazards = loops.default_gate is not Gate.CONVERGENCE
        return ModelSpec(
            architecture=self.name,
            vocab_size=plan.vocab,
            hidden_size=plan.hidden,
            num_heads=plan.heads,
            num_kv_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            prelude_layers=plan.prelude.layers,
            core_layers=plan.core.layers,
            coda_layers=plan.coda.layers,
            work_item=loops.work_item,
            r_max=r_max,
            r_limit=loops.limit,
            r_min=min(1 if first else loops.minimum, r_max),
            layouts=loops.layouts,
            default_layout=loops.default_layout,
            gates=loops.gates + trained,
            default_gate=Gate.LOOKAHEAD if hazards and Gate.LOOKAHEAD in trained else loops.default_gate,
            default_threshold=loops.threshold,
            max_positions=plan.max_positions,
            eos_token_ids=tuple(sorted(self.stop_ids(config, plan.vocab))),
            dtype=options.dtype,
        )

    def tensors(self, config: ConfigReader) -> TensorTable:
        return self.plan(config).tensors()

    def side_tensors(self, config: ConfigReader) -> dict[str, TensorTable]:
        depths = self.loops(config).head_depths
        return head_tables(self.plan(config).hidden, depths) if depths else {}

    def build(self, config: ConfigReader, spec: ModelSpec, inputs: BuildInputs) -> LoopedModel:
        plan = self.plan(config).as_stored(config, inputs.optional_present)
        rotary = RotaryTable(plan.max_positions, plan.head_dim, plan.rope, inputs.device)
        return self.model(config, Parts(spec, self.weights(config, plan, inputs), rotary, exit_heads(inputs)), inputs)

    def weights(self, config: ConfigReader, plan: Plan, inputs: BuildInputs) -> Weights:
        """The stacks, embedding and head of a plan. Raises ModelError when a tied head is another matrix."""
        embedding, norm = inputs.take(plan.embedding), inputs.take(plan.final_norm)
        head = embedding
        if not plan.tied or plan.head in inputs.optional_present:
            head = inputs.take(plan.head)
            if plan.tied and not torch.equal(head, embedding):
                raise config.fail(f"the head is tied, but {plan.head} differs from {plan.embedding}")
        first_core = plan.prelude.layers
        return Weights(
            embedding=embedding,
            prelude=plan.stack(inputs, plan.prelude, 0, None),
            core=plan.stack(inputs, plan.core, first_core, norm if plan.norm_each_loop else None),
            coda=plan.stack(inputs, plan.coda, first_core + plan.core.layers, None if plan.norm_each_loop else norm),
            head=Linear(head.narrow(0, 0, plan.vocab)),
            final_norm=norm,
        )


def _block(inputs: BuildInputs, prefix: str, names: BlockNames) -> Block:
    def take(name: str) -> torch.Tensor | None:
        return inputs.take(prefix + name) if name else None

    def matrix(*parts: str) -> Weight:
        return inputs.matrix(*(prefix + part for part in parts))

    sum_of_ranks = inputs.parallel.all_reduce if inputs.parallel.size > 1 else None
    bias = take(names.qk_bias)
    return Block(
        qkv=Linear(matrix(*names.qkv)),
        out=Linear(matrix(names.out), sum_of_ranks),
        gate_up=GatedLinear(matrix(*names.gate_up)),
        down=Linear(matrix(names.down), sum_of_ranks),
        norm_in=take(names.norm_in),
        norm_out=take(names.norm_out),
        norm_mlp_in=take(names.norm_mlp_in),
        norm_mlp_out=take(names.norm_mlp_out),
        qk_bias=None if bias is None else bias.flatten(),
        q_norm=take(names.q_norm),
        k_norm=take(names.k_norm),
    )


def head_sizes(config: ConfigReader, hidden: int, heads: str, kv_heads: str) -> tuple[int, int, int]:
    """Heads, KV heads, head_dim by the names of their fields; a missing head_dim is hidden / heads."""
    h, k = config.integer(heads), config.integer(kv_heads)
    if h % k:
        raise config.fail(f"{heads} {h} is not a multiple of {kv_heads} {k}")
    if not config.has("head_dim") and hidden % h:
        raise config.fail(f"hidden_size {hidden} is not a multiple of {heads} {h}")
    head_dim = config.integer("head_dim") if config.has("head_dim") else hidden // h
    if head_dim % 2:
        raise config.fail(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    return h, k, head_dim


LLAMA_FIELDS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "inner": "intermediate_size",
    "vocab": "vocab_size",
    "eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}
"""Where a config of Llama's names has the numbers of a Plan."""


def llama_plan(config: ConfigReader, kv_heads_field: str = "num_key_value_heads", **differs: Any) -> Plan:
    """The plan of a model whose fields and tensors are named as Llama's and whose layers are all the loop, with what
    ``differs``: fields of Plan. The config needs no field whose value is given there."""
    names = LLAMA_FIELDS | {"kv_heads": kv_heads_field if "kv_heads" not in differs else LLAMA_FIELDS["kv_heads"]}
    given = {names[name]: value for name, value in differs.items() if name in names}
    config = ConfigReader(config.values | given, config.path)
    hidden = config.integer("hidden_size")
    heads, kv_heads, head_dim = head_sizes(config, hidden, "num_attention_heads", names["kv_heads"])
    fields: dict[str, Any] = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "inner": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "eps": config.number("rms_norm_eps"),
        "max_positions": config.integer("max_position_embeddings"),
        "tied": config.tied_head(("tie_word_embeddings", "tie_embeddings")),
        "block": LLAMA_BLOCK,
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
    }
    if "rope" not in differs:
        fields["rope"] = config.rope("rope_theta", interleaved=False)
    if "core" not in differs:
        fields["core"] = Stage("model.layers.{}.", config.integer("num_hidden_layers"))
    return Plan(**fields | differs)
