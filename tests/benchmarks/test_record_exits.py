"""``record-exits``: depths that a gate chose, on the real CPU device, come back in the file and can be replayed."""

import json
from pathlib import Path

import pytest

from depthbatch.benchmarks.record_exits import add_record_exits_arguments, run_record_exits
from depthbatch.benchmarks.workload import Workload
from depthbatch.common.errors import ConfigError
from depthbatch.deploy.cli.main import OneLineParser
from depthbatch.frontend.llm import LLM
from depthbatch.frontend.params import SamplingParams

MODEL = str(Path(__file__).resolve().parent.parent / "data" / "fidelity" / "ouro-tiny")
REQUESTS = [{"prompt_tokens": [5, 6, 7, 8], "output_tokens": 6}, {"prompt_tokens": 9, "output_tokens": 1}]


def record(tmp_path: Path, *options: str, model: str = MODEL, requests: list[dict] = REQUESTS) -> Workload:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"requests": requests}))
    parser = OneLineParser()
    add_record_exits_arguments(parser)
    common = ["--dtype", "float32", "--threads", "1", "--kv-blocks", "32", "--max-num-seqs", "4"]
    assert run_record_exits(parser.parse_args([model, str(path), *common, *options])) == 0
    return Workload.read(path)


def test_depths_are_those_the_gate_chose(tmp_path: Path) -> None:
    """One depth a decode token. A threshold of 0 lets every token go as soon as the delayed gate can, at loop 2 of 4: a
    recorder that wrote full depth, or counted the first token, would fail."""
    early = record(tmp_path, "--gate", "delayed", "--exit-threshold", "0")
    assert [r.exit_depths for r in early.requests] == [(2,) * 5, ()]
    assert early.requests[0].prompt_ids == (5, 6, 7, 8)


def test_engines_without_exits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gate none"):
        record(tmp_path, "--gate", "none")
    with pytest.raises(ConfigError, match="policy cb"):
        record(tmp_path, "--policy", "cb")


def test_known_depths_are_those_of_readouts(tmp_path: Path) -> None:
    """From the loop on that the file names, and not one loop before, a readout of a token says what the token says at its
    exit: asked of the engine itself by requests that let this one token go there."""
    prompts = [[21, 22, 25, 14, 21, 22, 26, 14], [19, 20, 13, 21, 18, 31], [18, 21, 13, 22, 31]]
    requests = [{"prompt_tokens": prompt, "output_tokens": 9} for prompt in prompts]
    recorded = record(tmp_path, "--drafts", "--exit-threshold", "0.9999", model="demo", requests=requests)
    with LLM("demo", quiet=True, dtype="float32", threads=1, kv_blocks=200) as llm:
        replay = {"temperature": 0.0, "ignore_eos": True}
        whole = [SamplingParams(max_tokens=9, exit_depths=r.exit_depths, **replay) for r in recorded.requests]
        outputs = [output.token_ids for output in llm.generate(prompts, whole)]
        asked, wanted = [], []
        for number, request in enumerate(recorded.requests):
            for token, last in enumerate((request.exit_depths or ())[:-1]):
                for depth in range(1, last):
                    exits = (*request.exit_depths[:token], depth)
                    asked.append((prompts[number], SamplingParams(max_tokens=token + 2, exit_depths=exits, **replay)))
                    wanted.append((number, token, depth, outputs[number][token + 1]))
        answers = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    known = [list(request.exit_depths) for request in recorded.requests]
    for (number, token, depth, said), answer in reversed(list(zip(wanted, answers, strict=True))):
        if answer.token_ids[-1] == said and known[number][token] == depth + 1:
            known[number][token] = depth
    assert [list(request.known_depths[:-1]) for request in recorded.requests] == [own[:-1] for own in known]
    assert len({depth for own in known for depth in own}) >= 3  # else a constant would do


def test_drafts_where_loops_share_a_plane_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--drafts needs"):
        record(tmp_path, "--gate", "delayed", "--kv-layout", "single", "--drafts")
