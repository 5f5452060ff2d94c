#!/usr/bin/env bash
# Everything that only a GPU can show, in under 8 minutes, without network: gpu/check.py says what.
#
#   WHEELS=dir OUTPUT=gpu_check.json benchmarks/gpu_check.sh            on a machine with a GPU and torch
#   benchmarks/gpu_check.sh --dry-run-cpu                              the same code, tiny, on the CPU
#
# WHEELS holds what the machine lacks, nothing is fetched. Filled on a machine with network, e.g. for Python 3.12 with
# torch, triton, transformers, numpy, pytest and hypothesis but without pyzmq, msgspec and llguidance:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#       --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#       -d wheels pyzmq msgspec llguidance
#
# A flash-attn or FlashAttention 3 wheel there is used too. PYTHON: the interpreter (python3).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ -n ${WHEELS:-} ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$work/site" "$WHEELS"/*.whl
    PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
fi
mkdir "$work/path"
ln -s "$root" "$work/path/depthbatch" # the package without installing it
export PYTHONPATH="$work/path${PYTHONPATH:+:$PYTHONPATH}"
"$python" -m depthbatch.benchmarks.gpu.check --output "${OUTPUT:-gpu_check.json}" "$@"
