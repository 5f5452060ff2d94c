"""What depends on both options and model is refused at start, in one line; broken weights do not reach a request."""

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from depthbatch.common import fault_points
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, DepthbatchError, ModelError
from depthbatch.common.gates import HEAD_THRESHOLD, Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.frontend.prompts import describe, print_start
from depthbatch.worker import build
from depthbatch.worker.memory_plan import plan_memory
from depthbatch.worker.models.loader import read_spec
from reference.oracle import HUGINN, OURO


def built(model: Path = OURO, **options: object) -> build.BuiltRunner:
    values: dict[str, object] = {"model": str(model), "max_num_seqs": 4, "kv_blocks": 20, "threads": 1}
    return build.build_runner(EngineConfig.from_values(values | options))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_loops": 5}, "max_loops 5"),
        ({"min_loops": 1}, r"min_loops 1 is outside ouro's range 2\.\.4"),
        ({"gate": "convergence"}, "gate 'convergence' is not one of ouro's"),
        ({"kv_blocks": 10**8}, "kv_blocks 100000000 of 16 tokens need"),
        ({"max_model_len": 400}, "20 KV blocks hold 320 tokens, less than max_model_len 400"),
        ({"max_model_len": 4000}, "max_model_len 4000 is more than the model's 2048"),
        ({"device": "cuda"}, "no CUDA device"),
    ],
)
def test_options_the_model_cannot_run_are_refused(options: dict[str, object], what: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=what) as caught:
        built(**options)
    assert "\n" not in str(caught.value) and isinstance(caught.value, DepthbatchError)


def test_the_info_says_what_was_built() -> None:
    info = built(kv_layout="single", gate="own", exit_threshold=0.25, min_loops=3, max_num_seqs=9).info
    assert (info.default_gate, info.default_threshold, info.r_min, info.r_max) == (Gate.OWN, 0.25, 3, 4)
    assert info.kv_bytes_per_token == 3 * 2 * 4 * 16 * 4  # layers, K and V, heads, head_dim, fp32
    assert (info.num_blocks, info.max_model_len, info.buckets) == (21, 320, tuple(range(1, 10)))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_blocks_are_counted_in_the_bytes_that_are_stored(kind: str) -> None:
    """A byte a number and two for the scale of 16 of them, in what is planned, told, allocated and printed; so more tokens
    fit the same memory."""
    plain, quantized = built(kv_layout="single"), built(kv_layout="single", kv_cache_dtype=kind)
    assert quantized.info.kv_bytes_per_token == 3 * 2 * 4 * (16 + 2)
    assert (plain.info.kv_cache_dtype, quantized.info.kv_cache_dtype) == ("auto", kind)
    backend = quantized.runner.stages.backend
    assert sum(x.nbytes for i in range(3) for x in backend.memory(i)) == 21 * 16 * quantized.info.kv_bytes_per_token
    assert describe(quantized.info).endswith(f"0.4 KiB of KV per token (single, {kind}), 320 tokens fit")
    spec = read_spec(str(OURO))
    blocks = []
    for chosen in ("auto", kind):
        config = EngineConfig(model=str(OURO), max_num_seqs=64, kv_cache_dtype=chosen)
        blocks.append(plan_memory(config, spec, KVLayout.LAST_EXITED, torch.device("cpu"), 1 << 28).num_blocks)
    assert blocks[1] / blocks[0] == pytest.approx(64 / 18, rel=0.01)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype {kind}: a simulated device has no K and V"):
        EngineConfig(device="simulated:h100-ouro-1.4b", kv_cache_dtype=kind)


