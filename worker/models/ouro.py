"""Ouro (ByteDance Ouro-1.4B, -2.6B, -Thinking): no layers outside the loop, sandwich norms, a trained exit gate.

Source: models.md, section 1 (published configuration and reference forward). A loop is all layers and the final norm,
so the same h is the next loop's input, the gate's input and the head's input. Loops do not see their index: the core
is one function of (h, position, K/V). Knows nothing of slots, blocks or requests.
"""

from dataclasses import replace

import torch

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.exit_heads import ScalarHead
from depthbatch.worker.models.family import BuildInputs
from depthbatch.worker.models.interface import WorkItem
from depthbatch.worker.models.llama_like import (
    KNOWN_DEPTHS,
    LLAMA_BLOCK,
    LlamaLikeFamily,
    Loops,
    Parts,
    Plan,
    StackedModel,
    llama_plan,
)

R_MIN = 2  # loop 1 is not trained to give usable outputs (paper, E.2)
PUBLISHED_VOCAB_SIZE = 49152
IM_END = 2  # ends a chat turn in the published tokenizer; the published config lists only 0
GATE = "model.early_exit_gate"
BLOCK = replace(
    LLAMA_BLOCK, norm_out="input_layernorm_2.weight", norm_mlp_out="post_attention_layernorm_2.weight"
)  # norms on a branch's input and on its output


class Ouro(StackedModel):
    """LoopedModel with the work item (h,) and a gate of its own."""

    def __init__(self, parts: Parts, gate: ScalarHead) -> None:
        super().__init__(parts)
        self._gate = gate

    def gate_logit(self, item: WorkItem) -> torch.Tensor:
        """Raw output of the exit gate after a loop, fp32 [N]."""
        return self._gate(item[0])


class OuroFamily(LlamaLikeFamily):
    """Recognises, sizes and builds Ouro models."""

    name = "ouro"

    def claims(self, config: ConfigReader) -> bool:
        return config.is_named("ouro", "OuroForCausalLM")

    def plan(self, config: ConfigReader) -> Plan:
        _refuse_variants(config)
        gate = {f"{GATE}.weight": (1, config.integer("hidden_size")), f"{GATE}.bias": (1,)}
        return llama_plan(config, block=BLOCK, norm_each_loop=True, lookups=gate)

    def loops(self, config: ConfigReader) -> Loops:
        loops = config.integer("total_ut_steps")
        return Loops(
            default=loops,
            limit=loops,
            minimum=R_MIN,
            layouts=tuple(KVLayout),
            default_layout=KVLayout.LAST_EXITED,
            gates=(*KNOWN_DEPTHS, Gate.OWN, Gate.DELAYED),
            default_gate=Gate.DELAYED,
            threshold=config.number("early_exit_threshold"),
            head_depths=loops,
        )

    def stop_ids(self, config: ConfigReader, vocab: int) -> set[int]:
        return super().stop_ids(config, vocab) | ({IM_END} if vocab == PUBLISHED_VOCAB_SIZE else set())

    def model(self, config: ConfigReader, parts: Parts, inputs: BuildInputs) -> Ouro:
        weight, bias = (inputs.take(f"{GATE}.{part}", torch.float32) for part in ("weight", "bias"))
        return Ouro(parts, ScalarHead(weight.flatten(), bias))


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
