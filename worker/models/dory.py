"""Dory (NVIDIA Nemotron-Labs-Dory1.0, 4B): a looped nGPT, 4-10-4 blocks, 2 loops, sliding and full attention.

Source: the published code (models.md, section 7). States live on the unit sphere: l(x) = x / |x|, norms have no weight, a
branch moves the stream part of the way to its result. Configs hold one or both of two sets of keys, and count attention
and MLP as layers of their own.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.layers.blocks import AttentionContext
from depthbatch.worker.layers.int8 import Weight
from depthbatch.worker.layers.linear import Linear
from depthbatch.worker.layers.ops import rope_split_half
from depthbatch.worker.layers.rotary import Rope, RotaryTable
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import BuildInputs, Shapes, SpecOptions, TensorTable, checked_r_max
from depthbatch.worker.models.interface import ModelSpec, WorkItem
from depthbatch.worker.models.llama_like import KNOWN_DEPTHS, GatelessModel, head_sizes

EPS = 1e-6
R_LIMIT = 16  # at least; the published code runs any number of loops
KINDS = {"sliding_attention": "S", "full_attention": "*", "mlp": "-"}
EMBEDDING, HEAD, LOGIT_SCALE = "backbone.embeddings.weight", "lm_head.weight", "lm_head.logit_scale"


def unit(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] scaled to length 1, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


@dataclass(frozen=True)
class DoryBlock:
    """Attention and a gated MLP. Scales are the stored ones times their constants, fp32."""

    qkvg: Linear  # D -> (2 H + 2 Hkv) Dh: q, k, v and the output gate
    q_scale: torch.Tensor  # [H Dh]
    gate_scale: torch.Tensor  # [H Dh]
    out: Linear  # H Dh -> D
    attention_step: torch.Tensor  # [D], how far the stream goes to the branch's result
    gate_up: Linear  # D -> 2 I
    gate_up_scale: torch.Tensor  # [2 I]
    down: Linear  # I -> D
    mlp_step: torch.Tensor  # [D]
    slides: bool


@dataclass(frozen=True)
class DoryWeights:
    """All weights; blocks of prelude, core and coda."""

    embedding: torch.Tensor  # [V, D]
    stages: tuple[tuple[DoryBlock, ...], ...]
    head: Linear  # D -> V
    logit_scale: torch.Tensor  # fp32 [V]


class Dory(GatelessModel):
    """LoopedModel with the work item (state, injection)."""

    def __init__(self, spec: ModelSpec, weights: DoryWeights, full: RotaryTable, sliding: RotaryTable) -> None:
        self.spec = spec
        self.weights = weights
        self._rotary = {False: full, True: sliding}  # by whether the layer slides

    def prelude(
        self, token_ids: torch.Tensor, positions: torch.Tensor, state_seeds: torch.Tensor, attend: AttentionContext
    ) -> WorkItem:
        """Unit injection from the prelude's blocks; the state starts as a copy of it."""
        x = unit(F.embedding(token_ids, self.weights.embedding))
        e = unit(self._run(0, x, positions, attend))
        return e, e

    def core(self, item: WorkItem, positions: torch.Tensor, loops: torch.Tensor, attend: AttentionContext) -> WorkItem:
        """One loop of the core's blocks on the sum of unit state and injection."""
        return self._run(1, unit(item[0]) + item[1], positions, attend), item[1]

    def coda(self, item: WorkItem, positions: torch.Tensor, attend: AttentionContext) -> torch.Tensor:
        """The coda's blocks, scaled to length 1."""
        return unit(self._run(2, item[0], positions, attend))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] -> fp32 [N, V]."""
        return self.weights.head(hidden).float() * self.weights.logit_scale

    def _run(self, stage: int, x: torch.Tensor, positions: torch.Tensor, attend: AttentionContext) -> torch.Tensor:
        blocks = self.weights.stages[stage]
        first = sum(len(before) for before in self.weights.stages[:stage])
        rotations = {slides: self._rotary[slides].at(positions) for slides in {block.slides for block in blocks}}
        for layer, block in enumerate(blocks, first):
            x = unit(x)
            rotation = rotations[block.slides]
            q, k, v, gate = self._split(block.qkvg(x))
            q = rope_split_half(unit(q), rotation.cos, rotation.sin)
            k = rope_split_half(unit(k), rotation.cos, rotation.sin)
            q = (q.float() * block.q_scale.view(self.spec.num_heads, -1)).to(x.dtype)
            attended = attend(layer, q, k, v).float() * torch.sigmoid(gate.float() * block.gate_scale)
            x = _towards(x, unit(block.out(unit(attended).to(x.dtype))), block.attention_step)
            x = unit(x)
            gate_up = block.gate_up(x).float() * block.gate_up_scale
            first_half, second_half = gate_up.chunk(2, -1)
            inner = unit(F.silu(first_half) * second_half).to(x.dtype)
            x = _towards(x, unit(block.down(inner)), block.mlp_step)
        return x

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Heads of q, k and v [N, H, Dh], and the gate [N, H Dh]."""
        q, kv = self.spec.num_heads * self.spec.head_dim, self.spec.num_kv_heads * self.spec.head_dim
        *heads, gate = torch.split(projected, [q, kv, kv, q], -1)
        a, b, c = (part.reshape(len(part), -1, self.spec.head_dim) for part in heads)
        return a, b, c, gate


