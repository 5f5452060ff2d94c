"""The demo task: generated text whose answers need a known number of loops.

Every example is a prompt and the exact answer to it. Six classes, from trivial to hard:

======== ==================================== ============ =============================================
class    prompt                               answer       what it takes
======== ==================================== ============ =============================================
copy     ``say kq7x=``                        ``kq7x``     repeat what stands in the prompt
count    ``347,348,``                         ``349,350``  go on counting
add      ``12+30=``                           ``42``       carry, most significant digit first
hop1..3  ``dc cb ba a7 ... ?bd=``             ``b7 d7``    follow pointers: ``ba`` says b points at a,
                                                           ``a7`` that a is 7; k look-ups for class hopk
english  a line of verse and half of the next ``the rest`` English as it comes; trained on, but not asked in
                                                           the held-out exam: it has no single right answer
======== ==================================== ============ =============================================

In a hop prompt a pointer stands before the definition it points at, so nothing to the left of a
definition resolves it and the look-ups of a query come one after the other. All hop classes draw from
the same prompts (three chains of three names) and differ only in which names are asked for.

Held-out prompts are those whose CRC-32 falls in one residue class (for verse, that of the line before);
training never draws them, whatever the seed. Nothing is downloaded: the verse is Shakespeare's sonnets, which are in
the public domain, in ``sonnets.txt``.
"""

import random
import string
import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

CHAINS = 3
CHAIN_LENGTH = 3
HELDOUT_SHARE = 16
HELDOUT_FORM_SHARE = 0.4
# Sums are short and slow to learn, so they are drawn most.
TRAINING_WEIGHTS = {"copy": 2, "count": 2, "add": 7, "hop1": 3, "hop2": 3, "hop3": 3, "english": 1}
CLASSES = tuple(name for name in TRAINING_WEIGHTS if name != "english")
"""The classes of the held-out exam, whose answers are exactly right or wrong."""


class Example(NamedTuple):
    """One question: the prompt text, the exact answer text, and its difficulty class."""

    prompt: str
    answer: str
    difficulty: str


