"""Huginn (tomg-group-umd Huginn-0125 3.5B): 2-4-2, recurrent state with injection, exit by convergence.

Source: models.md, section 2 (published configuration and reference forward). Norms sit on the sum of stream and branch,
unlike Ouro. The loop is s <- core(adapter(cat[s, e])) with the injection e from the prelude; no norm between loops.
Models with Huginn's class name but other blocks (retrofitted recurrence) are refused, not misloaded.
Knows nothing of slots, blocks or requests.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.layers.blocks import AttentionContext, Block, BlockStack
from depthbatch.worker.layers.linear import GatedLinear, Linear
from depthbatch.worker.layers.ops import rms_norm
from depthbatch.worker.layers.rotary import RotaryTable
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import BuildInputs, SpecOptions, TensorTable, checked_r_max
from depthbatch.worker.models.interface import ModelSpec, WorkItem
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


@dataclass(frozen=True)
class HuginnWeights:
    """All weights."""

    embedding: torch.Tensor  # [V, D]
    prelude: BlockStack
    adapter: Linear  # 2D -> D, state first
    core: BlockStack
    coda: BlockStack  # ends with the final norm
    final_norm: torch.Tensor  # [D], used before and after the coda blocks
    head: Linear  # D -> V


def seeded_state(seeds: torch.Tensor, positions: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Initial states [N, D]: a normal of STATE_STD cut at STATE_CUT deviations, a function of (seed, position) only.

    seeds [N] int32, positions [N] int32. By inversion: the normal's quantile at a uniform of the cut's probability.
    """
    key = row_key(seeds, torch.zeros_like(seeds), positions)
    lanes = torch.arange(width, device=seeds.device) + STATE_LANE
    symmetric = 2.0 * uniform_of_key(key.unsqueeze(-1), lanes) - 1.0  # [N, D] in (-1, 1)
    inside = math.erf(STATE_CUT / math.sqrt(2.0))  # probability within the cut
    return (torch.erfinv(symmetric * inside) * (math.sqrt(2.0) * STATE_STD)).to(dtype)


