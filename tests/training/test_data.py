"""The generated task: deterministic, disjoint splits, answers that follow from their prompts."""

import random
from pathlib import Path

import pytest

from depthbatch.training import data
from depthbatch.training.batches import IGNORED, step_batches
from depthbatch.training.data import (
    CHAIN_LENGTH,
    CLASSES,
    Example,
    draw,
    draw_training,
    heldout,
    is_heldout,
    partial_answer,
)
from depthbatch.training.demo_tokenizer import IM_END, build_tokenizer

SONNET_LINES = [
    pair
    for sonnet in Path(data.__file__).with_name("sonnets.txt").read_text(encoding="utf-8").split("\n\n")
    for pair in zip(sonnet.split("\n"), sonnet.split("\n")[1:], strict=False)
]
"""Every line of verse with the one before it."""


def solve(prompt: str, difficulty: str) -> str:
    """An independent solver of the task, from the prompt's text alone."""
    if difficulty == "english":
        before, known = prompt.split("\n")
        (line,) = {line for previous, line in SONNET_LINES if previous == before and line.startswith(known)}
        return line.removeprefix(known)
    if difficulty == "copy":
        return prompt.removeprefix("say ").removesuffix("=")
    if difficulty == "count":
        last = int(prompt.split(",")[1])
        return f"{last + 1},{last + 2}"
    if difficulty == "add":
        left, right = prompt.removesuffix("=").split("+")
        return str(int(left) + int(right))
    listed, asked = prompt.removesuffix("=").split(" ?")
    points = {pair[0]: pair[1] for pair in listed.split()}
    answers = []
    for name in asked:
        value = name
        while value in points:
            value = points[value]
        answers.append(name + value)
    return " ".join(answers)


def kind_of(question: str) -> str:
    """The class of a training question, from its text alone; hops of every depth are `hop`."""
    for mark, kind in (("\n", "english"), ("say ", "copy"), ("+", "add"), ("?", "hop")):
        if mark in question:
            return kind
    return "count"


def lookups(prompt: str) -> list[int]:
    """Look-ups each asked name of a hop prompt needs."""
    listed, asked = prompt.removesuffix("=").split(" ?")
    points = {pair[0]: pair[1] for pair in listed.split()}
    counts = []
    for name in asked:
        count, value = 0, name
        while value in points:
            count, value = count + 1, points[value]
        counts.append(count)
    return counts


def test_heldout_is_a_function_of_its_seed() -> None:
    assert heldout(3, 60) == heldout(3, 60)
    assert heldout(3, 60)[:20] == heldout(3, 20)
    assert heldout(3, 60) != heldout(4, 60)


def test_heldout_covers_every_class_and_answers_are_right() -> None:
    examples = heldout(0, 50 * len(CLASSES))
    assert {name: sum(e.difficulty == name for e in examples) for name in CLASSES} == dict.fromkeys(CLASSES, 50)
    for example in examples:
        assert example.answer == solve(example.prompt, example.difficulty), example


def test_hop_class_is_the_number_of_lookups() -> None:
    for example in heldout(1, 300):
        if example.difficulty.startswith("hop"):
            assert lookups(example.prompt) == [int(example.difficulty[3:])] * 2, example


def test_pointers_stand_before_what_they_point_at() -> None:
    """Otherwise a definition could be resolved while the prompt is read, and hops would cost no loops."""
    for example in heldout(2, 120):
        if example.difficulty.startswith("hop"):
            pairs = example.prompt.split(" ?")[0].split()
            place = {pair[0]: i for i, pair in enumerate(pairs)}
            assert all(place[pair[1]] > i for i, pair in enumerate(pairs) if pair[1] in place), example


def test_training_never_draws_a_heldout_prompt() -> None:
    """The small classes would collide within a few hundred draws if the split were not by prompt."""
    rng = random.Random(0)
    trained = {draw_training(rng).prompt for _ in range(4000)}
    held = {example.prompt for seed in range(3) for example in heldout(seed, 600)}
    assert not trained & held
    assert all(is_heldout(prompt) for prompt in held)


def test_a_heldout_line_of_verse_is_held_out_wherever_it_is_cut() -> None:
    """Were the cut part of the split, training would see the rest of a held-out line under another cut."""
    rng = random.Random(3)
    held = {draw(rng, "english", heldout_split=True).prompt.split("\n")[0] for _ in range(400)}
    trained = {draw(rng, "english").prompt.split("\n")[0] for _ in range(4000)}
    assert len(held) > 50
    assert not held & trained


def test_english_is_a_part_of_training_and_not_of_the_exam() -> None:
    rng = random.Random(4)
    drawn = [draw_training(rng).difficulty for _ in range(2000)]
    assert 50 <= drawn.count("english") <= 150  # 1 in 21
    assert "english" not in CLASSES


def test_training_answers_are_right() -> None:
    rng = random.Random(1)
    for _ in range(500):
        example = draw_training(rng)
        assert example.answer == solve(example.prompt, example.difficulty), example


def test_partial_answers_follow_one_pointer_a_lookup() -> None:
    example = Example("eq qm m4 av fs vc c0 sb b9 ?em=", "e4 m4", "hop-mixed")
    assert [partial_answer(example, n) for n in (1, 2, 3)] == ["eq m4", "em m4", "e4 m4"]
    rng = random.Random(2)
    for _ in range(200):
        example = draw_training(rng)
        assert partial_answer(example, CHAIN_LENGTH) == example.answer, example


def test_unknown_class_is_named() -> None:
    with pytest.raises(ValueError, match="hop9"):
        draw(random.Random(0), "hop9")


def test_batches_supervise_exactly_the_answer_and_its_end() -> None:
    """Every supervised run of targets decodes to the solver's answer for the prompt before it."""
    tokenizer = build_tokenizer()
    seen = 0
    for batch in step_batches(tokenizer, 0, 5, 48):
        for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
            places = [i for i, target in enumerate(targets) if target != IGNORED]
            assert places == list(range(places[0], places[-1] + 1))
            assert targets[places[-1]] == IM_END
            prompt = tokenizer.decode(ids[: places[0] + 1], skip_special_tokens=False)
            question = prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
            assert tokenizer.decode(targets[places[0] : places[-1]]) == solve(question, kind_of(question))
            seen += 1
    assert seen == 48


def test_batches_depend_on_seed_and_step_alone() -> None:
    tokenizer = build_tokenizer()
    first, again = (step_batches(tokenizer, 7, 3, 16) for _ in range(2))
    assert all((a.ids.equal(b.ids) and a.targets.equal(b.targets)) for a, b in zip(first, again, strict=True))
    other = step_batches(tokenizer, 7, 4, 16)
    assert any(a.ids.shape != b.ids.shape or not a.ids.equal(b.ids) for a, b in zip(first, other, strict=True))
