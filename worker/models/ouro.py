"""Ouro (ByteDance Ouro-1.4B, -2.6B, -Thinking): no layers outside the loop, sandwich norms, a trained exit gate.

Source: models.md, section 1 (published configuration and reference forward). A loop is all layers and the final norm,
so the same h is the next loop's input, the gate's input and the head's input. Loops do not see their index: the core
is one function of (h, position, K/V). Knows nothing of slots, blocks or requests.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.layers.rotary import RotaryTable
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import LOOKAHEAD_GATE, PRELOOP_GATE, BuildInputs, SpecOptions, TensorTable
from depthbatch.worker.models.interface import ModelSpec, WorkItem
from depthbatch.worker.models.llama_like import (
    KNOWN_DEPTHS,
    LLAMA_BLOCK,
    LlamaLikeFamily,
    Loops,
    Plan,
    StackedModel,
    Stage,
    Weights,
    head_sizes,
    rotary_of,
)

R_MIN = 2  # loop 1 is not trained to give usable outputs (paper, E.2)
PUBLISHED_VOCAB_SIZE = 49152
IM_END = 2  # ends a chat turn in the published tokenizer; the published config lists only 0
GATE = "model.early_exit_gate"
BLOCK = replace(
    LLAMA_BLOCK, norm_out="input_layernorm_2.weight", norm_mlp_out="post_attention_layernorm_2.weight"
)  # norms on a branch's input and on its output


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
class Gates:
    """Trained heads; None where the model has no such file."""

    own: ScalarHead
    lookahead: ScalarHead | None
    preloop: DepthHead | None


class Ouro(StackedModel):
    """LoopedModel with the work item (h,)."""

    def __init__(self, spec: ModelSpec, weights: Weights, rotary: RotaryTable, gates: Gates) -> None:
        super().__init__(spec, weights, rotary)
        self.gates = gates

    def gate_logit(self, item: WorkItem) -> torch.Tensor:
        """Raw output of the exit gate after a loop, fp32 [N]."""
        return self.gates.own(item[0])

    def lookahead_logit(self, item: WorkItem) -> torch.Tensor:
        """Raw output of the lookahead gate after loop r: the hazard of loop r + 1, fp32 [N]."""
        return super().lookahead_logit(item) if self.gates.lookahead is None else self.gates.lookahead(item[0])

    def preloop_depth(self, item: WorkItem, threshold: torch.Tensor) -> torch.Tensor:
        """Depth predicted from the embedding alone, int32 [N]."""
        head = self.gates.preloop
        return super().preloop_depth(item, threshold) if head is None else head(item[0], threshold)


class OuroFamily(LlamaLikeFamily):
    """Recognises, sizes and builds Ouro models."""

    name = "ouro"

    def claims(self, config: ConfigReader) -> bool:
        return config.is_named("ouro", "OuroForCausalLM")

    def plan(self, config: ConfigReader) -> Plan:
        _refuse_variants(config)
        hidden = config.integer("hidden_size")
        heads, kv_heads, head_dim = head_sizes(config, hidden, "num_attention_heads", "num_key_value_heads")
        return Plan(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            inner=config.integer("intermediate_size"),
            vocab=config.integer("vocab_size"),
            eps=config.number("rms_norm_eps"),
            rope=config.rope("rope_theta", interleaved=False),
            max_positions=config.integer("max_position_embeddings"),
            tied=config.tied_head(("tie_word_embeddings", "tie_embeddings")),
            core=Stage("model.layers.{}.", config.integer("num_hidden_layers")),
            block=BLOCK,
            norm_each_loop=True,
            embedding="model.embed_tokens.weight",
            final_norm="model.norm.weight",
            gates={f"{GATE}.weight": (1, hidden), f"{GATE}.bias": (1,)},
        )

    def loops(self, config: ConfigReader, options: SpecOptions) -> Loops:
        loops = config.integer("total_ut_steps")
        gates = [*KNOWN_DEPTHS, Gate.OWN, Gate.DELAYED]
        has_lookahead = LOOKAHEAD_GATE in options.side_files
        gates += [Gate.LOOKAHEAD] if has_lookahead else []
        gates += [Gate.PRELOOP] if PRELOOP_GATE in options.side_files else []
        return Loops(
            default=loops,
            limit=loops,
            minimum=R_MIN,
            layouts=tuple(KVLayout),
            default_layout=KVLayout.LAST_EXITED,
            gates=tuple(gates),
            default_gate=Gate.LOOKAHEAD if has_lookahead else Gate.DELAYED,
            threshold=config.number("early_exit_threshold"),
        )

    def stop_ids(self, config: ConfigReader, vocab: int) -> set[int]:
        return super().stop_ids(config, vocab) | ({IM_END} if vocab == PUBLISHED_VOCAB_SIZE else set())

    def side_tensors(self, config: ConfigReader) -> dict[str, TensorTable]:
        width, loops = config.integer("hidden_size"), config.integer("total_ut_steps")
        return {
            LOOKAHEAD_GATE: TensorTable({"weight": (1, width), "bias": (1,)}),
            PRELOOP_GATE: TensorTable({"weight": (loops, width), "bias": (loops,)}),
        }

    def build(self, config: ConfigReader, spec: ModelSpec, inputs: BuildInputs) -> Ouro:
        plan = self.plan(config)
        lookahead, preloop = inputs.side.get(LOOKAHEAD_GATE), inputs.side.get(PRELOOP_GATE)
        weight, bias = (inputs.take(name, torch.float32) for name in plan.gates)
        gates = Gates(
            own=ScalarHead(weight.flatten(), bias),
            lookahead=None if lookahead is None else ScalarHead(lookahead["weight"].flatten(), lookahead["bias"]),
            preloop=None if preloop is None else DepthHead(preloop["weight"], preloop["bias"]),
        )
        return Ouro(spec, self.weights(config, plan, inputs), rotary_of(plan, inputs), gates)


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