def test_a_layout_that_the_model_is_not_trained_for_is_said_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: Ouro under ``single`` answers 2 % of what it answers under its own layout, and nothing said so."""
    for layout, warned in (("single", True), ("first_then_shared", False), (None, False)):
        print_start(built(kv_layout=layout, exit_threshold=0.5, prefix_caching="off").info, {"top_k": 3})
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2 + warned and lines[-1].endswith("top_k 3")
        assert warned == ("warning: ouro is not trained for kv_layout single" in lines[1])
    assert built(HUGINN, kv_layout="single", max_loops=None, prefix_caching="off").info.notes == ()


def test_a_start_says_that_the_prefix_cache_is_off() -> None:
    """It is on by default, but not where a hit would change answers. Who has turned it off is not told."""
    [said] = built(HUGINN, kv_layout="single", max_loops=None).info.notes
    assert said == "prefix caching is off: under kv_layout single loops share a plane, and a hit would change answers"
    assert built(HUGINN, kv_layout="last_exited", max_loops=None).info.notes == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {},
            "every token runs all 4 loops (gate delayed at threshold 1); --exit-threshold below 1 lets tokens leave earlier",
        ),
        ({"exit_threshold": 0.9}, None),
        ({"kv_layout": "depth_indexed"}, "every token runs all 4 loops (kv_layout depth_indexed has no early exits)"),
        ({"kv_layout": "depth_indexed", "policy": "cb"}, None),
        ({"exit_threshold": 1.0}, None),
    ],
)
def test_a_start_says_that_no_token_leaves_early(options: dict[str, object], said: str | None) -> None:
    """Bug: published Ouro configurations have threshold 1.0, so a server ran every loop and nothing said so. What was asked
    for is not said again."""
    assert built(**options).info.notes == (() if said is None else (said,))


def test_a_layout_that_cannot_exit_early_offers_no_early_gate() -> None:
    info = built(kv_layout="depth_indexed").info
    assert info.default_gate is Gate.NONE and info.gates == (Gate.NONE, Gate.FIXED)


def test_weights_that_give_no_numbers_are_refused(tmp_path: Path) -> None:
    """Row "NaN logits after a bad load": finite weights whose products overflow, so that no check of the file itself
    could see it; the warm-up does, and the worker does not start."""
    model = tmp_path / "model"
    shutil.copytree(OURO, model)
    (file,) = model.glob("model*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], 1e34)
    tensors["model.norm.weight"] *= 1e6
    save_file(tensors, file)
    with pytest.raises(ModelError, match="not finite"):
        built(model)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("cannot map 9 MiB"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nGPU 0 has less."),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_is_not_to_be_had_makes_the_cache_smaller(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Row "no memory for the KV cache: a traceback at start". Bug: what was free when the cache was planned need not be free when it is taken, and the worker ended with a
    traceback. Where the number of blocks was asked for, or must hold a length that was, one line refuses it."""
    tried: list[int] = []

    def no_memory(point: str, about: object) -> None:
        assert point == "worker.kv_memory" and isinstance(about, build.KVPlan)
        tried.append(about.num_blocks - 1)
        if about.num_blocks > 100:
            raise error

    monkeypatch.setattr(fault_points, "hook", no_memory)
    _, info = built(kv_blocks=None, max_model_len=None)
    assert (
        tried[0] == 4 * 2048 // 16
        and tried[1] == tried[0] * 3 // 4
        and tried[-1] == info.num_blocks - 1 <= 99 < tried[-2]
    )
    assert info.max_model_len == 16 * tried[-1] and "trying" in caplog.text
    for options, says in (
        ({"kv_blocks": 200}, "kv_blocks 200: "),
        ({"kv_blocks": None, "max_model_len": 2000}, "2000"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            built(**options)
        assert "\n" not in str(caught.value)


def test_no_memory_for_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(build, "load_model", no_memory)
    with pytest.raises(ConfigError, match=r"no memory for its weights \(CUDA out of memory.\)"):
        built()


def test_thresholds_of_gates_that_compare_another_quantity() -> None:
    """Huginn's is a distance of states, its trained heads' a probability: each gate has its own default, whichever of them is
    the engine's; --exit-threshold is that of the default gate. A distance taken for a probability would exit at once."""
    base, spec = built().info, read_spec("demo-huginn")
    for gate, given, other in (
        (None, 0.5, HEAD_THRESHOLD),
        ("lookahead", HEAD_THRESHOLD, 0.5),
        ("none", 0.5, HEAD_THRESHOLD),
    ):
        for threshold in (None, 0.25):
            values = {"model": "demo-huginn", "gate": gate, "exit_threshold": threshold}
            choice = build.resolve_gates(EngineConfig.from_values(values), spec, spec.default_layout)
            info = msgspec.structs.replace(
                base,
                default_gate=choice.default,
                gates=choice.gates,
                default_threshold=choice.threshold,
                other_threshold=choice.other_threshold,
            )
            given = given if threshold is None else threshold
            of_heads = {info.threshold_of(each) for each in (Gate.LOOKAHEAD, Gate.PRELOOP)}
            of_distances = {info.threshold_of(each) for each in (Gate.CONVERGENCE, Gate.OWN, Gate.DELAYED)}
            assert (of_heads, of_distances) == (({given}, {other}) if gate == "lookahead" else ({other}, {given}))
