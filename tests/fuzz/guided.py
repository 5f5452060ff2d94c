"""``python tests/fuzz/guided.py TARGET [-runs=N] [CORPUS]``: inputs bred by what code they reach (atheris, libFuzzer underneath).

TARGET is messages, verbs, configuration or http. Needs the package ``atheris``; every option of libFuzzer may be given. Inputs come from the same
samples and damages as in ``test_fuzz.py``, and from libFuzzer's own mutations. The first that a target does not expect is printed and
kept, and ends the run.
"""

import random
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["depthbatch"]):
    from fakes.fuzz_targets import TARGETS

OWN_DAMAGE = 0.6  # share of inputs; the rest are libFuzzer's
SAMPLES = 0.3  # share of those that begin with a sample, since what native code does with an input is not seen


def main(argv: list[str]) -> None:
    if len(argv) < 2 or argv[1] not in TARGETS:
        sys.exit(f"usage: guided.py {'|'.join(TARGETS)} [-runs=N] [CORPUS]")
    target = TARGETS[argv[1]]()
    samples = target.samples()

    def mutate(data: bytes, most_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < OWN_DAMAGE:
            return target.damaged(rng.choice(samples) if rng.random() < SAMPLES else data, rng)[:most_bytes]
        return bytes(atheris.Mutate(data, most_bytes))

    with tempfile.TemporaryDirectory() as directory:
        for number, sample in enumerate(samples):
            (Path(directory) / f"{number}").write_bytes(sample)
        atheris.Setup([argv[0], *argv[2:], directory], target, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
