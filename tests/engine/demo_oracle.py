"""What the shipped demo model says to ten prompts, by the batch-1 reference. ``python tests/engine/demo_oracle.py``
writes it to tests/data/demo_oracle.json; run it after the demo model was trained anew, and read the diff.

Knows nothing of the engine. An answer ends before a token whose two best logits are nearly tied, which another order
of additions may turn; the layout that the model was trained for has none, or the script fails.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "tests" / "data" / "demo_oracle.json"
MODEL = ROOT / "worker" / "demo" / "demo"
STOP = (0, 2)
MAX_TOKENS = 12
R_MAX = 4
THRESHOLDS = (0.7, 0.97)  # for each gate of the shipped model, several depths at the higher one
SAFE_MARGIN = 2e-3  # logits; ten times what the engine's tests call a near tie
# depth_indexed must agree with last_exited wherever it can run: no token leaves a hole that another one reads
LAYOUTS = ("last_exited", "first_then_shared", "single")


class Setting(NamedTuple):
    """How decode tokens leave the loop."""

    gate: str
    threshold: float = 1.0
    min_loops: int = 1
    max_loops: int = R_MAX

    @property
    def label(self) -> str:
        return f"{self.gate} {self.threshold:g}" if self.may_exit_early else f"{self.gate} {self.max_loops}"

    @property
    def may_exit_early(self) -> bool:
        return self.gate not in ("none", "fixed")


def settings() -> list[Setting]:
    """Those that the shipped model can run: a trained gate is its file."""
    trained = [gate for gate in ("lookahead", "preloop") if (MODEL / f"{gate}_gate.safetensors").exists()]
    gated = [Setting(gate, threshold, 2) for gate in ("own", "delayed", *trained) for threshold in THRESHOLDS]
    return [Setting("none"), Setting("fixed", 1.0, 2, 2), *gated]


def weights_digest() -> str:
    """SHA-256 of the model's weights and of its trained gates, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(MODEL.glob("*.safetensors")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def prompts() -> list[str]:
    """One held-out prompt a class, the README's, a chat, and one that no training text resembles."""
    from depthbatch.worker.training.data import heldout
    from depthbatch.worker.training.tokenizer import chat_text

    texts = [example.prompt for example in heldout(0, 6)]
    return [*texts, "12+30=", "say kq7x=", chat_text([], "347,348,"), "The engine says: "]


def answer(ids: list[int], layout: str, setting: Setting) -> dict[str, list[int]]:
    """Tokens up to and with the end marker or up to a near tie, and their depths. SystemExit on a tie that must not be."""
    from reference import ouro

    result = ouro.generate(
        MODEL,
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


def main() -> None:
    import torch
    from depthbatch.worker.training.tokenizer import build_tokenizer

    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    data: dict[str, Any] = {"weights": weights_digest(), "prompts": [], "answers": {}}
    for text in prompts():
        data["prompts"].append({"text": text, "ids": tokenizer.encode(text).ids})
    for layout in LAYOUTS:
        data["answers"][layout] = {
            setting.label: [answer(prompt["ids"], layout, setting) for prompt in data["prompts"]]
            for setting in settings()
        }
    lines = json.dumps(data, indent=1)
    DATA.write_text(lines + "\n")
    for prompt, full in zip(data["prompts"], data["answers"]["last_exited"]["none 4"], strict=True):
        print(repr(prompt["text"]), "->", repr(tokenizer.decode(full["tokens"])))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
