"""What a plan of Llama-like blocks declares: norms of q and k by head or over all heads, fields, ranks, the work item."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams
from depthbatch.worker.layers import ops
from depthbatch.worker.layers.cpu.library import MODE_VARIABLE, cpu_kernels
from depthbatch.worker.layers.rotary import Rope
from depthbatch.worker.models import registry
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.llama_like import LLAMA_BLOCK, LlamaLikeFamily, Loops, Plan, Stage, llama_plan
from depthbatch.worker.models.loader import open_model_dir, rank_counts, read_spec
from fakes.checkpoints import write_checkpoint
from fakes.lockstep import LockstepEngine
from fakes.thread_ranks import ThreadedLockstep, ThreadGroup

CONFIG: dict[str, Any] = {
    "model_type": "test_normed",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "num_hidden_layers": 2,
    "num_loops": 3,
    "by_head": True,
}
QK_NORMED = replace(LLAMA_BLOCK, q_norm="self_attn.q_norm.weight", k_norm="self_attn.k_norm.weight")
PROMPTS = ([7], [3, 90, 14, 15, 9], list(range(1, 40, 2)), [5, 6, 7, 8])


class Normed(LlamaLikeFamily):
    """A looped Llama with norms of q and k."""

    name = "test_normed"

    def __init__(self, work_item: tuple[str, ...] = ("h",)) -> None:
        self.work_item = work_item

    def claims(self, config: ConfigReader) -> bool:
        return config.values.get("model_type") == self.name

    def plan(self, config: ConfigReader) -> Plan:
        block = replace(QK_NORMED, qk_norm_by_head=config.boolean("by_head"))
        return llama_plan(config, block=block, norm_each_loop=True)

    def loops(self, config: ConfigReader) -> Loops:
        layouts = (KVLayout.LAST_EXITED, KVLayout.DEPTH_INDEXED)
        return Loops(config.integer("num_loops"), 4, 1, layouts, layouts[0], work_item=self.work_item)


class NormedIfStored(Normed):
    """The same where the norms are there, else a Llama."""

    def plan(self, config: ConfigReader) -> Plan:
        plan = super().plan(config)
        return replace(plan, block=LLAMA_BLOCK, normed_block=plan.block)


Offer = Callable[[LlamaLikeFamily], None]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Makes a family known."""
    ours = registry.families()
    return lambda family: monkeypatch.setattr(registry, "families", lambda: (family, *ours))


