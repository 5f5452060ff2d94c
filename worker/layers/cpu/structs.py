"""ctypes mirrors of the argument structures in attention.h, gemm.h, stack.h, prelude.h and coda.h; field order is the C order."""

import ctypes

from depthbatch.common.kv_cache_dtype import KVCacheDtype

PTR, I64, I32, F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

ROPE_NONE, ROPE_SPLIT_HALF, ROPE_INTERLEAVED = range(3)  # attention.h
KV_KINDS = {KVCacheDtype.AUTO: 0, KVCacheDtype.INT8: 1, KVCacheDtype.FP8: 2}  # attention.h


class LayerArgs(ctypes.Structure):
    """One cache layer."""

    _fields_ = [
        ("k_cache", PTR),
        ("v_cache", PTR),
        ("k_scales", PTR),
        ("v_scales", PTR),
        ("planes", I32),
        ("num_heads", I32),
        ("num_kv_heads", I32),
        ("head_dim", I32),
        ("block_size", I32),
        ("window", I32),
        ("kind", I32),
        ("element_bytes", I32),
        ("scale", F32),
    ]


class RowArgs(ctypes.Structure):
    """Where the rows live."""

    _fields_ = [
        ("slots", PTR),
        ("positions", PTR),
        ("planes", PTR),
        ("block_tables", PTR),
        ("table_stride", I64),
        ("num_rows", I32),
        ("plane", I32),
        ("rows_share_slots", I32),
    ]


class CallArgs(ctypes.Structure):
    """Inputs and output of one attention call; strides in elements."""

    _fields_ = [
        ("q", PTR),
        ("k", PTR),
        ("v", PTR),
        ("q_stride", I64),
        ("k_stride", I64),
        ("v_stride", I64),
        ("out", PTR),
        ("out_stride", I64),
        ("cos", PTR),
        ("sin", PTR),
        ("q_bias", PTR),
        ("k_bias", PTR),
        ("rope", I32),
    ]


class PackedArgs(ctypes.Structure):
    """One linear layer (Packed in gemm.h)."""

    _fields_ = [("packed", PTR), ("scales", PTR), ("cols", I64), ("k", I64), ("gated", I32), ("group", I32)]


class BlockArgs(ctypes.Structure):
    """Weights and cache of one transformer block."""

    _fields_ = [
        ("norm_in", PTR),
        ("norm_mlp_in", PTR),
        ("norm_out", PTR),
        ("norm_mlp_out", PTR),
        ("q_norm", PTR),
        ("k_norm", PTR),
        ("q_norm_width", I64),
        ("k_norm_width", I64),
        ("q_bias", PTR),
        ("k_bias", PTR),
        ("cache", PTR),
        ("qkv", PackedArgs),
        ("out", PackedArgs),
        ("gate_up", PackedArgs),
        ("down", PackedArgs),
    ]


class StackArgs(ctypes.Structure):
    """A run of blocks."""

    _fields_ = [
        ("blocks", PTR),
        ("final_norm", PTR),
        ("num_blocks", I64),
        ("hidden", I64),
        ("norm_on_sum", I32),
        ("eps", F32),
    ]


class StackCall(ctypes.Structure):
    """Inputs, output and scratch of one run; strides in elements."""

    _fields_ = [
        ("x", PTR),
        ("out", PTR),
        ("normed", PTR),
        ("projected", PTR),
        ("attended", PTR),
        ("branch", PTR),
        ("inner", PTR),
        ("quantised", PTR),
        ("normed_stride", I64),
        ("projected_stride", I64),
        ("attended_stride", I64),
        ("inner_stride", I64),
        ("cos", PTR),
        ("sin", PTR),
        ("rope", I32),
    ]


class CoreArgs(ctypes.Structure):
    """What of a core step stays the same."""

    _fields_ = [
        ("stack", PTR),
        ("item", PTR),
        ("injection", PTR),
        ("adapter", PackedArgs),
        ("cos", PTR),
        ("sin", PTR),
        ("half", I64),
        ("block_tables", PTR),
        ("table_stride", I64),
        ("planes", I32),
    ]


class CoreCall(ctypes.Structure):
    """Input and scratch of one core step."""

    _fields_ = [
        ("frame", PTR),
        ("n", I64),
        ("planes", PTR),
        ("cos", PTR),
        ("sin", PTR),
        ("wide", PTR),
        ("wide_stride", I64),
        ("stack", StackCall),
    ]


class PreludeArgs(ctypes.Structure):
    """What of a prelude stays the same."""

    _fields_ = [
        ("embedding", PTR),
        ("item", PTR),
        ("row_bytes", I64),
        ("token", PTR),
        ("survival", PTR),
        ("cumulated", PTR),
        ("block_tables", PTR),
        ("table_stride", I64),
        ("block_size", I64),
    ]


class CodaArgs(ctypes.Structure):
    """What of a coda stays the same."""

    _fields_ = [
        ("item", PTR),
        ("norm", PTR),
        ("head", PackedArgs),
        ("next_lane", PTR),
        ("token", PTR),
        ("params", PTR),
        ("param_words", I64),
        ("temperature", I32),
        ("seed_low", I32),
        ("seed_high", I32),
        ("eps", F32),
        ("layers", PTR),
        ("num_layers", I32),
        ("planes", I32),
        ("block_tables", PTR),
        ("table_stride", I64),
    ]


class CodaCall(ctypes.Structure):
    """Inputs, output and scratch of one coda; the stride in elements."""

    _fields_ = [
        ("frame", PTR),
        ("hidden", PTR),
        ("normed", PTR),
        ("logits", PTR),
        ("weights", PTR),
        ("tokens", PTR),
        ("n", I64),
        ("normed_stride", I64),
    ]
