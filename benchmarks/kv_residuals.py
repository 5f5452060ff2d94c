"""``depthbatch bench kv-residuals``: how alike the planes of a token are, and what K and V in few bits cost in accuracy.

Every token attends to what codes give back of all tokens before it and to its own K and V as they were computed, in fp32 and
at full depth, so that codes may need all planes of a token at once. Figures are of the tokens that follow: the share of
questions of which every answer token is the likeliest one, and perplexity. Unless told otherwise only looped layers are coded;
where all are, a layer outside the loop has one plane.

In process, batch by batch, without the engine: for formats that no engine has yet.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbatch.benchmarks.kv_codecs import Codec, Odd, Residual, Stored, Uniform, least_squares
from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.common.arguments import positive
from depthbatch.common.errors import ConfigError
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.common.text_files import read_text
from depthbatch.frontend.tokenizer import load_tokenizer
from depthbatch.training.batches import IGNORED, collate, encode_row
from depthbatch.training.data import heldout
from depthbatch.training.demo_tokenizer import build_tokenizer
from depthbatch.worker.attention.backend import QKV, CacheGeometry, split_and_rotate
from depthbatch.worker.layers.blocks import BlockStack
from depthbatch.worker.layers.rotary import Rotation
from depthbatch.worker.models.interface import LoopedModel
from depthbatch.worker.models.loader import load_model


class Formats(NamedTuple):
    """How K and V are kept; None: as computed."""

    keys: Codec | None
    values: Codec | None


def _both(codec: Codec | None) -> Formats:
    return Formats(codec, codec)


INT8 = Stored(KVCacheDtype.INT8)
CODECS: dict[str, Formats] = {
    "as computed": _both(None),
    "int8": _both(INT8),
    "int4, rotated": _both(Odd()),
    "keys int8, values int4, rotated": Formats(INT8, Odd()),
    "keys as computed, values int4, rotated": Formats(None, Odd()),
    "int4 in groups": _both(Uniform(4)),
    "int4 in groups, rotated": _both(Uniform(4, rotated=True)),
    "int3 in groups, rotated": _both(Uniform(3, rotated=True)),
    "int2 in groups, rotated": _both(Uniform(2, rotated=True)),
    "last plane int4, others by int4": _both(Residual("last", 4, 4)),
    "last plane int4, others by int3": _both(Residual("last", 4, 3)),
    "last plane int4, others by int2": _both(Residual("last", 4, 2)),
    "last plane int4, others by int2, not rotated": _both(Residual("last", 4, 2, rotated=False)),
    "first plane int4, others by int3": _both(Residual("first", 4, 3)),
    "first plane int4, others by int2": _both(Residual("first", 4, 2)),
    "first plane int4, each from the one before by int3": _both(Residual("previous", 4, 3)),
    "first plane int4, each from the one before by int2": _both(Residual("previous", 4, 2)),
}
LAYERS = ("looped", "all")


def add_kv_residuals_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, what it is asked, and where figures go."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    parser.add_argument("--examples", type=positive, default=600, help="questions of the demo task (default 600)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="foresee this text instead of answering questions")
    parser.add_argument("--length", type=positive, default=256, help="tokens of a piece of the text (default 256)")
    parser.add_argument("--pieces", type=positive, default=8, help="how many, from its begin (default 8)")
    parser.add_argument(
        "--layers", choices=LAYERS, default="looped", help="of which K and V are coded (default looped)"
    )
    parser.add_argument("--max-loops", type=positive, default=None, help="loops of every token (default: the model's)")
    parser.add_argument(
        "--codecs",
        nargs="+",
        choices=CODECS,
        default=list(CODECS),
        metavar="NAME",
        help="of these alone: " + "; ".join(CODECS),
    )
    add_output_argument(parser)


def run_kv_residuals(args: argparse.Namespace) -> int:
    """Raises ConfigError, ModelError."""
    model = load_model(args.model, "float32", r_max=args.max_loops)
    if model.spec.r_max < 2:
        raise ConfigError("--max-loops 1: there is one plane, and nothing to compare it with")
    if model.spec.head_dim % 32:
        raise ConfigError(f"model '{args.model}': heads of {model.spec.head_dim}; groups are of 32")
    batches = list(_questions(args)) if args.text is None else [_pieces(args)]
    with torch.inference_mode():
        likeness = _likeness(model, batches[0].ids)
        rows = []
        for name in args.codecs:
            score = _score(model, batches, CODECS[name], args.layers == "all")
            rows.append({"codec": name} | _bits(model, CODECS[name]) | score)
            print(_line(rows[-1]), file=sys.stderr)
    asked = {"examples": args.examples}
    if args.text is not None:
        asked = {"text": args.text.name, "length": args.length, "pieces": args.pieces}
    report = {"model": Path(args.model).name, "planes": model.spec.r_max, "head_dim": model.spec.head_dim} | asked
    report["layers"] = args.layers
    write_json(report | {"likeness": likeness, "rows": rows}, args.output)
    return 0


def _line(row: dict[str, Any]) -> str:
    right = "" if row["accuracy"] is None else f"{100 * row['accuracy']:7.2f} % right"
    kept = f"{row['stored_bits']:6.2f} bits kept, {row['read_bits']:6.2f} read"
    return f"{row['codec']:<52}{kept}   perplexity {row['perplexity']:8.4f}{right}   error {row['error']:.4f}"


def _bits(model: LoopedModel, formats: Formats) -> dict[str, float]:
    """Of a looped layer, mean of K and V."""
    shape = model.spec.r_max, model.spec.head_dim
    stored = [32.0 if codec is None else codec.stored_bits(*shape) for codec in formats]
    read = [32.0 if codec is None else codec.read_bits(*shape) for codec in formats]
    return {"stored_bits": sum(stored) / 2, "read_bits": sum(read) / 2}


# --- what is foreseen


class Tokens(NamedTuple):
    """Sequences beside each other."""

    ids: Tensor  # int64 [B, T]
    targets: Tensor  # the token after each, IGNORED where it does not count
    are_questions: bool


def _questions(args: argparse.Namespace) -> Iterator[Tokens]:
    tokenizer = build_tokenizer()
    rows = [encode_row(tokenizer, example, example.prompt) for example in heldout(0, args.examples)]
    for start in range(0, len(rows), 300):
        batch = collate(rows[start : start + 300])
        yield Tokens(batch.ids, batch.targets, True)


def _pieces(args: argparse.Namespace) -> Tokens:
    tokenizer = load_tokenizer(resolve_model_dir(args.model))
    if tokenizer is None:
        raise ConfigError(f"model '{args.model}' has no tokenizer: a text means nothing to it")
    try:
        ids = tokenizer.encode_bare(read_text(args.text))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {args.text}: {error}") from None
    needed = args.pieces * args.length
    if len(ids) < needed or args.length < 2:
        raise ConfigError(
            f"--text {args.text}: {len(ids)} tokens are less than --pieces x --length, or a piece is too short"
        )
    pieces = torch.tensor(ids[:needed]).view(args.pieces, args.length)
    return Tokens(pieces[:, :-1], pieces[:, 1:], False)


# --- the model over a cache that is coded token by token


class Cache:
    """K and V of B sequences, [planes, B, T, Hkv, Dh] a layer; an attention context for tokens start .. start + count - 1."""

    def __init__(self, model: LoopedModel, batch: int, length: int) -> None:
        spec, cpu = model.spec, torch.device("cpu")
        self.planes = spec.planes_per_layer(KVLayout.LAST_EXITED)
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.geometry = CacheGeometry(1, 1, *heads, self.planes, torch.float32, cpu)
        self.keys, self.values = (
            [torch.zeros(n, batch, length, spec.num_kv_heads, spec.head_dim) for n in self.planes] for _ in "kv"
        )
        self.start = self.count = self.plane = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See AttentionContext."""
        plane, end = self.plane if self.planes[layer] > 1 else 0, self.start + self.count
        keys, values = self.keys[layer][plane], self.values[layer][plane]
        keys[:, self.start : end] = k.view(-1, self.count, *k.shape[1:])
        values[:, self.start : end] = v.view(-1, self.count, *v.shape[1:])
        seen = torch.ones(self.count, end, dtype=torch.bool).tril(self.start)
        queries = q.reshape(-1, self.count, *q.shape[1:]).transpose(1, 2)  # [B, H, n, Dh]
        context = keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2)
        out = F.scaled_dot_product_attention(queries, *context, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape[0], -1)

    def from_qkv(self, layer: int, qkv: Tensor, rotation: Rotation, qk_bias: Tensor | None = None) -> Tensor:
        """See AttentionContext."""
        heads: QKV = split_and_rotate(qkv, self.geometry, rotation, qk_bias)
        return self(layer, *heads)

    def run_stack(self, stack: BlockStack, x: Tensor, rotation: Rotation) -> Tensor | None:
        """None: operator by operator."""
        return None

    def code(self, formats: Formats, every_layer: bool) -> float:
        """Puts what codes give back in the place of the tokens at hand; how far it is from them, squared, over their
        own square, mean of the layers that are coded."""
        errors = []
        for codec, cache in zip(formats, (self.keys, self.values), strict=True):
            for layer, planes in enumerate(self.planes):
                if codec is not None and (planes > 1 or every_layer):
                    at = cache[layer][:, :, self.start : self.start + self.count]
                    read = codec(at)
                    errors.append(float((read - at).square().sum() / at.square().sum()))
                    at.copy_(read)
        return sum(errors) / len(errors) if errors else 0.0


