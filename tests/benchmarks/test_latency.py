"""``bench latency`` finds the costs that were put in: on made-up sums, and through the real processes on a simulated
device whose profile is known."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthbatch.benchmarks.latency import Point, Sample, add_latency_arguments, fit_linear, fit_steps, run_latency
from depthbatch.deploy.cli.main import OneLineParser
from depthbatch.worker.device_profile import read_profile


@given(
    truth=st.lists(st.floats(1e-6, 1e-2), min_size=3, max_size=3),
    seed=st.integers(0, 999),
)
@settings(max_examples=30, deadline=None)
def test_fit_recovers_sums_of_unequal_runs(truth: list[float], seed: int) -> None:
    """Runs of differing step counts and mixed batches: only a fit over sums gets these right, one over means does not."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(1, 40, 12).astype(float)
    x = np.column_stack([steps, steps * rng.integers(1, 64, 12), steps * rng.integers(100, 9000, 12)])
    fit = fit_linear(x, x @ np.array(truth))
    np.testing.assert_allclose(x @ np.array(fit.coefficients), x @ np.array(truth), rtol=1e-6)
    assert fit.r_squared > 0.999999


def test_fit_has_no_negative_cost() -> None:
    """A slope that comes out below zero from noise would make larger batches free in every simulation after."""
    x = np.array([[1.0, 1.0], [1.0, 64.0], [1.0, 32.0]])
    fit = fit_linear(x, np.array([1.0, 0.9, 1.0]))
    assert fit.coefficients[1] == 0.0 and fit.coefficients[0] > 0.9
    assert fit.r_squared < 0.5


def test_steps_are_linear_in_depth() -> None:
    """tau_0 and tau_r of equation 3, from hand-made samples; a point at one depth only has no fit."""

    def sample(loops: int, context: int = 8) -> Sample:
        seconds = {"prefill": 9.0, "prelude": 0.2, "core": 0.5 * loops, "coda": 0.3}
        ones = dict.fromkeys(("prefill", "prelude", "core", "coda"), 1.0)
        return Sample(Point(4, context, loops), seconds, ones, ones, 1.0, 1.0)

    (line,) = fit_steps([sample(1), sample(2), sample(4), sample(4, context=16)])
    assert line["tau_0_ms"] == pytest.approx(500) and line["tau_r_ms"] == pytest.approx(500)
    assert line["r_squared"] == pytest.approx(1.0)


def test_known_device_is_found_through_the_real_processes(tmp_path: Path) -> None:
    """The simulated device's clock is exact, so every coefficient must come back within 2 %, whatever this machine is
    busy with."""
    core = {"delta_ms": 0.6, "gamma_ms": 0.02, "alpha_ms": 2e-4}
    prelude, coda = {"delta_ms": 0.1, "gamma_ms": 0.004}, {"delta_ms": 0.2, "gamma_ms": 0.006}
    truth = {"name": "tiny", "r_max": 4, "bytes_per_kv_token": 64, "core": core, "prelude": prelude, "coda": coda}
    truth |= {"prefill": {"delta_ms": 0.3, "gamma_ms": 0.001}, "flops": {"core": 3.0, "boundary": 2.0}}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    parser = OneLineParser()
    add_latency_arguments(parser)
    options = f"--device simulated:{tmp_path}/truth.json --batch 1 8 --context 8 64 --rounds 1 --tokens 6"
    files = ["--output", str(tmp_path / "o.json"), "--profile-output", str(tmp_path / "p.json"), "--name", "found"]
    assert run_latency(parser.parse_args([*options.split(), *files])) == 0
    found = read_profile(tmp_path / "p.json")
    for stage, costs in (("core", core), ("prelude", prelude), ("coda", coda), ("prefill", truth["prefill"])):
        for name, value in costs.items():  # type: ignore[attr-defined]
            assert getattr(getattr(found, stage), name) == pytest.approx(value, rel=0.02), (stage, name)
    assert found.r_max == 4 and found.flops.core == 3.0
    report = json.loads((tmp_path / "o.json").read_text())
    assert all(line["r_squared"] > 0.999 for line in report["tau"])
