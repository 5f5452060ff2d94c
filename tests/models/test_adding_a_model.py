"""The page on adding a model: its files are found through the entry points of an installed package and run."""

import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from depthbatch.benchmarks.flops import count_flops
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ModelError
from depthbatch.common.gates import Gate
from depthbatch.common.messages import PLAIN, RequestParams
from depthbatch.deploy.family_check import check_family, random_weights
from depthbatch.worker.models import registry
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.llama_like import BlockNames, Loops, Plan, Stage, llama_plan
from depthbatch.worker.models.loader import open_model_dir, rank_counts
from depthbatch.worker.models.registry import find_family
from depthbatch.worker.runner.stage_tensors import DecodeBuffers
from fakes.lockstep import LockstepEngine
from reference.oracle import NANBEIGE, prompts_of

NAMES = ("looped_llama", "loop_embedded")  # the families of the page, in its order
PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-model.md"


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The page's files as modules of another package that is installed: its metadata name them."""
    blocks = blocks_of_the_page("python")
    place = tmp_path / "site-packages"
    metadata = place / "pages_models-1.0.dist-info"
    metadata.mkdir(parents=True)
    for name, code in zip(NAMES, blocks, strict=True):
        (place / f"{name}_of_the_page.py").write_text(code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pages-models\nVersion: 1.0\n")
    lines = [f"{name} = {name}_of_the_page:FAMILY" for name in NAMES]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{registry.ENTRY_POINTS}]", *lines, ""]))
    monkeypatch.syspath_prepend(str(place))
    registry.families.cache_clear()
    yield
    registry.families.cache_clear()


def blocks_of_the_page(language: str) -> list[str]:
    return [block.split("```")[0] for block in PAGE.read_text(encoding="utf-8").split(f"```{language}\n")[1:]]


def answers(model: Path) -> list[list[int]]:
    running = LockstepEngine(EngineConfig.from_values({"model": str(model), "max_num_seqs": 4, "kv_blocks": 60}))
    request = RequestParams(max_tokens=8, min_loops=2, max_loops=2)
    return [answer.tokens for answer in running.run([(prompt, request) for prompt in prompts_of(NANBEIGE)[:3]])]


