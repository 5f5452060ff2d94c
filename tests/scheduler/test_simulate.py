"""The simulator: times that can be worked out by hand, the definitions of its keys, and the workload file."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.benchmarks.simulate import Run, add_simulate_arguments, report, run_policy, run_simulate
from depthbatch.benchmarks.virtual_drafts import parse_acceptance, with_known_depths
from depthbatch.benchmarks.workload import Window, Workload, WorkloadRequest
from depthbatch.common.errors import ConfigError
from depthbatch.worker.device_profile import DeviceProfile
from depthbatch.worker.simulated import find_profile

OURO = find_profile("h100-ouro-1.4b")
KEYS = [
    *("policy", "w", "k", "tokens_per_s", "cb_tokens_per_s", "relative_to_cb", "s_dec", "s_e2e", "realized"),
    *(
        "prefill_share",
        "stage_share",
        "idle_share",
        "mean_depth",
        "mean_batch",
        "stage_steps",
        "scheduler_us_per_stage",
    ),
    *("requests_finished", "preemptions", "duration_s", "acceptance", "draft_lanes_mean"),
]


def run(
    workload: Workload,
    policy: str = "refill",
    width: int = 4,
    mode: str = "off",
    profile: DeviceProfile = OURO,
    **options: Any,
) -> Run:
    return run_policy(profile, workload, width, policy=policy, async_scheduling=mode, preemption="recompute", **options)


@pytest.mark.parametrize("mode", ["off", "async", "lookahead"])
@pytest.mark.parametrize("policy", ["cb", "no-refill", "refill"])
def test_one_request_takes_the_sum_of_its_stages(policy: str, mode: str) -> None:
    """Prompt 100, two output tokens, depth 2: prefill, prelude, core steps reading 101 context tokens, coda. Nothing
    may wait, and cb must run all four loops."""
    one = run(Workload((WorkloadRequest(100, 2, exit_depths=(2,)),)), policy, mode=mode)
    loops = 4 if policy == "cb" else 2
    core_ms = 5.4 + 0.027 + 9.0e-5 * 101
    expected_ms = (6.0 + 1.92) + (0.05 + 0.0005) + loops * core_ms + (0.35 + 0.002)
    assert one.duration_s == pytest.approx(1e-3 * expected_ms, rel=1e-12)
    assert (one.tokens, one.finished, one.mean_depth) == (2, 1, loops)


def test_arrival_times_are_honoured() -> None:
    """A request that comes after the first is done: the device idles in between, and the clock says so."""
    requests = (WorkloadRequest(100, 2, arrival_s=5.0), WorkloadRequest(100, 2, arrival_s=1.0))
    late = run(Workload(requests))
    alone = run(Workload(requests[1:]))
    assert late.duration_s == pytest.approx(4.0 + alone.duration_s)
    line = report(late, late, OURO, Workload(requests)).as_json()
    assert line["idle_share"] == pytest.approx(1.0 - 2 * alone.duration_s / late.duration_s)


@pytest.mark.parametrize("known", [1, 2])
def test_drafts_take_the_time_of_their_stages(known: int) -> None:
    """Prompt 100, three output tokens at full depth, one draft lane, read after one loop. A right draft runs one loop behind
    its head: 5 core steps, a coda more. A wrong one is dropped when the head's token is known, and its position runs anew."""
    one = run(Workload((WorkloadRequest(100, 3, known_depths=(known, 4)),)), speculation=1, draft_depth=1)
    right = known == 1
    cores, core_rows, preludes = (5, 8, 2) if right else (8, 11, 3)
    context = 4 * 101 + (4 if right else 7) * 102
    core_ms = 5.4 * cores + 0.027 * core_rows + 9.0e-5 * context
    expected_ms = (6.0 + 1.92) + preludes * (0.05 + 0.0005) + core_ms + 3 * (0.35 + 0.002)
    assert one.duration_s == pytest.approx(1e-3 * expected_ms, rel=1e-12)
    line = report(one, one, OURO, Workload((WorkloadRequest(100, 3),))).as_json()
    assert (line["acceptance"], line["mean_depth"], one.tokens) == (float(right), 4.0, 3)
    assert line["draft_lanes_mean"] == pytest.approx(3 / 5 if right else 3 / 8)


