"""``depthbatch info``: a model's facts, and how many tokens fit, from its files alone; no weight is loaded."""

import argparse

from depthbatch.common.config import add_config_arguments, config_from_sources
from depthbatch.common.model_dir import resolve_model_dir

OPTIONS = ("load_format", "device", "dtype", "max_num_seqs", "kv_blocks", "block_size", "max_model_len", "max_loops")


def add_info_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and the options that change the answer."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    add_config_arguments(parser, OPTIONS)


def run_info(args: argparse.Namespace) -> int:
    """Raises ModelError or ConfigError."""
    from depthbatch.worker.attention.select import default_block_size
    from depthbatch.worker.device import free_memory, resolve_device
    from depthbatch.worker.loader import read_spec
    from depthbatch.worker.memory import KVRequest, plan_kv

    config = config_from_sources(args, model=args.model)
    spec = read_spec(config.model, config.dtype, config.load_format, config.max_loops)
    device = resolve_device(config.device)
    layers = f"{spec.prelude_layers}-{spec.core_layers}-{spec.coda_layers}"
    limit = f", up to {spec.r_limit}" if spec.r_limit != spec.r_max else ""
    rows = [
        ("model", f"{config.model} ({resolve_model_dir(config.model)})"),
        ("architecture", f"{spec.architecture}, layers {layers} (prelude-core-coda)"),
        ("size", f"hidden {spec.hidden_size}, {spec.num_heads} heads of {spec.head_dim}, vocabulary {spec.vocab_size}"),
        ("depths", f"1 to {spec.r_max} loops{limit}; a gate may exit from loop {spec.r_min}"),
        ("gates", ", ".join(_mark(g.label, g is spec.default_gate) for g in spec.gates)),
        ("threshold", f"{spec.default_threshold:g}"),
        ("positions", str(spec.max_positions)),
        ("dtype", str(spec.dtype).removeprefix("torch.")),
        ("tensor parallel", ", ".join(map(str, spec.tensor_parallel_degrees))),
        ("end of sequence", ", ".join(map(str, spec.eos_token_ids)) or "none"),
    ]
    for name, value in rows:
        print(f"{name:<17}{value}")
    print(
        f"{'KV layout':<20}{'KiB per token':>14}{'tokens that fit':>17}   (on {device.type}, {config.max_num_seqs} sequences)"
    )
    for layout in spec.layouts:
        bytes_per_token = spec.kv_bytes_per_token(layout)
        request = KVRequest(
            bytes_per_token=bytes_per_token,
            block_size=config.block_size or default_block_size(device, spec.dtype),
            max_positions=spec.max_positions,
            max_num_seqs=config.max_num_seqs,
            kv_blocks=config.kv_blocks,
            max_model_len=config.max_model_len,
        )
        plan = plan_kv(request, free_memory(device), device.type)
        label = _mark(layout, layout is spec.default_layout)
        print(f"  {label:<18}{bytes_per_token / 1024:>14.1f}{plan.tokens_that_fit:>17}")
    print("* = default")
    return 0


def _mark(name: str, is_default: bool) -> str:
    return name + " *" if is_default else name