def forward(model: LoopedModel, cache: Cache, ids: Tensor, start: int) -> Tensor:
    """ids [B, n] from position ``start`` on, at full depth -> logits [B, n, V]."""
    batch, count = ids.shape
    cache.start, cache.count, cache.plane = start, count, 0
    positions = torch.arange(start, start + count, dtype=torch.int32).repeat(batch)
    item = model.prelude(ids.flatten(), positions, torch.zeros_like(positions), cache)
    for cache.plane in range(model.spec.r_max):
        item = model.core(item, positions, torch.full_like(positions, cache.plane + 1), cache)
    return model.logits(model.coda(item, positions, cache)).view(batch, count, -1)


def _score(model: LoopedModel, batches: list[Tokens], formats: Formats, every_layer: bool) -> dict[str, float | None]:
    losses, right, errors = [], [], []
    for ids, targets, _ in batches:
        cache = Cache(model, *ids.shape)
        wrong = torch.zeros(len(ids), dtype=torch.bool)
        for t in range(ids.shape[1]):
            logits = forward(model, cache, ids[:, t : t + 1], t)[:, 0]
            counts = targets[:, t] != IGNORED
            losses.append(F.cross_entropy(logits[counts], targets[counts, t], reduction="none"))
            wrong |= counts & (logits.argmax(-1) != targets[:, t])
            errors.append(cache.code(formats, every_layer))
        right.append(~wrong)
    answers = torch.cat(right)
    accuracy = int(answers.sum()) / len(answers) if batches[0].are_questions else None
    error = math.sqrt(sum(errors) / len(errors))
    return {"perplexity": float(torch.cat(losses).mean().exp()), "accuracy": accuracy, "error": error}


