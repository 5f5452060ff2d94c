"""``depthbatch info``: a model's facts, and how many tokens fit, from its files alone; no weight is loaded."""

import argparse
from pathlib import Path

from depthbatch.common.config import add_config_arguments, config_from_sources
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend.tokenizer import load_tokenizer

MIB = 1 << 20
OPTIONS = (
    "load_format",
    "device",
    "dtype",
    "quantization",
    "max_num_seqs",
    "kv_cache_dtype",
    "kv_blocks",
    "block_size",
    "max_model_len",
    "max_loops",
    "gate_weights",
    "tensor_parallel_size",
)


def add_info_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and the options that change the answer."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    add_config_arguments(parser, OPTIONS)


def run_info(args: argparse.Namespace) -> int:
    """Raises ModelError or ConfigError."""
    from depthbatch.worker.build import full_depth_note, gates_under, resolve_gates, resolve_layout, runs_full_depth
    from depthbatch.worker.device import free_memory, of_a_rank, resolve_device
    from depthbatch.worker.memory_plan import plan_memory
    from depthbatch.worker.models.loader import open_model_dir, rank_counts, read_spec, weight_bytes
    from depthbatch.worker.models.tensor_parallel import spelt

    config = config_from_sources(args, model=args.model)
    directory, ranks = resolve_model_dir(config.model), config.tensor_parallel_size
    device = resolve_device(config.device, ranks, config.quantization)
    asked = config.model, config.dtype, config.load_format, config.max_loops
    options = config.quantization, device
    spec, share = (read_spec(*asked, n, *options, gate_weights=config.gate_weights) for n in (1, ranks))
    size = weight_bytes(*asked, ranks, *options)
    counts = (1,) if config.quantization else rank_counts(open_model_dir(config.model, config.load_format))
    quantized = f", {share.quantization} layers" if share.quantization else ""
    on_each = f" on each of {ranks} ranks" if ranks > 1 else ""
    layout = resolve_layout(config, spec)
    choice = resolve_gates(config, spec, layout)
    if runs_full_depth(choice):
        exits = full_depth_note(spec, layout, choice)
    else:
        exits = (
            f"gate {choice.default.label} at threshold {choice.threshold:g}: tokens may leave from loop {spec.r_min}"
        )
    by_layout = {other: ", ".join(gate.label for gate in gates_under(spec, other)) for other in spec.layouts}
    others = "".join(f"; under {o}: {gates}" for o, gates in by_layout.items() if gates != by_layout[layout])
    layers = f"{spec.prelude_layers}-{spec.core_layers}-{spec.coda_layers}"
    limit = f", up to {spec.r_limit}" if spec.r_limit != spec.r_max else ""
    rows = [
        ("model", f"{config.model} ({directory})"),
        ("architecture", f"{spec.architecture}, layers {layers} (prelude-core-coda)"),
        ("size", f"hidden {spec.hidden_size}, {spec.num_heads} heads of {spec.head_dim}"),
        ("vocabulary", _vocabulary(spec.vocab_size, directory)),
        ("depths", f"1 to {spec.r_max} loops{limit}"),
        ("gates", ", ".join(_mark(g.label, g is choice.default) for g in choice.gates) + others),
        ("exits", exits),
        ("positions", str(spec.max_positions)),
        ("dtype", str(spec.dtype).removeprefix("torch.")),
        ("weights", f"{size / MIB:.1f} MiB{on_each}{quantized}"),
        ("end of sequence", ", ".join(map(str, spec.eos_token_ids)) or "none"),
        ("tensor parallel", spelt(counts) + _reservation(counts, device.type)),
    ]
    lines = [f"{name:<17}{value}" for name, value in rows]
    devices = [resolve_device(config.device, ranks, config.quantization, rank) for rank in range(ranks)]
    free_bytes = of_a_rank(list(map(free_memory, devices)), device)
    kind = KVCacheDtype(config.kv_cache_dtype)
    title = f"KV layout ({kind})" if kind.is_quantized else "KV layout"
    lines.append(
        f"{title:<20}{'KiB per token':>14}{'tokens that fit':>17}   (on {device.type}, {_on(ranks)}{config.max_num_seqs} sequences)"
    )
    positions, legend = config.max_model_len or spec.max_positions, "* = default"
    for layout in spec.layouts:
        plan = plan_memory(config, share, layout, device, free_bytes)
        label = _mark(layout, layout is spec.default_layout)
        enough = " all" if plan.tokens_that_fit >= config.max_num_seqs * positions else ""
        if enough:
            legend = f"* = default, all = as many as {config.max_num_seqs} sequences of {positions} positions can have"
        lines.append(
            f"  {label:<18}{spec.kv_bytes_per_token(layout, kind) / 1024:>14.1f}{plan.tokens_that_fit:>17}{enough}"
        )
    print(*lines, legend, sep="\n")  # at once: an error comes alone, not under half of a table
    return 0


def _reservation(counts: tuple[int, ...], device_type: str) -> str:
    return " (on GPUs written and not run yet: docs/gpu.md)" if device_type == "cuda" and len(counts) > 1 else ""


def _on(ranks: int) -> str:
    return f"{ranks} ranks, " if ranks > 1 else ""


def _vocabulary(rows: int, directory: Path) -> str:
    """Rows of the embedding, and what they are for. Raises ModelError."""
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        return f"{rows} (no tokenizer: the model serves token ids)"
    if tokenizer.vocab_size < rows:
        return f"{rows} ({tokenizer.vocab_size} in the tokenizer; the rest pads the matrix)"
    return str(rows)


def _mark(name: str, is_default: bool) -> str:
    return name + " *" if is_default else name
