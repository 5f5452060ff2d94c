/* Attention to quantised K and V (codes.h) for one type of queries, as attention_tiles.h does it in fp32, with the same sums: of
 * codes, by which scores, then weights, are multiplied. Included by attention_impl.h; the same names as attention_tiles.h.
 */

typedef struct {
    Run_f32 tiles;
    float *m, *l;                     /* of the tiles */
    float *values;                    /* [TILE, head_dim] of the tile and head at hand */
    const bf16 *k_scales, *v_scales;  /* of the tile at hand, first head */
    int kind;
} NAME(Run);

INLINE size_t NAME(run_floats)(int dh, int queries) { return run_floats_f32(dh, queries) + (size_t)TILE * dh; }

INLINE NAME(Run) NAME(make_run)(float *scratch, int dh, int queries) {
    const Run_f32 tiles = make_run_f32(scratch, dh, queries);
    return (NAME(Run)){.tiles = tiles, .m = tiles.m, .l = tiles.l, .values = scratch + run_floats_f32(dh, queries)};
}

INLINE void NAME(widen)(float *wide, const T *x, int dh) {
    int d = 0;
    for (; d + LANES <= dh; d += LANES) store_f32(wide + d, LOAD(x + d));
    for (; d < dh; d++) wide[d] = GET(x + d);
}

/* Whether sums are of whole numbers: int8 with queries and weights of 16 bits, more than their 8 in bf16. */
INLINE int NAME(in_whole)(int kind, int dh) {
#ifdef WIDE_CODES
    return kind == KV_INT8 && sizeof(T) == 2 && dh % 16 == 0;
#else
    return 0;
#endif
}

INLINE void NAME(start_query)(
    const NAME(Run) * run, int i, const T *q, const T *bias, const float *cos, const float *sin, int rope, int dh
) {
    T rotated[dh];
    NAME(rotate)(rotated, q, bias, cos, sin, rope, dh);
    float *wide = run->tiles.q + i * dh;
    NAME(widen)(wide, rotated, dh);
    if (NAME(in_whole)(run->kind, dh)) { /* [head_dim] whole numbers, then what one is worth */
        int16_t whole[dh];
        const float worth = to_whole(whole, wide, dh, dh);
        memcpy(wide, whole, sizeof(whole));
        wide[dh / 2] = worth;
    }
    memset(run->tiles.acc + i * acc_width_f32(dh), 0, sizeof(float) * acc_width_f32(dh));
}

/* The tile at hand begins at vector `at`, the next one at `next`. */
INLINE void NAME(take_scales)(NAME(Run) * run, const LayerArgs *layer, int64_t at, int64_t next, int num_heads) {
    run->k_scales = layer->k_scales + at, run->v_scales = layer->v_scales + at;
    for (int64_t i = 0; i < (int64_t)num_heads * layer->block_size; i += 64 / (int64_t)sizeof(bf16)) {
        __builtin_prefetch(layer->k_scales + next + i, 0, 2);
        __builtin_prefetch(layer->v_scales + next + i, 0, 2);
    }
}

/* x [count, TILE] times the scales of a tile of n tokens. */
INLINE void NAME(times_scales)(float *x, int count, const bf16 *scales, int n, const int KIND) {
    float factors[TILE];
    if (n == TILE) read_factors(factors, scales, TILE, KIND);
    else read_factors(factors, scales, n, KIND);
    for (int i = 0; i < count * TILE; i += LANES) store_f32(x + i, load_f32(x + i) * load_f32(factors));
}