def test_the_skeleton_runs(tmp_path: Path, entry_points: None) -> None:
    """Bug: the page told a way that was gone. A looped Llama without Nanbeige's variants is Nanbeige under another name, so
    the same weights give the same tokens."""
    model = tmp_path / "model"
    shutil.copytree(NANBEIGE, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "looped_llama", "architectures": ["LoopedLlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    assert answers(model) == answers(NANBEIGE)


CONFIG = {
    "model_type": "loop_embedded",
    "hidden_act": "silu",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 90,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "num_outside_layers": 1,
    "num_loops": 3,
}


class SecondSkeleton:
    """Its forward pass as the page tells it in words: one sequence, no cache. ``logits`` [N, V]."""

    def __init__(self, model: Path) -> None:
        self.tensors = load_file(model / "model.safetensors")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.tensors[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def block(self, x: torch.Tensor, at: str) -> torch.Tensor:
        y = self.norm(x, f"{at}.norm_1")
        q, k, v = (self.linear(y, f"{at}.attn.{part}").unflatten(-1, (-1, 8)) for part in "qkv")
        q, k = (rotated(self.norm(heads, f"{at}.attn.{part}_norm")) for heads, part in ((q, "q"), (k, "k")))
        q, k, v = (heads.transpose(0, 1) for heads in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linear(attended.transpose(0, 1).flatten(1), f"{at}.attn.out")
        gate, up = self.linear(self.norm(x, f"{at}.norm_2"), f"{at}.mlp.gate_up").chunk(2, -1)
        return x + self.linear(F.silu(gate) * up, f"{at}.mlp.down")

    def logits(self, ids: Sequence[int], loops: int) -> torch.Tensor:
        injection = self.block(self.tensors["tokens.weight"][torch.tensor(ids)], "blocks.0")
        state = torch.zeros_like(injection)
        for loop in range(loops):
            state = self.norm(state + injection + self.tensors["loop.embedding.weight"][loop], "loop.norm")
            for layer in (1, 2):
                state = self.block(state, f"blocks.{layer}")
        return self.linear(self.norm(self.block(state, "blocks.3"), "norm"), "tokens")


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [N, H, Dh], feature i paired with i + Dh / 2."""
    width = x.shape[-1]
    angles = torch.arange(len(x))[:, None, None] * 1e4 ** -(torch.arange(0, width, 2) / width)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def test_the_second_skeleton_is_what_the_page_says(tmp_path: Path, entry_points: None) -> None:
    """Held to its equations by the page's own means."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    random_weights(tmp_path)
    found = check_family(tmp_path, SecondSkeleton(tmp_path).logits, outputs=8)
    assert found.largest_difference < 1e-5 and found.tokens == 2 * 2 * 5 * 8
    assert rank_counts(open_model_dir(str(tmp_path))) == (1, 2)


def test_rows_that_pad_a_batch_run(tmp_path: Path, entry_points: None) -> None:
    """Bug: the page's model looked its table up at loops - 1, which is -1 in rows that pad a batch: an error of the device."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    values = {"model": str(tmp_path), "load_format": "dummy", "max_num_seqs": 4, "kv_blocks": 20}
    stages = LockstepEngine(EngineConfig.from_values(values)).built.runner.stages
    with torch.inference_mode():
        stages.core(DecodeBuffers(4, torch.device("cpu")), PLAIN)


def test_every_field_is_on_the_page() -> None:
    """Bug: fields were named on the page by chance, or not at all (work_item)."""
    text = PAGE.read_text(encoding="utf-8")
    text = "\n".join(line for line in text.splitlines() if line.startswith("| "))
    for kind in (Plan, BlockNames, Stage, Loops):
        for field in fields(kind):
            assert re.search(rf"[`(, ]{field.name}[`), ]", text), f"{kind.__name__}.{field.name}"


def test_the_project_file_is_whole() -> None:
    """What pip needs to install the package and find its file; the entry points are those the engine asks for."""
    [text] = blocks_of_the_page("toml")
    project = tomllib.loads(text)
    assert project["build-system"]["requires"] and project["project"]["name"] and project["project"]["version"]
    [(name, value)] = project["project"]["entry-points"][registry.ENTRY_POINTS].items()
    assert name == NAMES[0] and value == f"{project['tool']['setuptools']['packages'][0]}.{name}:FAMILY"


def test_a_matrix_outside_the_loop_is_counted_once() -> None:
    """core_extra counts in every loop, extra once, lookups never; vectors in none."""
    config = ConfigReader({"num_hidden_layers": 1, **CONFIG}, "config.json")
    plain = count_flops(llama_plan(config).tensors())
    shapes = {"other.weight": (32, 8), "other.bias": (32,)}
    for kind, core, boundary in (("core_extra", 512, 0), ("extra", 0, 512), ("lookups", 0, 0)):
        table = llama_plan(config, **{kind: shapes}).tensors()
        counted = count_flops(table)
        assert shapes.items() <= table.required.items()
        assert (counted.core - plain.core, counted.boundary - plain.boundary) == (core, boundary)


def test_the_second_skeleton_runs(tmp_path: Path, entry_points: None) -> None:
    """Random weights from its config alone; rows at several loops in one batch get what each gets alone, and the table that
    tells the loops apart costs no FLOPs."""
    config = CONFIG
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = {"model": str(tmp_path), "load_format": "dummy", "dtype": "float32", "max_num_seqs": 4, "kv_blocks": 60}
    running = LockstepEngine(EngineConfig.from_values(values))
    assert running.built.info.architecture == "loop_embedded"
    requests = [
        (prompt, RequestParams(max_tokens=8, gate=Gate.REPLAY, max_loops=3, exit_depths=bytes(depths)))
        for prompt, depths in (([5, 6, 7], (1, 2, 3) * 3), ([9], (3, 1) * 4), ([1, 2], (2,) * 8))
    ]
    together = [(answer.tokens, answer.depths) for answer in running.run(requests)]
    alone = [LockstepEngine(EngineConfig.from_values(values)).run([request])[0] for request in requests]
    assert together == [(answer.tokens, answer.depths) for answer in alone]
    assert together[0][1][1:] == [1, 2, 3, 1, 2, 3, 1]
    family = find_family(ConfigReader(config, "config.json"))
    with_table = count_flops(family.tensors(ConfigReader(config, "config.json")))
    assert with_table == count_flops(family.tensors(ConfigReader(config | {"num_loops": 9}, "config.json")))


def test_an_entry_point_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another package does wrong is one line that names its entry point, and nothing is kept of it."""
    point = EntryPoint("broken", "no_such_package.models:FAMILY", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    registry.families.cache_clear()
    with pytest.raises(ModelError, match=r"entry point 'broken' .*no_such_package"):
        registry.families()
    monkeypatch.undo()
    assert "ouro" in [family.name for family in registry.families()]


@pytest.mark.parametrize("name", ["nanbeige", "ouro", "retrofitted"])
def test_a_family_of_llama_like_blocks_is_one_small_file(name: str) -> None:
    """Config, tensors and model: 120 lines. What more of them need is the base class's to know."""
    lines = (Path(registry.__file__).parent / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
