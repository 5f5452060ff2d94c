"""Nanbeige4.2 (3B, chat and Base): all 22 layers of a Llama are the loop, run twice; nothing injected, no gate.

Source: the published code (models.md, section 6). The final norm ends every loop, or the last alone by a flag.
"""

from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.llama_like import LlamaLikeFamily, Loops, Plan, llama_plan

R_LIMIT = 16  # at least; the published code runs any number of loops
VARIANTS = (  # keys of other models of the class, each of which changes the forward pass
    "qk_layernorm",
    "emb_neighbor_num",
    "insert_ngram_layer_idx",
    "ngram_insert_all_layers",
    "enable_double_loop_split",
    "loop_middle_layers",
    "loop_share_kv",
    "enable_hyper_connection",
    "enable_depth_attention",
    "attention_bias",
    "mlp_bias",
)


class NanbeigeFamily(LlamaLikeFamily):
    """Recognises, sizes and builds Nanbeige models."""

    name = "nanbeige"

    def claims(self, config: ConfigReader) -> bool:
        return config.is_named("nanbeige", "NanbeigeForCausalLM")

    def plan(self, config: ConfigReader) -> Plan:
        config.refuse(*VARIANTS)
        config.expect("hidden_act", ("silu",))
        config.expect("pretraining_tp", (1,), optional=True)
        config.expect("skip_loop_final_norm", (True, False), optional=True)
        kv_name = "num_key_value_heads" if config.has("num_key_value_heads") else "num_attention_heads"
        return llama_plan(config, kv_name, norm_each_loop=not config.values.get("skip_loop_final_norm"))

    def loops(self, config: ConfigReader) -> Loops:
        """``loop_loss_weights``, where there are any, hold one less than the loops, whatever ``num_loops`` says."""
        loops = config.integer("num_loops") if config.has("num_loops") else 1
        if weights := config.values.get("loop_loss_weights"):
            if not isinstance(weights, list):
                raise config.fail(f"field 'loop_loss_weights' must be a list, got {weights!r}")
            loops = len(weights) + 1
        layouts = (KVLayout.DEPTH_INDEXED,)
        return Loops(loops, max(R_LIMIT, loops), 1, layouts, layouts[0])


FAMILY = NanbeigeFamily()