def test_drafts_are_right_as_often_as_asked() -> None:
    """Shares by depth come out as they went in, and a draft that a shallow read knows a deeper one knows, too."""
    many = Workload(tuple(WorkloadRequest(4, 501) for _ in range(40)))
    drawn = with_known_depths(many, parse_acceptance('{"1": 0.5, "3": 0.8}'), 4)
    known = np.concatenate([request.known_depths for request in drawn.requests])
    assert known.size == 20_000 and set(known) == {1, 3, 4}
    assert [float((known <= depth).mean()) for depth in (1, 2, 3)] == pytest.approx([0.5, 0.5, 0.8], abs=0.01)
    done = run(drawn, speculation=2, draft_depth=3)
    assert report(done, done, OURO, drawn).acceptance == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    "text", ["1.5", "-0.1", '{"1": 0.9, "2": 0.8}', '{"0": 0.5}', "{}", "much", "[]", '{"1": null}']
)
def test_bad_acceptance(text: str) -> None:
    with pytest.raises(ConfigError, match="draft acceptance"):
        parse_acceptance(text)


def test_which_drafts_are_right_must_be_known() -> None:
    """A workload that does not say it, and no share given: a figure would be made up."""
    with pytest.raises(ConfigError, match="known_depths"):
        run(Workload((WorkloadRequest(100, 3),)), speculation=1)


def test_report_follows_the_definitions() -> None:
    """S_dec and S_e2e from a hand-made run; every key of names.md is there."""
    workload = Workload(tuple(WorkloadRequest(50, 20, exit_depths=(2,) * 19) for _ in range(8)))
    cb, refill = run(workload, "cb"), run(workload)
    line = report(refill, cb, OURO, workload).as_json()
    assert set(KEYS) <= set(line) and line["mean_depth"] == 2.0
    s_dec = (2.0e8 + 4 * 2.47e9) / (2.0e8 + 2 * 2.47e9)
    a = cb.busy_s["prefill"] / sum(cb.busy_s.values())
    s_e2e = 1 / (a + (1 - a) / s_dec)
    assert line["s_dec"] == pytest.approx(s_dec) and line["s_e2e"] == pytest.approx(s_e2e)
    assert line["realized"] == pytest.approx(refill.tokens_per_s / cb.tokens_per_s / s_e2e)
    assert report(cb, cb, OURO, workload).relative_to_cb == 1.0


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 12), st.lists(st.integers(1, 4), max_size=12)),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from(["cb", "no-refill", "refill", "speculation"]),
    st.integers(1, 6),
)
def test_no_schedule_beats_the_bound(shapes: list, policy: str, width: int) -> None:
    """The hardware bound is one: whatever the workload, no policy is faster; every token is accounted for."""
    workload = Workload(tuple(WorkloadRequest(p, o, exit_depths=tuple(d)) for p, o, d in shapes))
    if policy == "speculation":
        done = run(with_known_depths(workload, {1: 0.8}, 4), "refill", width, speculation=3)
    else:
        done = run(workload, policy, width)
    assert done.finished == len(shapes) and done.tokens == sum(o for _, o, _ in shapes)
    assert report(done, done, OURO, workload).of_bound <= 1.0 + 1e-9


def test_refill_comes_near_the_estimated_maximum_on_ouro() -> None:
    """The paper's result in virtual time: on Ouro refill realizes above 95 % of S_e2e and beats no-refill. Long enough
    that filling and emptying the engine does not count."""
    depths = (2, 3, 2, 3, 4, 2, 3) * 20
    workload = Workload(tuple(WorkloadRequest(40, 100 + i % 41, exit_depths=depths[i % 7 :][:140]) for i in range(320)))
    cb, plain, refill = (run(workload, policy, 32) for policy in ("cb", "no-refill", "refill"))
    lines = [report(r, cb, OURO, workload).as_json() for r in (plain, refill)]
    assert lines[1]["realized"] > 0.95 and lines[0]["realized"] < lines[1]["realized"] - 0.05


