"""Every reader of files that people write takes one with a byte-order mark, as editors on Windows save them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from depthbatch.benchmarks.sources import import_file
from depthbatch.benchmarks.sweep import read_sweep
from depthbatch.benchmarks.workload import Workload
from depthbatch.common.config import FIELDS
from depthbatch.common.errors import ConfigError
from depthbatch.common.grammar_host import GrammarHost
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.common.options import read_toml
from depthbatch.frontend.prompts import sampling_defaults
from depthbatch.training.corpus import read_rows
from depthbatch.worker.device_profile import read_profile
from depthbatch.worker.models.checkpoint import read_json

ROOT = Path(__file__).parent.parent
PROFILE = next((ROOT / "worker").rglob("h100-ouro-1.4b.json"))
SWEEP = next((ROOT / "benchmarks").rglob("*.toml"))
WORKLOAD = '{"requests": [{"prompt_tokens": 3, "output_tokens": 1, "exit_depths": [], "arrival_s": 0.0}]}'
PAIRS = '[{"instruction": "say a few words", "input": "", "output": "here they are"}]'


def host_reads(path: Path) -> None:
    host = GrammarHost(path, 264, (2,))
    try:
        host.wait_ready()
    finally:
        host.close()


READERS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a device profile": ("p.json", read_profile, PROFILE.read_text()),
    "a sweep": ("s.toml", read_sweep, SWEEP.read_text()),
    "a workload": ("w.json", Workload.read, WORKLOAD),
    "a data set": ("d.json", lambda path: import_file(path, "alpaca"), PAIRS),
    "a configuration": ("c.toml", lambda path: read_toml(path, FIELDS), "seed = 3\n"),
    "a model's configuration": ("config.json", read_json, '{"model_type": "ouro"}'),
    "sampling defaults": ("generation_config.json", lambda p: sampling_defaults(p.parent), '{"temperature": 0.5}'),
    "rows to train on": ("r.jsonl", lambda p: read_rows(p, list, 300, 8, 8), json.dumps({"token_ids": [1, 2]})),
    "the grammar host's tokenizer": (
        "tokenizer.json",
        host_reads,
        (resolve_model_dir("demo") / "tokenizer.json").read_text(),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_is_no_part_of_the_text(name: str, tmp_path: Path) -> None:
    """Bug: of device profiles, training data and the grammar host's tokenizer it was; those of others were taken off."""
    file_name, read, text = READERS[name]
    path = tmp_path / file_name
    path.write_text(text)
    plain = read(path)
    path.write_text("\ufeff" + text)
    assert read(path) == plain


@pytest.mark.parametrize("name", ["a device profile", "a sweep", "a workload", "a configuration"])
def test_bytes_that_are_no_text_are_an_error_of_the_file(name: str, tmp_path: Path) -> None:
    """Bug: a sweep file in another encoding ended with a traceback."""
    file_name, read, _ = READERS[name]
    path = tmp_path / file_name
    path.write_bytes(b"\xff\xfe{\0")
    with pytest.raises(ConfigError, match=file_name):
        read(path)