def twin(directory: Path, ids: Sequence[int], loops: int) -> torch.Tensor:
    """Logits [N, V] of a whole sequence after ``loops`` loops, as the equations are, without a cache."""
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    heads, kv_heads, width = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * tensors[f"{name}.weight"]

    def part(x: torch.Tensor, name: str, count: int) -> torch.Tensor:
        """[N, D] -> [N, count, width]; q and k normed, each head by itself or all of them together."""
        x = x @ tensors[f"{name}_proj.weight"].T
        if name.endswith("v"):
            return x.unflatten(-1, (count, width))
        normed = norm(x.unflatten(-1, (count, width)) if config["by_head"] else x, f"{name}_norm")
        return rotated(normed.reshape(-1, count, width))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x))[:, None, None] * config["rope_theta"] ** -(torch.arange(0, width, 2) / width)
        first, second = x.chunk(2, -1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )

    def block(x: torch.Tensor, at: str) -> torch.Tensor:
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (part(y, f"{at}.self_attn.{n}", heads if n == "q" else kv_heads) for n in "qkv")
        k, v = (kv.repeat_interleave(heads // kv_heads, 1) for kv in (k, v))
        attended = F.scaled_dot_product_attention(*(z.transpose(0, 1) for z in (q, k, v)), is_causal=True)
        x = x + attended.transpose(0, 1).flatten(1) @ tensors[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (y @ tensors[f"{at}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return x + (F.silu(gate) * up) @ tensors[f"{at}.mlp.down_proj.weight"].T

    embedding = tensors["model.embed_tokens.weight"]
    x = embedding[torch.tensor(ids)]
    for _ in range(loops):
        for layer in range(config["num_hidden_layers"]):
            x = block(x, f"model.layers.{layer}")
        x = norm(x, "model.norm")
    return x @ embedding.T


def expected(directory: Path, prompt: Sequence[int], depth: int, count: int = 8) -> list[int]:
    """Greedy tokens: the first comes of all loops, the others of ``depth``."""
    tokens = [int(twin(directory, prompt, CONFIG["num_loops"])[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(twin(directory, [*prompt, *tokens], depth)[-1].argmax()))
    return tokens


def requests() -> list[tuple[Sequence[int], RequestParams]]:
    """Every prompt at a depth of its own."""
    depths = [1 + index % CONFIG["num_loops"] for index in range(len(PROMPTS))]
    return [
        (prompt, RequestParams(max_tokens=8, gate=Gate.FIXED, min_loops=depth, max_loops=depth))
        for prompt, depth in zip(PROMPTS, depths, strict=True)
    ]


def config_of(directory: Path) -> EngineConfig:
    values = {"max_num_seqs": 5, "min_free_slots": 1, "kv_blocks": 80, "max_num_batched_tokens": 13}
    return EngineConfig.from_values({"model": str(directory), "dtype": "float32", **values})


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize(("mode", "backend"), [("c", None), ("portable", None), ("torch", "sdpa")])
def test_norms_of_q_and_k(
    by_head: bool, mode: str, backend: str | None, offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: norms of q and k were over all heads only; a model with one norm for every head (Qwen3) was refused by its shapes,
    and with made-up weights run as another model. Prompts in chunks, rows at several loops: the tokens of a plain twin."""
    offer(Normed())
    write_checkpoint(tmp_path, CONFIG | {"by_head": by_head})
    monkeypatch.setenv(MODE_VARIABLE, mode)
    try:
        ops.use_kernels(cpu_kernels())
        answers = LockstepEngine(config_of(tmp_path), backend).run(requests())
    finally:
        monkeypatch.undo()
        ops.use_kernels(cpu_kernels())
    wanted = [expected(tmp_path, prompt, request.max_loops) for prompt, request in requests()]
    assert [answer.tokens for answer in answers] == wanted


def test_norms_by_head_allow_ranks(offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm of every head is the same on each rank: two ranks give the tokens of one."""
    offer(Normed())
    write_checkpoint(tmp_path, CONFIG)
    assert rank_counts(open_model_dir(str(tmp_path))) == (1, 2)
    group = ThreadGroup(2)
    group.stand_in(monkeypatch)
    together = ThreadedLockstep(config_of(tmp_path), group).run(requests())
    alone = LockstepEngine(config_of(tmp_path)).run(requests())
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]


@pytest.mark.parametrize("family", [Normed, NormedIfStored])
@pytest.mark.parametrize(("by_head", "counts"), [(True, (1, 2)), (False, (1,))])
def test_norms_over_all_heads_keep_a_model_on_one_rank(
    family: Callable[[], LlamaLikeFamily], by_head: bool, counts: tuple[int, ...], offer: Offer, tmp_path: Path
) -> None:
    """Bug: where ``block`` had such norms two ranks were offered, and their start ended in an error of torch.split: a rank has
    some of the heads alone. That was known of ``normed_block`` only, and there of norms by head, too."""
    offer(Normed())  # all tensors, the norms among them
    write_checkpoint(tmp_path, CONFIG | {"by_head": by_head})
    offer(family())
    assert rank_counts(open_model_dir(str(tmp_path))) == counts
    if counts == (1,):
        with pytest.raises(ConfigError, match="runs on 1 rank"):
            read_spec(str(tmp_path), ranks=2)


OVERRIDES = {
    "hidden_size": {"hidden": 32},
    "num_attention_heads": {"heads": 4},
    "num_key_value_heads": {"kv_heads": 2},
    "head_dim": {"head_dim": 8},
    "intermediate_size": {"inner": 48},
    "vocab_size": {"vocab": 96},
    "rms_norm_eps": {"eps": 1e-5},
    "rope_theta": {"rope": Rope(1e4, False)},
    "max_position_embeddings": {"max_positions": 128},
    "tie_word_embeddings": {"tied": True},
    "num_hidden_layers": {"core": Stage("model.layers.{}.", 2)},
}


@pytest.mark.parametrize("missing", [*([name] for name in OVERRIDES), list(OVERRIDES)], ids=lambda names: names[0])
def test_a_field_that_is_given_need_not_be_in_the_config(missing: list[str]) -> None:
    """Bug: llama_plan read every field of Llama's, also those whose value it was given."""
    without = ConfigReader({name: value for name, value in CONFIG.items() if name not in missing}, "config.json")
    given: dict[str, Any] = {}
    for name in missing:
        given |= OVERRIDES[name]
    assert llama_plan(without, **given) == llama_plan(ConfigReader(CONFIG, "config.json"))
    other = llama_plan(ConfigReader(CONFIG, "config.json"), "num_attention_heads", kv_heads=1, head_dim=16)
    assert (other.heads, other.kv_heads, other.head_dim) == (4, 1, 16)


@pytest.mark.parametrize("field", sorted(set(OVERRIDES) - {"head_dim"}))
def test_a_field_that_is_not_given_is_named(field: str) -> None:
    """What is neither in the config nor given is named."""
    config = ConfigReader({name: value for name, value in CONFIG.items() if name != field}, "config.json")
    with pytest.raises(ModelError, match=field):
        llama_plan(config)


def test_a_work_item_of_another_count_is_named(offer: Offer, tmp_path: Path) -> None:
    """Bug: a family whose stages give more tensors than Loops.work_item names ended in "zip() argument 2 is longer than
    argument 1"."""
    offer(Normed(work_item=("state", "injection")))
    write_checkpoint(tmp_path, CONFIG)
    message = r"^test_normed: 'work_item' names 2 tensors \(state, injection\), the stages give 1$"
    with pytest.raises(ModelError, match=message):
        LockstepEngine(config_of(tmp_path))
