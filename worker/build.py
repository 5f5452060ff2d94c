"""From a configuration to a runner with weights, KV memory and slots, and to what the engine tells about itself.

Everything that depends on both options and model is checked here, before memory is taken; each failure is one line
that names the option. The warm-up at the end refuses weights that give no numbers.
"""

import gc
import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch

from depthbatch.common import fault_points
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.frames import lanes_of_a_slot
from depthbatch.common.gates import GATE_BY_LABEL, HEAD_THRESHOLD, Gate
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import PLAIN, EngineInfo, Variant
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.worker.attention.backend import CacheGeometry
from depthbatch.worker.attention.select import select_backend
from depthbatch.worker.device import GIB, KVPlan, free_memory, plan_kv, resolve_device, set_threads
from depthbatch.worker.host_kv import HostKV
from depthbatch.worker.memory_plan import check_weights, kv_request, plan_memory
from depthbatch.worker.models.checkpoint import Progress, no_progress
from depthbatch.worker.models.interface import LoopedModel, ModelSpec
from depthbatch.worker.models.loader import load_model, weight_bytes
from depthbatch.worker.models.tensor_parallel import ONE_RANK
from depthbatch.worker.runner.accelerator import CudaAccelerator
from depthbatch.worker.runner.overlapped import OverlappedRunner
from depthbatch.worker.runner.plain import PlainRunner
from depthbatch.worker.runner.stage_input import StageLimits, bucket_sizes, most_rows, uncaptured_sizes
from depthbatch.worker.runner.stage_tensors import DecodeBuffers, PrefillInput
from depthbatch.worker.runner.stages import Stages
from depthbatch.worker.sampling.grammar_matchers import Grammars, load_grammars
from depthbatch.worker.sampling.logprobs import num_likeliest
from depthbatch.worker.slots import SlotState

if TYPE_CHECKING:
    from depthbatch.worker.rank_processes import RankProcesses
    from depthbatch.worker.ranks import Ranks
    from depthbatch.worker.runner.ranked import LeadingRunner

WARM_UP_TOKENS = 4
log = get_logger("worker")


class BuiltRunner(NamedTuple):
    """A runner and what it is."""

    runner: "PlainRunner | OverlappedRunner | LeadingRunner"
    info: EngineInfo


def build_runner(
    config: EngineConfig, progress: Progress = no_progress, processes: "RankProcesses | None" = None
) -> BuiltRunner:
    """Loads, sizes, allocates, warms up, on every rank; ``progress`` as of load_model, of this rank. ``processes``: those
    of the other ranks, where they have been started. Raises ConfigError or ModelError."""
    if config.tensor_parallel_size == 1:
        return _build(config, None, progress)
    from depthbatch.worker.rank_processes import RankProcesses
    from depthbatch.worker.ranks import Leader  # torch.distributed, which one rank needs nothing of

    processes = processes or RankProcesses(config)
    try:
        return _build(config, Leader(config, processes), progress)
    except BaseException as error:
        if isinstance(error, RuntimeError | OSError | EOFError):
            processes.wait_for_the_watch()
        processes.close()
        raise


def build_rank(config: EngineConfig, ranks: "Ranks") -> PlainRunner | OverlappedRunner:
    """The same on a rank other than 0."""
    runner = _build(config, ranks).runner
    assert isinstance(runner, PlainRunner | OverlappedRunner)
    return runner


def _build(config: EngineConfig, ranks: "Ranks | None", progress: Progress = no_progress) -> BuiltRunner:
    rank = 0 if ranks is None else ranks.parallel.rank
    device = resolve_device(config.device, config.tensor_parallel_size, config.quantization, rank)
    if device.index is not None:
        torch.cuda.set_device(device)
    if device.type == "cpu":
        log.info("%d CPU threads", set_threads(config.threads, config.tensor_parallel_size))
    count = weight_bytes(
        config.model,
        config.dtype,
        config.load_format,
        config.max_loops,
        config.tensor_parallel_size,
        config.quantization,
        device,
    )
    check_weights(config.model, count, free_memory(device))
    try:
        model = load_model(
            config.model,
            dtype=config.dtype,
            device=device,
            load_format=config.load_format,
            seed=config.seed,
            r_max=config.max_loops,
            state_init=config.state_init,
            parallel=ONE_RANK if ranks is None else ranks.parallel,
            progress=progress,
            gate_weights=config.gate_weights,
            quantization=config.quantization,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"model '{config.model}': no memory for its weights ({_reason(error)})") from None
    return assemble(config, model, device, ranks=ranks)