INLINE void NAME(score_head)(
    NAME(Run) * run, const uint8_t *k, const uint8_t *next, int i, int count, int n, int dh, const int KIND
) {
    float *weights = run->tiles.weights + i * TILE;
    const float *q = run->tiles.q + i * dh;
#ifdef WIDE_CODES
    if (NAME(in_whole)(KIND, dh)) {
        for (int j = 0; j < count; j++, q += dh, weights += TILE) {
            if (n == TILE) whole_scores((const int16_t *)q, q[dh / 2], k, next, TILE, dh, weights);
            else whole_scores((const int16_t *)q, q[dh / 2], k, next, n, dh, weights);
        }
        return;
    }
    if (count == 1 && dh % 32 == 0) {
        if (n == TILE) query_codes(q, k, next, TILE, dh, weights, KIND);
        else query_codes(q, k, next, n, dh, weights, KIND);
        return;
    }
#endif
    if (run->tiles.turned != (const float *)k) {
        turn_codes(run->tiles.keys, k, next, n, dh, KIND);
        run->tiles.turned = (const float *)k;
    }
    tile_scores_of(count, q, run->tiles.keys, dh, weights);
}

INLINE void NAME(value_head)(
    NAME(Run) * run, const uint8_t *v, const uint8_t *next, int i, int count, int group, int64_t end, int n, int dh, const int KIND
) {
#ifdef WIDE_CODES
    if (NAME(in_whole)(KIND, dh)) {
        for (int j = 0; j < count; j++) {
            float *acc = run->tiles.acc + (i + j) * acc_width_f32(dh);
            add_whole(acc, run->tiles.weights + (i + j) * TILE, v, next, (int)smallest(n, end + j / group, n), dh);
        }
        return;
    }
    if (count == 1 && dh % 16 == 0) {
        float *acc = run->tiles.acc + i * acc_width_f32(dh);
        add_codes(acc, run->tiles.weights + i * TILE, v, next, (int)smallest(n, end, n), dh, KIND);
        return;
    }
#endif
    widen_codes(run->values, v, next, n, dh, KIND);
    value_head_f32(&run->tiles, run->values, run->values, i, count, group, end, n, dh);
}

INLINE void NAME(attend_tile_of)(
    NAME(Run) * run, const uint8_t *k, const uint8_t *v, const uint8_t *next_k, const uint8_t *next_v, int64_t stride,
    int num_heads, int count, int group, int c, int together, int first, int64_t end, int n, int dh, float scale, const int KIND
) {
    const int queries = together * group;
    const int64_t vectors = stride / dh;
    for (int h = 0; h < num_heads; h++) {
        const int i = (h * count + c) * group;
        NAME(score_head)(run, k + h * stride, next_k + h * stride, i, queries, n, dh, KIND);
        NAME(times_scales)(run->tiles.weights + i * TILE, queries, run->k_scales + h * vectors, n, KIND);
    }
    for (int h = 0; h < num_heads; h++) {
        const int i = (h * count + c) * group;
        weigh_f32(&run->tiles, i, queries, group, first, end, n, dh, scale);
        NAME(times_scales)(run->tiles.weights + i * TILE, queries, run->v_scales + h * vectors, n, KIND);
    }
    for (int h = 0; h < num_heads; h++)
        NAME(value_head)(run, v + h * stride, next_v + h * stride, (h * count + c) * group, queries, group, end, n, dh, KIND);
}

static void NAME(attend_tile)(
    NAME(Run) * run, const uint8_t *k, const uint8_t *v, const uint8_t *next_k, const uint8_t *next_v, int64_t stride,
    int num_heads, int count, int group, int c, int together, int first, int64_t end, int n, int dh, float scale
) {
#define ATTEND(KIND) \
    NAME(attend_tile_of)( \
        run, k, v, next_k, next_v, stride, num_heads, count, group, c, together, first, end, n, dh, scale, KIND \
    )
    if (run->kind == KV_INT8) ATTEND(KV_INT8);
    else ATTEND(KV_FP8);
#undef ATTEND
}

/* out [dh] = acc / l of one query. */
INLINE void NAME(finish_query)(const NAME(Run) * run, int i, T *out, int dh) {
    const float *acc = run->tiles.acc + i * acc_width_f32(dh), inverse = 1.0f / run->l[i];
    int d = 0;
    for (; d + LANES <= dh; d += LANES) STORE(out + d, load_f32(acc + d) * inverse);
    for (; d < dh; d++) PUT(out + d, acc[d] * inverse);
}
