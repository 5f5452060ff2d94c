/* Body of the attention kernels for one element type; included by attention_f32.h and attention_bf16.h, for K and V of that type
 * (attention.c) and for quantised ones (CODES; attention_codes.c).
 *
 * A query's state while tiles stream by: running max m, running sum l, fp32 accumulator acc [Dh] (attention_tiles.h,
 * attention_dot.h or attention_codes_tiles.h).
 */

#ifdef CODES
#define STORED uint8_t
#define PASS_TILES pass_codes
#else
#define STORED T
#define PASS_TILES NAME(pass_tiles)
#endif

/* Asks for the block a row begins with, while its projections are rotated and appended. */
INLINE void NAME(prefetch_first_block)(
    const LayerArgs *layer, const RowArgs *rows, int64_t row, int64_t head, int64_t num_heads
) {
    const int64_t at = tile_offset(layer, physical_block(layer, rows, row, 0), head);
    const int64_t elements = num_heads * layer->block_size * layer->head_dim;
    for (int64_t i = 0; i < elements; i += 64 / (int64_t)sizeof(STORED)) {
        __builtin_prefetch((const STORED *)layer->k_cache + at + i, 0, 2);
        __builtin_prefetch((const STORED *)layer->v_cache + at + i, 0, 2);
    }
}

/* dst [Dh] = rotate(src [Dh] + bias), rounded to T after the bias and at the end, as the plain operators do. */
INLINE void NAME(rotate)(
    T *dst, const T *src, const T *bias, const float *cos, const float *sin, int rope, int dh
) {
    if (rope == ROPE_NONE) {
        memcpy(dst, src, dh * sizeof(T));
        return;
    }
    int half = dh / 2, step = rope == ROPE_SPLIT_HALF ? half : 1, spread = rope == ROPE_SPLIT_HALF ? 1 : 2;
    if (rope == ROPE_SPLIT_HALF && !bias && half % GEMM_LANES == 0) {
        for (int i = 0; i < half; i += GEMM_LANES) {
            vg a = LOAD(src + i), b = LOAD(src + i + half), c = load_g(cos + i), s = load_g(sin + i);
            STORE(dst + i, a * c - b * s);
            STORE(dst + i + half, b * c + a * s);
        }
        return;
    }
    for (int i = 0; i < half; i++) {
        int at = i * spread;
        float a = GET(src + at), b = GET(src + at + step);
        if (bias) {
            a = ROUND(a + GET(bias + at));
            b = ROUND(b + GET(bias + at + step));
        }
        PUT(dst + at, a * cos[i] - b * sin[i]);
        PUT(dst + at + step, b * cos[i] + a * sin[i]);
    }
}

