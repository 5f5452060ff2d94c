/* Arguments of the attention kernels; mirrored by ctypes structures in library.py. */
#ifndef DEPTHBATCH_ATTENTION_H
#define DEPTHBATCH_ATTENTION_H

#include "team.h"

/* How K and V are stored: in the type of the queries, or as codes of a byte (worker/attention/kv_quantization.py). */
enum { KV_AUTO = 0, KV_INT8 = 1, KV_FP8 = 2 };

/* One cache layer: K and V are [num_blocks * planes, num_kv_heads, block_size, head_dim]; scales, bfloat16, the same without
 * the last dimension, or NULL. */
typedef struct {
    void *k_cache, *v_cache;
    uint16_t *k_scales, *v_scales;
    int32_t planes, num_heads, num_kv_heads, head_dim, block_size;
    int32_t window; /* tokens a query sees, itself included; 0: all */
    int32_t kind;   /* KV_... */
    int32_t element_bytes; /* of K and V */
    float scale;
} LayerArgs;

/* Where the rows live. planes == NULL: every row uses `plane`. */
typedef struct {
    const int32_t *slots, *positions, *planes, *block_tables;
    int64_t table_stride;
    int32_t num_rows, plane;
    int32_t rows_share_slots; /* prefill: rows of a sequence read each other's K/V */
} RowArgs;

enum { ROPE_NONE = 0, ROPE_SPLIT_HALF = 1, ROPE_INTERLEAVED = 2 };

/* q, k, v: rows `stride` elements apart, heads and features contiguous. out: [num_rows, num_heads * head_dim],
 * rows `out_stride` elements apart. */
typedef struct {
    const void *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    void *out;
    int64_t out_stride;
    const float *cos, *sin; /* [num_rows, head_dim / 2] */
    const void *q_bias, *k_bias; /* [num_heads * head_dim], [num_kv_heads * head_dim] or NULL; added before RoPE */
    int32_t rope;
} CallArgs;

/* Called by every thread of a team; a barrier ends it. */
void attend_team_f32(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier);
void attend_team_bf16(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier);
/* The same for K and V that are codes. */
void attend_codes_team_f32(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier);
void attend_codes_team_bf16(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier);

/* Copies K and V of the token at `position` from plane source to planes first .. end - 1; table: its sequence's blocks. */
void copy_planes(const LayerArgs *layer, const int32_t *table, int64_t position, int32_t source, int32_t first, int32_t end);

#endif
