"""Ouro (ByteDance Ouro-1.4B, -2.6B, -Thinking): no layers outside the loop, sandwich norms, a trained exit gate.

Source: models.md, section 1 (published configuration and reference forward). A loop is all layers and the final norm,
so the same h is the next loop's input, the gate's input and the head's input. Loops do not see their index: the core
is one function of (h, position, K/V). Knows nothing of slots, blocks or requests.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.layers.blocks import AttentionContext, Block, BlockStack
from depthbatch.worker.layers.linear import GatedLinear, Linear
from depthbatch.worker.layers.rotary import RotaryTable
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import (
    LOOKAHEAD_GATE,
    PRELOOP_GATE,
    BuildInputs,
    SpecOptions,
    TensorTable,
    checked_r_max,
)
from depthbatch.worker.models.interface import ModelSpec, WorkItem

R_MIN = 2  # loop 1 is not trained to give usable outputs (paper, E.2)
PUBLISHED_VOCAB_SIZE = 49152
IM_END = 2  # ends a chat turn in the published tokenizer; the published config lists only 0


@dataclass(frozen=True)
class ScalarHead:
    """Weight and bias of a head with one fp32 output a row."""

    weight: torch.Tensor  # fp32 [D]
    bias: torch.Tensor  # fp32 [1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, D] -> fp32 [N]; a row's sum does not depend on its neighbours."""
        return (x.float() * self.weight).sum(-1) + self.bias