#ifdef CODES
#include "attention_codes.h"
#elif defined(DOT_BF16)
#include "attention_dot.h"
#include "attention_lanes.h"
#else
#include "attention_tiles.h"
#endif
#ifndef CODES
#define RUN NAME(Run)
#define ATTEND_TILE NAME(attend_tile)
INLINE void NAME(pass_tiles)(
#include "attention_pass.h"
#endif

/* Writes k and v of one row and head to the cache. */
INLINE void NAME(append)(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, int64_t row, int64_t head) {
    int dh = layer->head_dim;
    int64_t position = rows->positions[row], index = position / layer->block_size;
    int64_t at = tile_vector(layer, physical_block(layer, rows, row, index), head) + position % layer->block_size;
    const T *bias = call->k_bias ? (const T *)call->k_bias + head * dh : NULL;
    const T *k = (const T *)call->k + row * call->k_stride + head * dh;
    const T *v = (const T *)call->v + row * call->v_stride + head * dh;
    const float *cos = call->cos + row * (dh / 2), *sin = call->sin + row * (dh / 2);
    STORED *k_to = (STORED *)layer->k_cache + at * dh, *v_to = (STORED *)layer->v_cache + at * dh;
#ifdef CODES
    T rotated[dh];
    float wide[dh];
    NAME(rotate)(rotated, k, bias, cos, sin, call->rope, dh);
    NAME(widen)(wide, rotated, dh);
    layer->k_scales[at] = encode_vector(k_to, wide, dh, layer->kind);
    NAME(widen)(wide, v, dh);
    layer->v_scales[at] = encode_vector(v_to, wide, dh, layer->kind);
#else
    NAME(rotate)(k_to, k, bias, cos, sin, call->rope, dh);
    memcpy(v_to, v, dh * sizeof(T));
#endif
}

/* `count` rows from `row` (consecutive positions of one slot), kv heads head .. head + num_heads - 1. */
static void NAME(attend_run)(
    const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, int64_t row, int count, int64_t head, int num_heads,
    float *scratch
) {
    const int dh = layer->head_dim, group = layer->num_heads / layer->num_kv_heads, queries = count * group * num_heads;
    NAME(Run) run = NAME(make_run)(scratch, dh, queries, count * group);
#ifdef CODES
    NAME(take_kind)(&run, layer->kind, dh);
#endif
    for (int i = 0; i < queries; i++) { /* [num_heads, count, group] */
        const int64_t r = row + i / group % count, h = (head + i / (group * count)) * group + i % group;
        const T *q = (const T *)call->q + r * call->q_stride + h * dh;
        const T *bias = call->q_bias ? (const T *)call->q_bias + h * dh : NULL;
        NAME(start_query)(&run, i, q, bias, call->cos + r * (dh / 2), call->sin + r * (dh / 2), call->rope, dh);
    }
    PASS_TILES(&run, layer, rows, row, count, head, num_heads);
    for (int i = 0; i < queries; i++) {
        const int64_t r = row + i / group % count, h = (head + i / (group * count)) * group + i % group;
        NAME(finish_query)(&run, i, (T *)call->out + r * call->out_stride + h * dh, dh);
    }
}

/* Rows row, row + 1, ... below `end` that continue the sequence of `row`. */
INLINE int NAME(run_length)(const RowArgs *rows, int64_t row, int64_t end) {
    int count = 1;
    while (row + count < end && rows->slots[row + count] == rows->slots[row] &&
           rows->positions[row + count] == rows->positions[row] + count)
        count++;
    return count;
}

/* Rows that read nothing of each other (distinct slots, or distinct planes of one): a task is a row and all its heads,
 * or a share of them where rows are too few for the team. */
static void NAME(decode_team)(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call) {
    const int64_t n = rows->num_rows, heads = layer->num_kv_heads;
    const int64_t num_heads = team_size() > 1 && n < 4 * team_size() ? 1 : heads, shares = heads / num_heads;
    const int64_t queries = layer->num_heads / heads * num_heads;
    float scratch[NAME(run_floats)(layer->head_dim, (int)queries)] __attribute__((aligned(64)));
    /* A thread takes several neighbours at a time, since the prefetch at a row's end is for the next row. */
#pragma omp for schedule(dynamic, decode_share(n * shares)) nowait
    for (int64_t task = 0; task < n * shares; task++) {
        const int64_t head = task % shares * num_heads, row = task / shares;
        NAME(prefetch_first_block)(layer, rows, row, head, num_heads);
        for (int64_t h = head; h < head + num_heads; h++) NAME(append)(layer, rows, call, row, h);
        NAME(attend_run)(layer, rows, call, row, 1, head, (int)num_heads, scratch);
    }
}

/* Rows of a sequence read what others of it append: all appends first. A task is some rows and one kv head; runs are
 * found from multiples of that many rows, so that threads agree on them without a list. */
static void NAME(prefill_team)(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier) {
    const int64_t n = rows->num_rows, heads = layer->num_kv_heads;
    const int group = layer->num_heads / layer->num_kv_heads;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n; row++)
        for (int64_t head = 0; head < heads; head++) NAME(append)(layer, rows, call, row, head);
    team_barrier(barrier);
#ifdef DOT_BF16
    const int in_lanes = fits_lanes(layer);
    const size_t bytes = in_lanes ? lanes_scratch(layer->head_dim) : 0;
#else
    const int in_lanes = 0;
    const size_t bytes = 0;
#endif
    const int64_t stride = in_lanes ? LANES / group : group < RUN_QUERIES ? RUN_QUERIES / group : 1;
    const size_t plain_bytes = NAME(run_floats)(layer->head_dim, (int)stride * group) * sizeof(float);
    char scratch[in_lanes ? bytes : plain_bytes] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, 4) nowait
    for (int64_t task = 0; task < (n + stride - 1) / stride * heads; task++) {
        const int64_t head = task % heads, begin = task / heads * stride;
        const int64_t end = begin + stride < n ? begin + stride : n;
        for (int64_t row = begin, count; row < end; row += count) {
            count = NAME(run_length)(rows, row, end);
#ifdef DOT_BF16
            if (in_lanes) {
                attend_lanes(layer, rows, call, row, (int)count, head, scratch);
                continue;
            }
#endif
            NAME(attend_run)(layer, rows, call, row, (int)count, head, 1, (float *)scratch);
        }
    }
}

static void NAME(run_team)(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier) {
    if (rows->rows_share_slots) {
        NAME(prefill_team)(layer, rows, call, barrier);
    } else {
        NAME(decode_team)(layer, rows, call);
    }
    team_barrier(barrier);
}

/* for the next inclusion */
#undef NAME
#undef T
#undef LOAD
#undef STORE
#undef ROUND
#undef GET
#undef PUT
#undef PARTS
#undef OPERAND
#undef OPERAND_256
#undef WORDS
#undef CODES
#undef STORED
#undef PASS_TILES
#undef DOT_BF16