def assemble(
    config: EngineConfig,
    model: LoopedModel,
    device: torch.device,
    backend: str | None = None,
    ranks: "Ranks | None" = None,
) -> BuiltRunner:
    """Everything around a loaded model, with a smaller KV cache where the memory for the planned one is not to be had.
    ``backend`` names an attention backend; None is the fastest there is. ``ranks``: those that share the model, as seen by
    the one that is built. Raises ConfigError, ModelError."""
    spec = model.spec
    layout = resolve_layout(config, spec)
    if ranks is not None:
        ranks.join(device)  # before memory is counted: NCCL takes some
    make_plan, free_bytes = partial(plan_memory, config, spec, layout, device), free_memory(device)
    plan = make_plan(free_bytes) if ranks is None else ranks.plan(make_plan, free_bytes, device)
    engine_info(config, spec, layout, plan, device)  # refuses what the model cannot run, before a program is started
    grammars = None
    if ranks is None or ranks.leads:
        grammars = load_grammars(resolve_model_dir(config.model), spec.vocab_size, spec.eos_token_ids)
    while True:
        try:
            return _with_memory(config, model, device, plan, grammars, backend, ranks)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = _reason(error)
        if ranks is not None:  # they would have to try again all at once
            raise ConfigError(f"no memory for {plan.num_blocks - 1} KV blocks on every rank ({reason}): give kv_blocks")
        gc.collect()  # what the attempt has taken; its frames are gone with its error
        if device.type == "cuda":
            torch.cuda.empty_cache()
        plan = _smaller_plan(config, spec, plan, device, reason)


def _with_memory(
    config: EngineConfig,
    model: LoopedModel,
    device: torch.device,
    plan: KVPlan,
    grammars: Grammars | None,
    backend: str | None,
    ranks: "Ranks | None",
) -> BuiltRunner:
    """Takes the memory of a plan, and runs every stage once. Raises as ``is_out_of_memory`` knows when there is too little."""
    spec = model.spec
    layout = resolve_layout(config, spec)
    log.info("%s", plan.describe())
    fault_points.reach("worker.kv_memory", plan)
    geometry = CacheGeometry(
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        planes=spec.planes_per_layer(layout),
        dtype=spec.dtype,
        device=device,
        windows=spec.windows,
        kv_cache_dtype=KVCacheDtype(config.kv_cache_dtype),
    )
    lanes = lanes_of_a_slot(config.draft_lanes_under(layout, spec.r_max))
    slots = SlotState(config.max_num_seqs, plan.max_blocks, spec, device, lanes)
    make_stages = Stages if ranks is None else ranks.stages
    stages = make_stages(model, select_backend(geometry, backend), slots, layout)
    info = engine_info(config, spec, layout, plan, device)
    limits = StageLimits(
        num_slots=config.max_num_seqs,
        num_blocks=plan.num_blocks,
        max_blocks=plan.max_blocks,
        max_positions=plan.max_model_len,
        r_max=spec.r_max,
        vocab_size=spec.vocab_size,
        buckets=info.buckets,
        lanes=lanes,
        host_blocks=plan.host_blocks,
    )
    host_kv = HostKV(stages.backend, plan.host_blocks) if plan.host_blocks else None
    finite = warm_up(stages, device)
    if not finite and (ranks is None or ranks.leads):
        raise ModelError(f"model '{config.model}' gives logits that are not finite: its weights are broken")
    if grammars is not None and not grammars.ready():
        grammars = None
    info = msgspec.structs.replace(info, grammars=grammars is not None)
    runner: PlainRunner | OverlappedRunner
    if device.type == "cuda":
        tokens = config.max_num_batched_tokens
        runner = OverlappedRunner(stages, limits, CudaAccelerator(device), tokens, grammars, host_kv)
    else:
        runner = PlainRunner(stages, limits, device, grammars, host_kv)
    return BuiltRunner(runner if ranks is None else ranks.runner(runner), info)