class Huginn:
    """LoopedModel with the work item (state, injection)."""

    def __init__(self, spec: ModelSpec, weights: HuginnWeights, rotary: RotaryTable, eps: float, seeded: bool) -> None:
        self.spec = spec
        self.weights = weights
        self._rotary = rotary
        self._eps = eps
        self._seeded = seeded

    def prelude(
        self, token_ids: torch.Tensor, positions: torch.Tensor, state_seeds: torch.Tensor, attend: AttentionContext
    ) -> WorkItem:
        """Injection e from the scaled embedding and the prelude blocks; initial state zero or seeded."""
        x = F.embedding(token_ids, self.weights.embedding) * math.sqrt(self.spec.hidden_size)
        e = self.weights.prelude(x, self._rotary.at(positions), attend)
        if self._seeded:
            return seeded_state(state_seeds, positions, self.spec.hidden_size, e.dtype), e
        return torch.zeros_like(e), e

    def core(self, item: WorkItem, positions: torch.Tensor, loops: torch.Tensor, attend: AttentionContext) -> WorkItem:
        """One loop: adapter on (state, injection), then the core blocks."""
        state, injection = item
        x = self.weights.adapter(torch.cat((state, injection), -1))
        return self.weights.core(x, self._rotary.at(positions), attend), injection

    def coda(self, item: WorkItem, positions: torch.Tensor, attend: AttentionContext) -> torch.Tensor:
        """Final norm, coda blocks, the same final norm again."""
        x = rms_norm(item[0], self.weights.final_norm, self._eps)
        return self.weights.coda(x, self._rotary.at(positions), attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] -> fp32 [N, V]."""
        return self.weights.head(hidden).float()

    def gate_logit(self, item: WorkItem) -> torch.Tensor:
        raise NotImplementedError("huginn has no trained gate; it decides exits by convergence")

    def lookahead_logit(self, item: WorkItem) -> torch.Tensor:
        raise NotImplementedError("huginn has no trained gate; it decides exits by convergence")

    def preloop_depth(self, item: WorkItem, threshold: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("huginn has no trained gate; it decides exits by convergence")

    def convergence(self, before: WorkItem, after: WorkItem) -> torch.Tensor:
        """|s_r - s_{r-1}| / |s_r| of the raw states in fp32, the denominator clamped away from 0; fp32 [N]."""
        new = after[0].float()
        step = new - before[0].float()
        return step.square().sum(-1).sqrt() / new.square().sum(-1).sqrt().clamp(min=1e-12)


class HuginnFamily:
    """Recognises, sizes and builds Huginn models."""

    name = "huginn"

    def claims(self, config: ConfigReader) -> bool:
        return config.values.get("model_type") == "huginn_raven" or "RavenForCausalLM" in config.architectures()

    def spec(self, config: ConfigReader, options: SpecOptions) -> ModelSpec:
        _refuse_variants(config)
        hidden, heads = config.integer("n_embd"), config.integer("n_heads")
        if hidden % heads or hidden // heads % 2:
            raise config.fail(f"n_embd {hidden} must be an even multiple of n_heads {heads}")
        mean_recurrence, vocab_size = config.integer("mean_recurrence"), config.integer("vocab_size")
        r_limit = max(R_LIMIT, 2 * mean_recurrence)
        r_max = checked_r_max(options.r_max, min(DEFAULT_R_MAX, mean_recurrence), r_limit)
        eos = set(config.eos_token_ids(vocab_size)) | ({END_TURN} if vocab_size == PUBLISHED_VOCAB_SIZE else set())
        own_threshold = config.has("early_exit_threshold")
        return ModelSpec(
            architecture=self.name,
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            prelude_layers=config.integer("n_layers_in_prelude", minimum=0),
            core_layers=config.integer("n_layers_in_recurrent_block"),
            coda_layers=config.integer("n_layers_in_coda", minimum=0),
            work_item=("state", "injection"),
            r_max=r_max,
            r_limit=r_limit,
            r_min=min(R_MIN, r_max),
            layouts=tuple(KVLayout),
            default_layout=KVLayout.SINGLE,
            gates=(Gate.NONE, Gate.FIXED, Gate.REPLAY, Gate.OWN, Gate.DELAYED, Gate.CONVERGENCE),
            default_gate=Gate.CONVERGENCE,
            default_threshold=config.number("early_exit_threshold") if own_threshold else DEFAULT_THRESHOLD,
            max_positions=config.integer("block_size"),
            eos_token_ids=tuple(sorted(eos)),
            dtype=options.dtype,
        )

    def tensors(self, config: ConfigReader) -> TensorTable:
        d, i, heads = (config.integer(n) for n in ("n_embd", "intermediate_size", "n_heads"))
        rows = _embedding_rows(config)
        block_shapes: dict[str, tuple[int, ...]] = {
            "attn.Wqkv.weight": (3 * d, d),
            "attn.qk_bias": (2, 1, heads, d // heads),
            "attn.proj.weight": (d, d),
            "mlp.fc.weight": (2 * i, d),
            "mlp.proj.weight": (d, i),
        } | {f"norm_{n}.weight": (d,) for n in (1, 2, 3, 4)}
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (rows, d),
            "transformer.adapter.weight": (d, 2 * d),
            "transformer.ln_f.weight": (d,),
        }
        for stage, count in _stage_layers(config).items():
            for index in range(count):
                shapes |= {f"transformer.{stage}.{index}.{key}": shape for key, shape in block_shapes.items()}
        head: dict[str, tuple[int, ...]] = {"lm_head.weight": (rows, d)}
        tied = _tied(config)
        return TensorTable(shapes if tied else shapes | head, head if tied else {}, ("freqs_cis",))

    def side_tensors(self, config: ConfigReader) -> dict[str, TensorTable]:
        return {}

    def build(self, config: ConfigReader, spec: ModelSpec, inputs: BuildInputs) -> Huginn:
        final_norm, eps = inputs.take("transformer.ln_f.weight"), config.number("norm_eps")

        def stack(stage: str, count: int, first_layer: int, ending: torch.Tensor | None = None) -> BlockStack:
            blocks = tuple(_block(inputs, f"transformer.{stage}.{i}.") for i in range(count))
            return BlockStack(blocks, first_layer, norm_on_sum=True, eps=eps, final_norm=ending)

        embedding = inputs.take("transformer.wte.weight")
        head = embedding
        if "lm_head.weight" in inputs.optional_present or not _tied(config):
            head = inputs.take("lm_head.weight")
            if _tied(config) and not torch.equal(head, embedding):
                raise config.fail("the head is tied, but lm_head.weight differs from transformer.wte.weight")
        weights = HuginnWeights(
            embedding=embedding,
            prelude=stack("prelude", spec.prelude_layers, 0),
            adapter=Linear(inputs.take("transformer.adapter.weight")),
            core=stack("core_block", spec.core_layers, spec.prelude_layers),
            coda=stack("coda", spec.coda_layers, spec.prelude_layers + spec.core_layers, final_norm),
            final_norm=final_norm,
            head=Linear(head.narrow(0, 0, spec.vocab_size)),
        )
        rotary = RotaryTable(spec.max_positions, spec.head_dim, config.rope_base("rope_base"), True, inputs.device)
        return Huginn(spec, weights, rotary, eps, inputs.state_init == "seeded")


def _block(inputs: BuildInputs, prefix: str) -> Block:
    def take(name: str) -> torch.Tensor:
        return inputs.take(prefix + name)

    return Block(
        norm_in=take("norm_1.weight"),
        qkv=Linear(take("attn.Wqkv.weight")),
        qk_bias=take("attn.qk_bias").flatten(),
        out=Linear(take("attn.proj.weight")),
        norm_out=take("norm_2.weight"),
        norm_mlp_in=take("norm_3.weight"),
        gate_up=GatedLinear(take("mlp.fc.weight")),
        down=Linear(take("mlp.proj.weight")),
        norm_mlp_out=take("norm_4.weight"),
    )


def _stage_layers(config: ConfigReader) -> dict[str, int]:
    return {
        "prelude": config.integer("n_layers_in_prelude", minimum=0),
        "core_block": config.integer("n_layers_in_recurrent_block"),
        "coda": config.integer("n_layers_in_coda", minimum=0),
    }


def _tied(config: ConfigReader) -> bool:
    return config.tied_head(("tie_embeddings", "tie_word_embeddings"))


def _embedding_rows(config: ConfigReader) -> int:
    """Rows of the embedding: the vocabulary, padded up to a multiple where the config says so."""
    multiple = config.integer("padding_multiple") if config.has("padding_multiple") else 1
    return -(-config.integer("vocab_size") // multiple) * multiple


def _refuse_variants(config: ConfigReader) -> None:
    """Fields that tell Huginn from models that share its class name; each would change the forward pass."""
    config.expect("block_class_name", ("SandwichBlock",))
    config.expect("norm_class_name", ("RMSNorm_llama", "RMSNorm"))
    config.expect("mlp_class_name", ("GatedMLP",))
    config.expect("nonlin_name", ("SiLU",))
    config.expect("injection_type", ("linear",))
    config.expect("bias", (False,))
    config.expect("qk_bias", (True,))
    config.expect("qk_norm", (False,), optional=True)
    if config.has("num_key_value_heads") and config.integer("num_key_value_heads") != config.integer("n_heads"):
        raise config.fail("grouped-query attention ('num_key_value_heads') is not supported for this architecture")


FAMILY = HuginnFamily()