def _towards(x: torch.Tensor, branch: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return (x.float() + step * (branch.float() - x.float())).to(x.dtype)


class DoryFamily:
    """Recognises, sizes and builds Dory models."""

    name = "dory"
    eos_of_tokenizer = False

    def claims(self, config: ConfigReader) -> bool:
        return config.is_named("dory", "DoryForCausalLM")

    def spec(self, config: ConfigReader, options: SpecOptions) -> ModelSpec:
        _refuse_variants(config)
        loops, mode = config.integer("n_recurrent_loops"), "per_loop"
        config.expect("recurrent_kv_cache_mode", ("per_loop", "last_loop"), optional=True)
        if config.has("recurrent_kv_cache_mode"):
            mode = config.text("recurrent_kv_cache_mode")
        limit = max(R_LIMIT, loops)
        prelude, core, coda = _stages(config)
        heads, kv_heads, head_dim = _heads(config)
        vocab = config.integer("vocab_size")
        window = _either(config, "sliding_window", "swa_window_size")
        return ModelSpec(
            architecture=self.name,
            vocab_size=vocab,
            hidden_size=config.integer("hidden_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            prelude_layers=prelude,
            core_layers=core,
            coda_layers=coda,
            work_item=("state", "injection"),
            r_max=checked_r_max(options.r_max, loops, limit),
            r_limit=limit,
            r_min=1,
            layouts=(KVLayout.DEPTH_INDEXED, KVLayout.SINGLE),
            default_layout=KVLayout.SINGLE if mode == "last_loop" else KVLayout.DEPTH_INDEXED,
            gates=KNOWN_DEPTHS,
            default_gate=KNOWN_DEPTHS[0],
            default_threshold=1.0,
            max_positions=config.integer("max_position_embeddings"),
            eos_token_ids=tuple(sorted(set(config.eos_token_ids(vocab)))),
            dtype=options.dtype,
            windows=tuple(window if slides else 0 for slides in _sliding(config)),
        )

    def tensors(self, config: ConfigReader) -> TensorTable:
        d, i, vocab = (config.integer(n) for n in ("hidden_size", "intermediate_size", "vocab_size"))
        heads, kv_heads, head_dim = _heads(config)
        q, kv = heads * head_dim, kv_heads * head_dim
        attention: Shapes = {f"mixer.{p}_proj.weight": (n, d) for p, n in zip("qkvg", (q, kv, kv, q), strict=True)}
        attention |= {"mixer.o_proj.weight": (d, q), "mixer.sqk": (q,), "mixer.s_gate": (q,), "attn_alpha": (d,)}
        mlp: Shapes = {f"mixer.{part}_proj.weight": (i, d) for part in ("gate", "up")}
        mlp |= {"mixer.down_proj.weight": (d, i), "mixer.suv_gate": (i,), "mixer.suv_up": (i,), "mlp_alpha": (d,)}
        blocks: list[Shapes] = []
        for block in range(sum(_stages(config))):
            pair = ((2 * block, attention), (2 * block + 1, mlp))
            blocks.append({f"backbone.layers.{n}.{key}": shape for n, part in pair for key, shape in part.items()})
        shapes: Shapes = {EMBEDDING: (vocab, d), HEAD: (vocab, d), LOGIT_SCALE: (vocab,)}
        for of_block in blocks:
            shapes |= of_block
        prelude, core, _ = _stages(config)
        in_core = frozenset(name for of_block in blocks[prelude : prelude + core] for name in of_block)
        linears = frozenset(name for of_block in blocks for name in of_block if name.endswith("_proj.weight"))
        return TensorTable(shapes, core=in_core, looked_up=frozenset({EMBEDDING}), linears=linears)

    def side_tensors(self, config: ConfigReader) -> dict[str, TensorTable]:
        return {}

    def build(self, config: ConfigReader, spec: ModelSpec, inputs: BuildInputs) -> Dory:
        sigma = _either(config, "initializer_range", "init_method_std", number=True)
        blocks = [_block(inputs, config, spec, n, slides, sigma) for n, slides in enumerate(_sliding(config))]
        ends = spec.prelude_layers, spec.prelude_layers + spec.core_layers
        weights = DoryWeights(
            embedding=inputs.take(EMBEDDING),
            stages=(tuple(blocks[: ends[0]]), tuple(blocks[ends[0] : ends[1]]), tuple(blocks[ends[1] :])),
            head=Linear(inputs.take(HEAD)),
            logit_scale=inputs.take(LOGIT_SCALE, torch.float32) / sigma,
        )
        full, sliding = (
            RotaryTable(spec.max_positions, spec.head_dim, Rope(base, False), inputs.device) for base in _bases(config)
        )
        return Dory(spec, weights, full, sliding)


def _block(
    inputs: BuildInputs, config: ConfigReader, spec: ModelSpec, number: int, slides: bool, sigma: float
) -> DoryBlock:
    def vector(name: str, mlp: bool = False) -> torch.Tensor:
        return inputs.take(f"backbone.layers.{2 * number + mlp}.{name}", torch.float32)

    def matrix(*names: str, mlp: bool = False) -> Weight:
        return inputs.matrix(*(f"backbone.layers.{2 * number + mlp}.mixer.{name}_proj.weight" for name in names))

    width, step = spec.hidden_size, config.number("ngpt_alpha_init") / sigma
    return DoryBlock(
        qkvg=Linear(matrix(*"qkvg")),
        q_scale=(vector("mixer.sqk") * math.sqrt(spec.head_dim) / sigma).square(),
        gate_scale=(vector("mixer.s_gate") * width**0.25 / sigma).square(),
        out=Linear(matrix("o")),
        attention_step=(vector("attn_alpha") * step).abs(),
        gate_up=Linear(matrix("gate", "up", mlp=True)),
        gate_up_scale=torch.cat([vector(f"mixer.suv_{part}", True) for part in ("gate", "up")]) * math.sqrt(width),
        down=Linear(matrix("down", mlp=True)),
        mlp_step=(vector("mlp_alpha", True) * step).abs(),
        slides=slides,
    )


def _either(config: ConfigReader, first: str, second: str, number: bool = False) -> Any:
    """A value that either of two sets of keys may hold; refuses values that differ."""
    read = config.number if number else config.integer
    names = [name for name in (first, second) if config.has(name)]
    values = [read(name) for name in names] or [read(first)]
    if len(set(values)) > 1:
        raise config.fail(f"'{first}' = {values[0]!r} and '{second}' = {values[1]!r} contradict each other")
    return values[0]


def _heads(config: ConfigReader) -> tuple[int, int, int]:
    head_dim = _either(config, "head_dim", "attention_head_dim")
    own = ConfigReader(config.values | {"head_dim": head_dim}, config.path)
    return head_sizes(own, config.integer("hidden_size"), "num_attention_heads", "num_key_value_heads")


def _sliding(config: ConfigReader) -> list[bool]:
    """Of each block, whether its attention slides."""
    kinds, pattern = config.values.get("layer_types"), config.values.get("hybrid_layer_pattern")
    spelt = None if kinds is None else "".join(KINDS.get(kind, "?") for kind in kinds)
    if spelt is not None and pattern is not None and spelt != pattern:
        raise config.fail(f"'layer_types' says {spelt} and 'hybrid_layer_pattern' {pattern!r}")
    layers = spelt if spelt is not None else config.text("hybrid_layer_pattern")
    if len(layers) != config.integer("num_hidden_layers"):
        raise config.fail(f"{len(layers)} layers are named, num_hidden_layers is {config.values['num_hidden_layers']}")
    if layers[1::2].strip("-") or layers[::2].strip("S*"):
        raise config.fail(f"layers {layers!r} are not attention and MLP in turn, which alone is supported")
    return [kind == "S" for kind in layers[::2]]


def _stages(config: ConfigReader) -> tuple[int, int, int]:
    """Blocks of prelude, core and coda; the fields count attention and MLP apart."""
    counts = [config.integer(f"n_{part}_layers", minimum=0) for part in ("input", "recurrent", "output")]
    if any(count % 2 for count in counts) or sum(counts) != config.integer("num_hidden_layers") or not counts[1]:
        raise config.fail(f"n_input_layers, n_recurrent_layers, n_output_layers {counts} do not divide the layers")
    prelude, core, coda = (count // 2 for count in counts)
    return prelude, core, coda


def _bases(config: ConfigReader) -> tuple[float, float]:
    """Rotary bases of full and of sliding layers; ``rope_parameters`` by kind win over the other set of keys."""
    by_kind = config.values.get("rope_parameters")
    if not by_kind:
        profiles = config.values.get("rope_profile_layers") or []
        if profiles[::2] != [1 if slides else 2 for slides in _sliding(config)]:
            raise config.fail("'rope_profile_layers' must be 1 for sliding and 2 for full attention")
        return config.number("rope_theta_2"), config.number("rope_theta")
    names = ("full_attention", "sliding_attention")
    readers = [ConfigReader({"rope_parameters": by_kind.get(name)}, f"{config.path}: {name}") for name in names]
    full, sliding = (reader.rope("rope_theta", interleaved=False).base for reader in readers)
    return full, sliding


def _refuse_variants(config: ConfigReader) -> None:
    """Fields that would change the forward pass."""
    heads, kv_heads, head_dim = _heads(config)
    for name, value in {
        "dory_format_version": 1,
        "ngpt": True,
        "fngpt": True,
        "initial_state": "input_copy",
        "input_transform": "residual",
        "output_transform": "replace",
        "attention_output_gate": True,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "mlp_hidden_act": "silu",
        "partial_rotary_factor": 1.0,
        "partial_rotary_factor_2": 1.0,
        "swa_head_dim": head_dim,
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": kv_heads,
    }.items():
        config.expect(name, (value,), optional=True)
    config.refuse("attention_bias", "mlp_bias", "ngpt_enable_final_norm", "mixer_type")
    config.refuse("attention_output_gate_logit_scale_init", "rope_scaling")
    if any(config.values.get("no_rope_layers") or ()):
        raise config.fail("'no_rope_layers' names layers without rotary embedding, which is not supported")


FAMILY = DoryFamily()