def resolve_layout(config: EngineConfig, spec: ModelSpec) -> KVLayout:
    """The layout asked for or the model's own; ConfigError when the model cannot run it."""
    if config.kv_layout is None:
        return spec.default_layout
    layout = KVLayout(config.kv_layout)
    if layout not in spec.layouts:
        raise ConfigError(f"kv_layout '{layout}' is not one of {spec.architecture}'s: {', '.join(spec.layouts)}")
    return layout


class GateChoice(NamedTuple):
    """What requests may use, and what those that name nothing get; ``other_threshold``: see EngineInfo."""

    gates: tuple[Gate, ...]
    default: Gate
    threshold: float
    other_threshold: float


def gates_under(spec: ModelSpec, layout: KVLayout) -> tuple[Gate, ...]:
    """The model's gates that ``layout`` can run."""
    return tuple(gate for gate in spec.gates if layout.allows_early_exit or not gate.may_exit_early)


def resolve_gates(config: EngineConfig, spec: ModelSpec, layout: KVLayout) -> GateChoice:
    """Gates of this engine. ConfigError names gate and layout where early exits would leave holes in the cache.

    Under such a layout a model whose own default exits early runs at full depth unless told otherwise.
    """
    gates = gates_under(spec, layout)
    default = spec.default_gate if spec.default_gate in gates else Gate.NONE
    if config.gate is not None:
        default = GATE_BY_LABEL[config.gate]
        if default not in spec.gates:
            known = ", ".join(gate.label for gate in spec.gates)
            raise ConfigError(f"gate '{config.gate}' is not one of {spec.architecture}'s: {known}")
        if default not in gates:
            raise ConfigError(f"kv_layout '{layout}' cannot run gate '{config.gate}': early exits leave holes in it")
    threshold, other = spec.default_threshold, HEAD_THRESHOLD
    if default.compares_distances(spec.gates) != spec.default_gate.compares_distances(spec.gates):
        threshold, other = other, threshold
    return GateChoice(gates, default, threshold if config.exit_threshold is None else config.exit_threshold, other)


