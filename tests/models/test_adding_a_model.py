"""The page on adding a model: its skeleton is found through an entry point and runs."""

import json
import shutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ModelError
from depthbatch.common.messages import RequestParams
from depthbatch.worker.models import registry
from fakes.lockstep import LockstepEngine
from reference.oracle import NANBEIGE, prompts_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-model.md"


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The page's file as a module of another package."""
    code = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "looped_llama_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("looped_llama", "looped_llama_of_the_page:FAMILY", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    registry.families.cache_clear()
    yield
    registry.families.cache_clear()


def answers(model: Path) -> list[list[int]]:
    running = LockstepEngine(EngineConfig.from_values({"model": str(model), "max_num_seqs": 4, "kv_blocks": 60}))
    request = RequestParams(max_tokens=8, min_loops=2, max_loops=2)
    return [answer.tokens for answer in running.run([(prompt, request) for prompt in prompts_of(NANBEIGE)[:3]])]


def test_the_skeleton_runs(tmp_path: Path, entry_point: None) -> None:
    """Bug: the page told a way that was gone. A looped Llama without Nanbeige's variants is Nanbeige under another name, so
    the same weights give the same tokens."""
    model = tmp_path / "model"
    shutil.copytree(NANBEIGE, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "looped_llama", "architectures": ["LoopedLlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    assert answers(model) == answers(NANBEIGE)


def test_an_entry_point_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another package does wrong is one line that names its entry point, and nothing is kept of it."""
    point = EntryPoint("broken", "no_such_package.models:FAMILY", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    registry.families.cache_clear()
    with pytest.raises(ModelError, match=r"entry point 'broken' .*no_such_package"):
        registry.families()
    monkeypatch.undo()
    assert "ouro" in [family.name for family in registry.families()]