def is_heldout(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split; depends on its text alone, on the first line of it if it has two."""
    return zlib.crc32(prompt.split("\n")[0].encode()) % HELDOUT_SHARE == 0


def _copy(rng: random.Random) -> tuple[str, str]:
    word = "".join(rng.choices(string.ascii_lowercase + string.digits, k=rng.randint(2, 8)))
    return f"say {word}=", word


def _count(rng: random.Random) -> tuple[str, str]:
    start = rng.randint(0, rng.choice((9, 95, 995)))
    return f"{start},{start + 1},", f"{start + 2},{start + 3}"


def _add(rng: random.Random) -> tuple[str, str]:
    left, right = (rng.randint(0, rng.choice((9, 99, 99))) for _ in range(2))
    return f"{left}+{right}=", str(left + right)


@cache
def _sonnets() -> list[list[str]]:
    """The lines of every sonnet."""
    text = Path(__file__).with_name("sonnets.txt").read_text(encoding="utf-8")
    return [sonnet.split("\n") for sonnet in text.strip().split("\n\n")]


def _english(rng: random.Random) -> tuple[str, str]:
    sonnet = rng.choice(_sonnets())
    line = rng.randrange(1, len(sonnet))
    words = sonnet[line].split(" ")
    known = rng.randrange(1, len(words))
    return f"{sonnet[line - 1]}\n{' '.join(words[:known])}", " " + " ".join(words[known:])


class _Pointers(NamedTuple):
    """A pointer list and its solution: each chain's names, farthest from the digit first, and its digit."""

    text: str
    chains: list[list[str]]
    digits: list[str]


def _pointers(rng: random.Random, chains: int, length: int) -> _Pointers:
    """A random interleaving of pointer chains, each in dependency order."""
    names = rng.sample(string.ascii_lowercase, chains * length)
    digits = rng.sample(string.digits, chains)
    members = [names[i * length : (i + 1) * length] for i in range(chains)]
    order = [chain for chain in range(chains) for _ in range(length)]
    rng.shuffle(order)
    placed = [0] * chains
    pairs = []
    for chain in order:
        position = placed[chain]
        target = members[chain][position + 1] if position + 1 < length else digits[chain]
        pairs.append(members[chain][position] + target)
        placed[chain] += 1
    return _Pointers(" ".join(pairs), members, digits)


def _ask(pointers: _Pointers, asked: list[tuple[int, int]]) -> tuple[str, str]:
    """Prompt and answer for the names at (chain, look-ups from the digit)."""
    names = [pointers.chains[chain][-lookups] for chain, lookups in asked]
    answer = " ".join(name + pointers.digits[chain] for name, (chain, _) in zip(names, asked, strict=True))
    return f"{pointers.text} ?{''.join(names)}=", answer


def partial_answer(example: Example, lookups: int) -> str:
    """The answer as it stands after so many look-ups: a name still unresolved shows what it points at so far.

    The answer itself for classes without look-ups, and for a hop class once ``lookups`` reach its depth.
    """
    if not example.difficulty.startswith("hop"):
        return example.answer
    points = {pair[0]: pair[1] for pair in example.prompt.split(" ?")[0].split()}
    parts = []
    for part in example.answer.split():
        value = part[0]
        for _ in range(lookups):
            value = points.get(value, value)
        parts.append(part[0] + value)
    return " ".join(parts)


def _hop(rng: random.Random, lookups: int) -> tuple[str, str]:
    pointers = _pointers(rng, CHAINS, CHAIN_LENGTH)
    return _ask(pointers, [(chain, lookups) for chain in rng.sample(range(CHAINS), 2)])


def _hop_mixed(rng: random.Random) -> tuple[str, str]:
    """Two to four chains of one to three names, up to six of them asked for, of any depth.

    More supervised values a token than a held-out prompt, and short chains to learn a look-up on first.
    """
    chains, length = rng.choice((2, 3, 4)), rng.randint(1, CHAIN_LENGTH)
    pointers = _pointers(rng, chains, length)
    every = [(chain, lookups) for chain in range(chains) for lookups in range(1, length + 1)]
    return _ask(pointers, rng.sample(every, min(6, len(every))))


def draw(rng: random.Random, difficulty: str, heldout_split: bool = False) -> Example:
    """Draw one example of a class from the training split, or from the held-out split.

    Raises ValueError: ``difficulty`` is not in ``TRAINING_WEIGHTS``.
    """
    if difficulty not in TRAINING_WEIGHTS:
        raise ValueError(f"unknown difficulty class {difficulty!r}; known: {', '.join(TRAINING_WEIGHTS)}")
    simple = {"copy": _copy, "count": _count, "add": _add, "english": _english}
    while True:
        if difficulty in simple:
            prompt, answer = simple[difficulty](rng)
        else:
            prompt, answer = _hop(rng, int(difficulty[3:]))
        if is_heldout(prompt) == heldout_split:
            return Example(prompt, answer, difficulty)


def heldout(seed: int, n: int) -> list[Example]:
    """``n`` held-out examples, the classes in turn, so each has n / 6 of them.

    The same (seed, n) gives the same list, and a longer list starts with the shorter one. The small
    classes (count: about 1,000 prompts in all) may repeat a prompt.
    """
    rng = random.Random(f"heldout-{seed}")
    return [draw(rng, CLASSES[i % len(CLASSES)], heldout_split=True) for i in range(n)]


def draw_training(rng: random.Random) -> Example:
    """One training example, classes by ``TRAINING_WEIGHTS``, never a held-out prompt.

    Most hop examples are smaller or denser than the held-out ones; their class is ``hop-mixed``.
    """
    difficulty = rng.choices(list(TRAINING_WEIGHTS), weights=list(TRAINING_WEIGHTS.values()))[0]
    if not difficulty.startswith("hop") or rng.random() < HELDOUT_FORM_SHARE:
        return draw(rng, difficulty)
    while True:
        prompt, answer = _hop_mixed(rng)
        if not is_heldout(prompt):
            return Example(prompt, answer, "hop-mixed")