# --- how alike planes are


def _likeness(model: LoopedModel, ids: Tensor) -> list[dict[str, Any]]:
    """How much of a plane is left, over its length, when another is taken away: as it is, times the least squares' factor,
    and turned before by the best rotation a layer, head and plane (of the other half of the sequences: Procrustes)."""
    cache = Cache(model, *ids.shape)
    forward(model, cache, ids, 0)
    rows = []
    for name, memory in (("K", cache.keys), ("V", cache.values)):
        looped = torch.stack([x for x in memory if x.shape[0] > 1])  # [layers, planes, B, T, Hkv, Dh]
        vectors = looped.permute(0, 1, 4, 2, 3, 5).flatten(3, 4)  # [layers, planes, Hkv, N, Dh]
        half = vectors.shape[3] // 2
        fitted, told = vectors[:, :, :, :half], vectors[:, :, :, half:]
        last = vectors.shape[1] - 1
        of = {"last": [last] * last, "first": [0] * last, "previous": list(range(last))}
        for anchor, anchors in of.items():
            planes = list(range(last)) if anchor == "last" else list(range(1, last + 1))
            x, other = told[:, planes], told[:, anchors]
            turned = other @ _procrustes(fitted[:, planes], fitted[:, anchors])
            left = {"as it is": x - other, "factor": x - least_squares(x, other) * other}
            left["rotation and factor"] = x - least_squares(x, turned) * turned
            norms = {
                kind: (r.square().sum((0, 2, 3, 4)) / x.square().sum((0, 2, 3, 4))).sqrt() for kind, r in left.items()
            }
            shares = {kind: float(norm.square().mean().sqrt()) for kind, norm in norms.items()}
            by_plane = {plane + 1: round(float(norm), 4) for plane, norm in zip(planes, norms["factor"], strict=True)}
            rows.append({"of": name, "without": anchor} | shares | {"factor_by_plane": by_plane})
            said = ", ".join(f"{kind} {share:.3f}" for kind, share in shares.items())
            print(f"{name} without the {anchor} plane: {said}", file=sys.stderr)
    return rows


def _procrustes(x: Tensor, other: Tensor) -> Tensor:
    """The orthogonal R [..., Dh, Dh] by which other [..., N, Dh] comes closest to x."""
    u, _, v = torch.linalg.svd(other.transpose(-1, -2) @ x)
    rotation: Tensor = u @ v
    return rotation