def engine_info(
    config: EngineConfig, spec: ModelSpec, layout: KVLayout, plan: KVPlan, device: torch.device
) -> EngineInfo:
    """What the engine tells about itself. ConfigError for loop limits outside the model's range."""
    r_min = config.min_loops if config.min_loops is not None else spec.r_min
    if not spec.r_min <= r_min <= spec.r_max:
        raise ConfigError(f"min_loops {r_min} is outside {spec.architecture}'s range {spec.r_min}..{spec.r_max}")
    choice = resolve_gates(config, spec, layout)
    drafts = config.draft_lanes_under(layout, spec.r_max)
    return EngineInfo(
        model=config.model,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        r_max=spec.r_max,
        r_min=r_min,
        default_gate=choice.default,
        gates=choice.gates,
        default_threshold=choice.threshold,
        other_threshold=choice.other_threshold,
        kv_layout=layout,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        kv_bytes_per_token=plan.bytes_per_token * config.tensor_parallel_size,
        max_model_len=plan.max_model_len,
        boundary_layers=spec.prelude_layers + spec.coda_layers,
        buckets=(bucket_sizes if device.type == "cuda" else uncaptured_sizes)(
            most_rows(config.max_num_seqs, 1 + drafts)
        ),
        draft_lanes=drafts,
        coda_layers=spec.coda_layers,
        host_blocks=plan.host_blocks,
        device=device.type,
        dtype=str(spec.dtype).removeprefix("torch."),
        eos_token_ids=spec.eos_token_ids,
        max_logprobs=num_likeliest(spec.vocab_size),
        quantization=spec.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        notes=_notes(config, spec, layout, choice),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device or the host. torch's CPU allocator has no class of its own for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _smaller_plan(config: EngineConfig, spec: ModelSpec, plan: KVPlan, device: torch.device, reason: str) -> KVPlan:
    """Three quarters of the blocks. ConfigError where their number was asked for, or too few would be left."""
    blocks = plan.num_blocks - 1
    if config.kv_blocks is not None:
        raise ConfigError(
            f"kv_blocks {blocks}: there is no memory for the KV cache of {plan.total_bytes / GIB:.2f} GiB and what runs "
            f"beside it ({reason})"
        )
    if blocks < 2:
        raise ConfigError(f"no room for the KV cache, not even for one block ({reason})")
    log.warning("no memory for %d KV blocks (%s): trying %d", blocks, reason, blocks * 3 // 4)
    request = kv_request(config, spec, resolve_layout(config, spec), device)
    smaller = plan_kv(request._replace(kv_blocks=blocks * 3 // 4), sys.maxsize, device.type)
    return smaller._replace(host_blocks=plan.host_blocks)


def _notes(config: EngineConfig, spec: ModelSpec, layout: KVLayout, choice: GateChoice) -> tuple[str, ...]:
    """What a start is to say that is no error: what an option does to the answers, and that no token leaves early where a
    checkpoint, and nobody else, has it so."""
    notes = []
    if layout is KVLayout.SINGLE and spec.default_layout is not KVLayout.SINGLE:
        own = f"{spec.default_layout} is its own"
        notes.append(f"warning: {spec.architecture} is not trained for kv_layout {layout}: answers get worse; {own}")
    if config.policy != "cb" and config.gate is None and config.exit_threshold is None and runs_full_depth(choice):
        notes.append(full_depth_note(spec, layout, choice))
    if config.prefix_caching is None and not layout.keeps_every_loop(spec.r_max):
        notes.append(
            f"prefix caching is off: under kv_layout {layout} loops share a plane, and a hit would change answers"
        )
    return tuple(notes)


def full_depth_note(spec: ModelSpec, layout: KVLayout, choice: GateChoice) -> str:
    """That every token runs all loops, why, and what to set so that it does not."""
    may = [gate.label for gate in choice.gates if gate.takes_threshold]
    if choice.default.takes_threshold:
        why, change = f"gate {choice.default.label} at threshold {choice.threshold:g}", "--exit-threshold below 1"
    elif may:
        why, change = "no gate by default", f"--gate {' or '.join(may)} with --exit-threshold"
    else:
        why, change = f"kv_layout {layout} has no early exits" if not layout.allows_early_exit else "no gate", ""
    lets = f"; {change} lets tokens leave earlier" if change else ""
    return f"every token runs all {spec.r_max} loops ({why}){lets}"


def runs_full_depth(choice: GateChoice) -> bool:
    """Whether requests that name neither gate nor threshold run every loop: probabilities do not pass 1. Distances, which
    the convergence test compares, may."""
    if not choice.default.may_exit_early:
        return True
    distances = choice.default.compares_distances(choice.gates)
    return choice.default.takes_threshold and not distances and choice.threshold >= 1.0


def warm_up(stages: Stages, device: torch.device) -> bool:
    """Runs every stage once on the dummy slot, so that kernels are built before the first request.

    Whether the model's logits and gate are finite.
    """
    buffers = DecodeBuffers(1, device)
    spec = stages.model.spec
    with torch.inference_mode():
        stages.prefill(PrefillInput.dummy(WARM_UP_TOKENS, device), PLAIN)
        buffers.fill(np.array([0, WARM_UP_TOKENS, 0, 0], np.int32))
        stages.prelude(buffers)
        buffers.fill(np.array([0, WARM_UP_TOKENS, 1, 0], np.int32))
        gated = any(gate.decides_on_device for gate in spec.gates)
        stages.core(buffers, Variant.GATES if gated else PLAIN)
        stages.coda(buffers, PLAIN)
        item = stages.slots.gather_item(buffers.slots.long())
        hidden = stages.model.coda(item, buffers.positions, stages.attention(buffers))
        finite = stages.model.logits(hidden).isfinite().all() & stages.slots.cumulated[0].isfinite()
    return bool(finite.item())