def test_command_prints_one_object_or_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several policies give a list with cb first, one gives an object; --output writes the same to a file."""
    file = tmp_path / "w.json"
    Workload((WorkloadRequest(20, 4, exit_depths=(2, 3, 4)),) * 6).write(file)
    parser = argparse.ArgumentParser()
    add_simulate_arguments(parser)
    base = ["--profile", "h100-ouro-1.4b", "--workload", str(file), "--w", "4"]
    assert run_simulate(parser.parse_args([*base, "--policy", "refill", "--policy", "no-refill"])) == 0
    assert [line["policy"] for line in json.loads(capsys.readouterr().out)] == ["cb", "refill", "no-refill"]
    assert run_simulate(parser.parse_args([*base, "--policy", "refill", "--output", str(tmp_path / "o.json")])) == 0
    assert json.loads((tmp_path / "o.json").read_text())["policy"] == "refill" and not capsys.readouterr().out
    assert run_simulate(parser.parse_args([*base, "--policy", "refill:3", "--policy", "refill:1"])) == 0
    assert [line["k"] for line in json.loads(capsys.readouterr().out)][1:] == [3, 1]
    drafts = ["--policy", "refill", "--speculation", "2", "--acceptance", "1"]
    assert run_simulate(parser.parse_args([*base, *drafts])) == 0
    assert json.loads(capsys.readouterr().out)["acceptance"] == 1.0
    with pytest.raises(ConfigError, match="--draft-acceptance needs --speculation"):
        run_simulate(parser.parse_args([*base, *drafts[:2], *drafts[4:]]))
    with pytest.raises(ConfigError, match="W must be between 1 and 65535, not 65536"):
        parser.parse_args([*base[:4], "--w", "65536"])
    with pytest.raises(ConfigError, match="request 0 cannot be served"):
        run_simulate(parser.parse_args([*base, "--kv-blocks", "2"]))


def test_workload_file_round_trip(tmp_path: Path) -> None:
    """What is written is read back the same, ids and missing fields included."""
    workload = Workload(
        (
            WorkloadRequest(3, 4, prompt_ids=(5, 6, 7), exit_depths=(1, 2), known_depths=(1, 4, 2), arrival_s=0.5),
            WorkloadRequest(10, 1),
        )
    )
    workload.write(tmp_path / "w.json")
    assert Workload.read(tmp_path / "w.json") == workload


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "no list 'requests'"),
        ('{"requests": []}', "empty"),
        ('{"requests": [3]}', "request 0 is not an object"),
        ('{"requests": [{"prompt_tokens": 0, "output_tokens": 1}]}', "prompt_tokens"),
        ('{"requests": [{"prompt_tokens": [1, -2], "output_tokens": 1}]}', "prompt_tokens"),
        ('{"requests": [{"prompt_tokens": [], "output_tokens": 1}]}', "prompt_tokens"),
        ('{"requests": [{"prompt_tokens": 4, "output_tokens": true}]}', "output_tokens"),
        ('{"requests": [{"prompt_tokens": 4, "output_tokens": 2, "exit_depths": [0]}]}', "exit_depths"),
        ('{"requests": [{"prompt_tokens": 4, "output_tokens": 2, "exit_depths": "24"}]}', "exit_depths"),
        ('{"requests": [{"prompt_tokens": 4, "output_tokens": 2, "known_depths": [256]}]}', "known_depths"),
        ('{"requests": [{"prompt_tokens": 4, "output_tokens": 4, "known_depths": [2]}]}', "known_depths has 1 entries"),
        ('{"requests": [{"prompt_tokens": 4, "output_tokens": 2, "arrival_s": -1}]}', "arrival_s"),
        ('{"requests": [{"prompt_tokens": 4, "output_tokens": 2, "arrival_s": NaN}]}', "arrival_s"),
        ('{"requests": [{"prompt_tokens": 4, "output_tokens": 2, "depth": 2}]}', "unknown field depth"),
    ],
)
def test_bad_workload_files_are_named(tmp_path: Path, text: str, says: str) -> None:
    """One line with the file and what is wrong in it."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        Workload.read(path)
    assert "bad.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_window_counts_its_tokens_alone() -> None:
    """Ten equal requests one after another at W = 1: of the window's four requests' tokens everything is a multiple of one
    request's, whatever came before; nothing that was still to come has been run."""
    ten = Workload((WorkloadRequest(100, 3, exit_depths=(2, 2)),) * 10)
    one, part = run(Workload(ten.requests[:1]), width=1), run(ten, width=1, window=Window(9, 12))
    assert (part.tokens, part.finished, part.mean_depth) == (12, 4, 2)
    assert part.duration_s == pytest.approx(4 * one.duration_s) and part.start_s == pytest.approx(3 * one.duration_s)
    assert part.steps == {stage: 4 * count for stage, count in one.steps.items()}
    assert part.prompt_tokens == 400 and len(part.first_token_s) == 4
    with pytest.raises(ConfigError, match="ends before a window of 30 tokens after 9"):
        run(ten, width=1, window=Window(9, 30))


def test_launch_time_is_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_simulate_arguments(parser)
    options = ["--workload", "alpaca", "--requests", "4", "--profile", "h100-ouro-1.4b", "--w", "2"]
    for bad in ("-1", "nan", "inf"):
        with pytest.raises(ConfigError, match="launch-us must be a time"):
            run_simulate(parser.parse_args([*options, "--launch-us", bad]))
    tokens_per_s = []
    for launch in ("0", "500"):
        assert run_simulate(parser.parse_args([*options, "--launch-us", launch])) == 0
        tokens_per_s.append(json.loads(capsys.readouterr().out)["tokens_per_s"])
    assert tokens_per_s[1] < 0.95 * tokens_per_s[0]