@dataclass(frozen=True)
class DepthHead:
    """Weight and bias of a head with one logit a depth."""

    weight: torch.Tensor  # fp32 [R, D]
    bias: torch.Tensor  # fp32 [R]

    def __call__(self, x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        """x [N, D], threshold fp32 [N] -> int32 [N]: the first depth whose cumulated softmax reaches the threshold."""
        cumulated = F.linear(x.float(), self.weight, self.bias).softmax(-1).cumsum(-1)
        limit = threshold.unsqueeze(-1)
        passed = (cumulated < limit) | (limit >= 1.0)  # [N, R]; the last depth needs no vote
        return passed.narrow(-1, 0, self.bias.shape[0] - 1).sum(-1, dtype=torch.int32) + 1


@dataclass(frozen=True)
class OuroWeights:
    """All weights. ``lookahead`` and ``preloop`` are None when the model has no such trained gate."""

    embedding: torch.Tensor  # [V, D]
    loop: BlockStack  # all layers and the final norm
    head: Linear  # D -> V
    gate: ScalarHead
    lookahead: ScalarHead | None
    preloop: DepthHead | None


class Ouro:
    """LoopedModel with the work item (h,)."""

    def __init__(self, spec: ModelSpec, weights: OuroWeights, rotary: RotaryTable) -> None:
        self.spec = spec
        self.weights = weights
        self._rotary = rotary

    def prelude(
        self, token_ids: torch.Tensor, positions: torch.Tensor, state_seeds: torch.Tensor, attend: AttentionContext
    ) -> WorkItem:
        """h = embedding[token_ids], unscaled, [N, D]."""
        return (F.embedding(token_ids, self.weights.embedding),)

    def core(self, item: WorkItem, positions: torch.Tensor, loops: torch.Tensor, attend: AttentionContext) -> WorkItem:
        """One loop: every layer, then the final norm."""
        return (self.weights.loop(item[0], self._rotary.at(positions), attend),)

    def coda(self, item: WorkItem, positions: torch.Tensor, attend: AttentionContext) -> torch.Tensor:
        """h as it is: each loop already ends with the final norm."""
        return item[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] -> fp32 [N, V]."""
        return self.weights.head(hidden).float()

    def gate_logit(self, item: WorkItem) -> torch.Tensor:
        """Raw output of the exit gate after a loop, fp32 [N]."""
        return self.weights.gate(item[0])

    def lookahead_logit(self, item: WorkItem) -> torch.Tensor:
        """Raw output of the lookahead gate after loop r: the hazard of loop r + 1, fp32 [N]."""
        if self.weights.lookahead is None:
            raise NotImplementedError("this model has no lookahead gate")
        return self.weights.lookahead(item[0])

    def preloop_depth(self, item: WorkItem, threshold: torch.Tensor) -> torch.Tensor:
        """Depth predicted from the embedding alone, int32 [N]."""
        if self.weights.preloop is None:
            raise NotImplementedError("this model has no pre-loop gate")
        return self.weights.preloop(item[0], threshold)

    def convergence(self, before: WorkItem, after: WorkItem) -> torch.Tensor:
        raise NotImplementedError("ouro decides exits by its trained gate, not by convergence")


class OuroFamily:
    """Recognises, sizes and builds Ouro models."""

    name = "ouro"

    def claims(self, config: ConfigReader) -> bool:
        return config.values.get("model_type") == "ouro" or "OuroForCausalLM" in config.architectures()

    def spec(self, config: ConfigReader, options: SpecOptions) -> ModelSpec:
        _refuse_variants(config)
        heads, kv_heads, head_dim = _attention_shape(config)
        vocab_size = config.integer("vocab_size")
        loops = config.integer("total_ut_steps")
        r_max = checked_r_max(options.r_max, loops, loops)
        eos = set(config.eos_token_ids(vocab_size)) | ({IM_END} if vocab_size == PUBLISHED_VOCAB_SIZE else set())
        has_lookahead = LOOKAHEAD_GATE in options.side_files
        gates = [Gate.NONE, Gate.FIXED, Gate.REPLAY, Gate.OWN, Gate.DELAYED]
        gates += [Gate.LOOKAHEAD] if has_lookahead else []
        gates += [Gate.PRELOOP] if PRELOOP_GATE in options.side_files else []
        return ModelSpec(
            architecture=self.name,
            vocab_size=vocab_size,
            hidden_size=config.integer("hidden_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            prelude_layers=0,
            core_layers=config.integer("num_hidden_layers"),
            coda_layers=0,
            work_item=("h",),
            r_max=r_max,
            r_limit=loops,
            r_min=min(R_MIN, r_max),
            layouts=tuple(KVLayout),
            default_layout=KVLayout.LAST_EXITED,
            gates=tuple(gates),
            default_gate=Gate.LOOKAHEAD if has_lookahead else Gate.DELAYED,
            default_threshold=config.number("early_exit_threshold"),
            max_positions=config.integer("max_position_embeddings"),
            eos_token_ids=tuple(sorted(eos)),
            dtype=options.dtype,
        )

    def tensors(self, config: ConfigReader) -> TensorTable:
        heads, kv_heads, head_dim = _attention_shape(config)
        d, i, v = (config.integer(n) for n in ("hidden_size", "intermediate_size", "vocab_size"))
        layer_shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (heads * head_dim, d),
            "self_attn.k_proj": (kv_heads * head_dim, d),
            "self_attn.v_proj": (kv_heads * head_dim, d),
            "self_attn.o_proj": (d, heads * head_dim),
            "mlp.gate_proj": (i, d),
            "mlp.up_proj": (i, d),
            "mlp.down_proj": (d, i),
            "input_layernorm": (d,),
            "input_layernorm_2": (d,),
            "post_attention_layernorm": (d,),
            "post_attention_layernorm_2": (d,),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (v, d),
            "model.norm.weight": (d,),
            "model.early_exit_gate.weight": (1, d),
            "model.early_exit_gate.bias": (1,),
        }
        for index in range(config.integer("num_hidden_layers")):
            shapes |= {f"model.layers.{index}.{key}.weight": shape for key, shape in layer_shapes.items()}
        head: dict[str, tuple[int, ...]] = {"lm_head.weight": (v, d)}
        tied = _tied(config)
        return TensorTable(shapes if tied else shapes | head, head if tied else {}, ("inv_freq",))

    def side_tensors(self, config: ConfigReader) -> dict[str, TensorTable]:
        width, loops = config.integer("hidden_size"), config.integer("total_ut_steps")
        return {
            LOOKAHEAD_GATE: TensorTable({"weight": (1, width), "bias": (1,)}),
            PRELOOP_GATE: TensorTable({"weight": (loops, width), "bias": (loops,)}),
        }

    def build(self, config: ConfigReader, spec: ModelSpec, inputs: BuildInputs) -> Ouro:
        take = inputs.take
        embedding = take("model.embed_tokens.weight")
        lookahead, preloop = inputs.side.get(LOOKAHEAD_GATE), inputs.side.get(PRELOOP_GATE)
        weights = OuroWeights(
            embedding=embedding,
            loop=BlockStack(
                blocks=tuple(_block(inputs, f"model.layers.{i}.") for i in range(spec.core_layers)),
                first_layer=0,
                norm_on_sum=False,
                eps=config.number("rms_norm_eps"),
                final_norm=take("model.norm.weight"),
            ),
            head=Linear(embedding if _tied(config) else take("lm_head.weight")),
            gate=ScalarHead(
                take("model.early_exit_gate.weight", torch.float32).flatten(),
                take("model.early_exit_gate.bias", torch.float32),
            ),
            lookahead=None if lookahead is None else ScalarHead(lookahead["weight"].flatten(), lookahead["bias"]),
            preloop=None if preloop is None else DepthHead(preloop["weight"], preloop["bias"]),
        )
        rotary = RotaryTable(spec.max_positions, spec.head_dim, config.rope_base("rope_theta"), False, inputs.device)
        return Ouro(spec, weights, rotary)


def _block(inputs: BuildInputs, prefix: str) -> Block:
    def take(name: str) -> torch.Tensor:
        return inputs.take(f"{prefix}{name}.weight")

    return Block(
        norm_in=take("input_layernorm"),
        qkv=Linear(torch.cat([take(f"self_attn.{name}_proj") for name in "qkv"])),
        qk_bias=None,
        out=Linear(take("self_attn.o_proj")),
        norm_out=take("input_layernorm_2"),
        norm_mlp_in=take("post_attention_layernorm"),
        gate_up=GatedLinear(torch.cat((take("mlp.gate_proj"), take("mlp.up_proj")))),
        down=Linear(take("mlp.down_proj")),
        norm_mlp_out=take("post_attention_layernorm_2"),
    )


def _tied(config: ConfigReader) -> bool:
    return config.tied_head(("tie_word_embeddings", "tie_embeddings"))


def _attention_shape(config: ConfigReader) -> tuple[int, int, int]:
    """Heads, KV heads, head_dim; a missing head_dim is hidden_size / heads, as the shapes of the weights would say."""
    heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    hidden = config.integer("hidden_size")
    if heads % kv_heads:
        raise config.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if not config.has("head_dim") and hidden % heads:
        raise config.fail(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = config.integer("head_dim") if config.has("head_dim") else hidden // heads
    if head_dim % 2:
        raise config.fail(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    return heads, kv_heads, head_dim


def _refuse_variants(config: ConfigReader) -> None:
    """Fields that would change the forward pass."""
    config.expect("hidden_act", ("silu",))
    config.expect("attention_bias", (False,), optional=True)
    config.expect("mlp_bias", (False,), optional=True)
    config.expect("use_sliding_window", (False,), optional=True)
    kinds = set(config.values.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise config.fail(f"'layer_types' holds {sorted(kinds)}, which is not supported (only 'full_attention')")


FAMILY = OuroFamily()
