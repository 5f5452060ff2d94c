"""``depthbatch convert``: a looped model out of a Llama checkpoint that gives the same answers at every depth."""

import argparse
from pathlib import Path


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Where from, where to, and where to cut."""
    parser.add_argument("source", metavar="SRC", type=Path, help="Llama model directory (safetensors), or a .gguf file")
    parser.add_argument("target", metavar="DIR", type=Path, help="directory to write")
    parser.add_argument("--prelude", type=int, default=4, metavar="N", help="layers before the loop (default 4)")
    parser.add_argument("--coda", type=int, default=4, metavar="N", help="layers after the loop (default 4)")
    parser.add_argument(
        "--adapter", type=Path, metavar="FILE", help="adapter.safetensors of train-loops --one-loop-stays, to put in"
    )


def run_convert(args: argparse.Namespace) -> int:
    """Raises ModelError or ConfigError."""
    from depthbatch.worker.models.convert import convert
    from depthbatch.worker.models.loader import read_spec

    convert(args.source, args.target, args.prelude, args.coda, args.adapter)
    spec = read_spec(str(args.target.resolve()))
    layers = f"{spec.prelude_layers}-{spec.core_layers}-{spec.coda_layers}"
    print(f"{args.target}: {spec.architecture}, layers {layers}, {spec.r_max} loops, {spec.vocab_size} tokens")
    return 0
