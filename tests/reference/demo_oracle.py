"""What the shipped demo models say to ten prompts, by the batch-1 references. ``python tests/reference/demo_oracle.py NAME``
writes it to tests/data/NAME_oracle.json; run it after the model was trained anew, and read the diff.

Knows nothing of the engine. An answer ends before a token whose two best logits are nearly tied, which another order
of additions may turn; the layout that the model was trained for has none, or the script fails.
"""

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
STOP = (0, 2)
MAX_TOKENS = 12
SAFE_MARGIN = 2e-3  # logits; ten times what the engine's tests call a near tie

# depth_indexed must agree with last_exited wherever it can run: no token leaves a hole that another one reads
LAYOUTS = ("last_exited", "first_then_shared", "single")


class Setting(NamedTuple):
    """How decode tokens leave the loop."""

    gate: str
    threshold: float
    min_loops: int
    max_loops: int

    @property
    def label(self) -> str:
        return f"{self.gate} {self.threshold:g}" if self.may_exit_early else f"{self.gate} {self.max_loops}"

    @property
    def may_exit_early(self) -> bool:
        return self.gate not in ("none", "fixed")


class Shipped(NamedTuple):
    """A model in the package and what is asked of it."""

    name: str
    reference: str  # module
    r_max: int
    thresholds: tuple[float, float]  # for each gate of the model's own; several depths at the second
    of_heads: tuple[float, float]  # likewise for trained ones
    min_loops: int  # under these

    @property
    def directory(self) -> Path:
        return ROOT / "training" / "demo" / self.name

    @property
    def data(self) -> Path:
        return ROOT / "tests" / "data" / f"{self.name}_oracle.json"

    def settings(self) -> list[Setting]:
        """Those that the model can run: a trained gate is its file."""
        trained = [gate for gate in ("lookahead", "preloop") if (self.directory / f"{gate}_gate.safetensors").exists()]
        own = [Setting(gate, t, 2, self.r_max) for gate in ("own", "delayed") for t in self.thresholds]
        heads = [Setting(gate, t, self.min_loops, self.r_max) for gate in trained for t in self.of_heads]
        return [Setting("none", 1.0, 1, self.r_max), Setting("fixed", 1.0, 2, 2), *own, *heads]

    def weights_digest(self) -> str:
        """SHA-256 of the model's weights and of its trained gates, in the order of their names."""
        digest = hashlib.sha256()
        for path in sorted(self.directory.glob("*.safetensors")):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()


MODELS = {
    model.name: model
    for model in (
        Shipped("demo", "reference.ouro", 4, (0.7, 0.97), (0.7, 0.97), 2),
        Shipped("demo-huginn", "reference.huginn", 16, (0.5, 0.1), (0.9, 0.999), 1),
    )
}


def prompts() -> list[str]:
    """One held-out prompt a class, the README's, a chat, and one that no training text resembles."""
    from depthbatch.training.data import heldout
    from depthbatch.training.demo_tokenizer import chat_text

    texts = [example.prompt for example in heldout(0, 6)]
    return [*texts, "12+30=", "say kq7x=", chat_text([], "347,348,"), "The engine runs: "]


def answer(model: Shipped, ids: list[int], layout: str, setting: Setting) -> dict[str, list[int]]:
    """Tokens up to and with the end marker or up to a near tie, and their depths. SystemExit on a tie that must not be."""
    result = importlib.import_module(model.reference).generate(
        model.directory,
        ids,
        MAX_TOKENS,
        layout,
        gate=setting.gate,
        threshold=setting.threshold,
        min_loops=setting.min_loops,
        max_loops=setting.max_loops,
    )
    ends = [i + 1 for i, token in enumerate(result.tokens) if token in STOP]
    count = min([*ends, MAX_TOKENS])
    for index, logits in enumerate(result.logits[:count]):
        best, second = logits.topk(2).values.tolist()
        if best - second < SAFE_MARGIN:
            if layout == LAYOUTS[0]:
                raise SystemExit(f"{setting.label}, {ids}: logits {best - second} apart, choose another prompt")
            count = index
            break
    return {"tokens": result.tokens[:count], "depths": result.depths[:count]}


def main(model: Shipped) -> None:
    import torch

    from depthbatch.training.demo_tokenizer import build_tokenizer

    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    data: dict[str, Any] = {"weights": model.weights_digest(), "prompts": [], "answers": {}}
    for text in prompts():
        data["prompts"].append({"text": text, "ids": tokenizer.encode(text).ids})
    for layout in LAYOUTS:
        data["answers"][layout] = {
            setting.label: [answer(model, prompt["ids"], layout, setting) for prompt in data["prompts"]]
            for setting in model.settings()
        }
    lines = json.dumps(data, indent=1)
    model.data.write_text(lines + "\n")
    for prompt, full in zip(data["prompts"], data["answers"]["last_exited"][f"none {model.r_max}"], strict=True):
        print(repr(prompt["text"]), "->", repr(tokenizer.decode(full["tokens"])))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main(MODELS[sys.argv[1]])
