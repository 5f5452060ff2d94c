/* Attention to quantised K and V (codes.h) as attention_tiles.h does it in fp32, with the same sums: of codes, by which scores,
 * then weights, are multiplied. One for queries of either type, which are widened before. */

typedef struct {
    Run_f32 tiles;
    float *values;                    /* [TILE, head_dim] of the tile and head at hand */
    const bf16 *k_scales, *v_scales;  /* of the tile at hand, first head */
    int kind;
    int in_whole; /* sums are of whole numbers: queries and weights of 16 bits, more than the 8 that bf16 has, with int8 codes */
} CodesRun;

INLINE size_t codes_run_floats(int dh, int queries) { return run_floats_f32(dh, queries) + (size_t)TILE * dh; }

INLINE CodesRun make_codes_run(float *scratch, int dh, int queries, int of_head) {
    Run_f32 tiles = make_run_f32(scratch, dh, queries, of_head);
#ifdef WIDE_CODES
    tiles.single = tiles.single && dh % 16 == 0;
#else
    tiles.single = 0;
#endif
    return (CodesRun){.tiles = tiles, .values = scratch + run_floats_f32(dh, queries)};
}

/* The tile at hand begins at vector `at`, the next one at `next`. */
INLINE void take_scales(CodesRun *run, const LayerArgs *layer, int64_t at, int64_t next, int num_heads) {
    run->k_scales = layer->k_scales + at, run->v_scales = layer->v_scales + at;
    for (int64_t i = 0; i < (int64_t)num_heads * layer->block_size; i += 64 / (int64_t)sizeof(bf16)) {
        __builtin_prefetch(layer->k_scales + next + i, 0, 2);
        __builtin_prefetch(layer->v_scales + next + i, 0, 2);
    }
}

/* A call with the kind of codes as a constant, so that only what reads codes is there twice. */
#define BY_KIND(function, kind, ...) \
    do { \
        if ((kind) == KV_INT8) function(__VA_ARGS__, KV_INT8); \
        else function(__VA_ARGS__, KV_FP8); \
    } while (0)

/* x [count, TILE] times the scales of a tile of n tokens. */
INLINE void times_scales(float *x, int count, const bf16 *scales, int n, int kind) {
    float factors[TILE];
    if (n == TILE) read_factors(factors, scales, TILE, kind);
    else read_factors(factors, scales, n, kind);
    for (int i = 0; i < count * TILE; i += TILE)
#pragma GCC unroll 2
        for (int lane = 0; lane < TILE; lane += GEMM_LANES) store_g(x + i + lane, load_g(x + i + lane) * load_g(factors + lane));
}

INLINE void score_codes(CodesRun *run, const uint8_t *k, const uint8_t *next, int i, int count, int n, int dh) {
    float *weights = run->tiles.weights + i * TILE;
    const float *q = run->tiles.q + i * dh;
#ifdef WIDE_CODES
    if (run->in_whole) {
        for (int j = 0; j < count; j++, q += dh, weights += TILE) {
            if (n == TILE) whole_scores((const int16_t *)q, q[dh / 2], k, next, TILE, dh, weights);
            else whole_scores((const int16_t *)q, q[dh / 2], k, next, n, dh, weights);
        }
        return;
    }
    if (run->tiles.single) {
        if (n == TILE) BY_KIND(query_codes, run->kind, q, k, next, TILE, dh, weights);
        else BY_KIND(query_codes, run->kind, q, k, next, n, dh, weights);
        return;
    }
#endif
    if (run->tiles.turned != (const float *)k) {
        BY_KIND(turn_codes, run->kind, run->tiles.keys, k, next, n, dh);
        run->tiles.turned = (const float *)k;
    }
    tile_scores_of(count, q, run->tiles.keys, dh, weights);
}

INLINE void add_value_codes(
    CodesRun *run, const uint8_t *v, const uint8_t *next, int i, int count, int group, int64_t end, int n, int dh
) {
#ifdef WIDE_CODES
    if (run->in_whole) {
        for (int j = 0; j < count; j++) {
            float *acc = run->tiles.acc + (i + j) * acc_width_f32(dh);
            add_whole(acc, run->tiles.weights + (i + j) * TILE, v, next, (int)smallest(n, end + j / group, n), dh);
        }
        return;
    }
    if (count == 1 && dh % 16 == 0) {
        float *acc = run->tiles.acc + i * acc_width_f32(dh), *weights = run->tiles.weights + i * TILE;
        const int seen = (int)smallest(n, end, n);
        BY_KIND(add_codes, run->kind, acc, weights, v, next, seen, dh);
        return;
    }
#endif
    BY_KIND(widen_codes, run->kind, run->values, v, next, n, dh);
    value_head_f32(&run->tiles, run->values, run->values, i, count, group, end, n, dh);
}

/* As attend_tile of attention_tiles.h. */
INLINE void attend_codes_tile(
    CodesRun *run, const uint8_t *k, const uint8_t *v, const uint8_t *next_k, const uint8_t *next_v, int64_t stride,
    int num_heads, int count, int group, int c, int together, int first, int64_t end, int n, int dh, float scale
) {
    const int queries = together * group;
    const int64_t vectors = stride / dh;
    for (int h = 0; h < num_heads; h++) {
        const int i = (h * count + c) * group;
        score_codes(run, k + h * stride, next_k + h * stride, i, queries, n, dh);
        times_scales(run->tiles.weights + i * TILE, queries, run->k_scales + h * vectors, n, run->kind);
    }
    for (int h = 0; h < num_heads; h++) {
        const int i = (h * count + c) * group;
        weigh_f32(&run->tiles, i, queries, group, first, end, n, dh, scale);
        times_scales(run->tiles.weights + i * TILE, queries, run->v_scales + h * vectors, n, run->kind);
    }
    for (int h = 0; h < num_heads; h++)
        add_value_codes(run, v + h * stride, next_v + h * stride, (h * count + c) * group, queries, group, end, n, dh);
}
#undef BY_KIND

#define RUN CodesRun
#define STORED uint8_t
#define ATTEND_TILE attend_codes_tile
#define TAKE_SCALES take_scales
static void pass_codes(
#include "attention_pass.h"
#undef STORED
#undef TAKE_SCALES
