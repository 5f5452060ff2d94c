"""The page on adding a model: its files are found through the entry points of an installed package and run."""

import json
import shutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from depthbatch.benchmarks.flops import count_flops
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ModelError
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams
from depthbatch.worker.models import registry
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.registry import find_family
from fakes.lockstep import LockstepEngine
from reference.oracle import NANBEIGE, prompts_of

NAMES = ("looped_llama", "loop_embedded")  # the families of the page, in its order
PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-model.md"


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The page's files as modules of another package that is installed: its metadata name them."""
    blocks = [block.split("```")[0] for block in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]]
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


def test_the_second_skeleton_runs(tmp_path: Path, entry_points: None) -> None:
    """Random weights from its config alone; rows at several loops in one batch get what each gets alone, and the table that
    tells the loops apart costs no FLOPs."""
    config = {
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
