/* Prefill attention in bf16 with one query a lane: 16 queries of a sequence share every K/V tile they read.
 *
 *     scores  [16 tokens][16 lanes]   vdpbf16ps of transposed queries with broadcast pairs of a key
 *     softmax                         down the tokens: no sum or maximum across lanes
 *     acc     [head_dim][16 lanes]    vdpbf16ps of pairs of weights with broadcast pairs of two values
 *
 * A lane computes the same whatever the other lanes hold, so a query's bits depend on its position alone and not on
 * how a prompt is cut into chunks. They are not those of the decode kernel, which sums in another order.
 * Included by attention.c where the processor has bf16 dot products.
 */

/* Rows r[0..15] of 16 words -> columns. */
INLINE void transpose_16x16(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) { /* 128-bit lanes: rows 4j + i hold columns i, 4 + i, 8 + i, 12 + i of row group j */
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

typedef struct {
    uint32_t *queries; /* [head_dim / 2][16 lanes] pairs of features */
    uint32_t *values;  /* [8 pairs of tokens][head_dim] of the tile at hand */
    float *acc;        /* [head_dim][16 lanes] */
    vi positions;      /* of each lane's row */
    vf m, l;
} Lanes;

/* Bytes of scratch for one run, each part a multiple of 64. */
INLINE size_t lanes_scratch(int dh) { return (size_t)dh / 2 * 64 + (size_t)dh * 32 + (size_t)dh * 64; }

/* Whether runs of this layer fit the lanes. */
INLINE int fits_lanes(const LayerArgs *layer) {
    const int group = layer->num_heads / layer->num_kv_heads;
    return !layer->window && layer->head_dim % 32 == 0 && layer->block_size % TILE == 0 && LANES % group == 0;
}

/* Lane c * group + g holds row `row + c`, query head g of kv head `head`; lanes beyond repeat the last row's position. */
INLINE void start_lanes(
    Lanes *lanes, const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, int64_t row, int count, int64_t head
) {
    const int dh = layer->head_dim, group = layer->num_heads / layer->num_kv_heads, used = count * group;
    bf16 rotated[LANES * dh] __attribute__((aligned(64)));
    memset(rotated, 0, sizeof(rotated));
    int32_t positions[LANES];
    for (int i = 0; i < LANES; i++) {
        const int64_t r = row + (i < used ? i / group : count - 1), h = head * group + i % group;
        positions[i] = rows->positions[r];
        if (i >= used) continue;
        const bf16 *q = (const bf16 *)call->q + r * call->q_stride + h * dh;
        const bf16 *bias = call->q_bias ? (const bf16 *)call->q_bias + h * dh : NULL;
        rotate_bf16(rotated + i * dh, q, bias, call->cos + r * (dh / 2), call->sin + r * (dh / 2), call->rope, dh);
    }
    for (int d = 0; d < dh; d += 32) {
        __m512i r[LANES];
        for (int i = 0; i < LANES; i++) r[i] = _mm512_loadu_si512(rotated + i * dh + d);
        transpose_16x16(r);
        for (int i = 0; i < LANES; i++) _mm512_store_si512(lanes->queries + (d / 2 + i) * LANES, r[i]);
    }
    memcpy(&lanes->positions, positions, sizeof(positions));
    memset(lanes->acc, 0, sizeof(float) * dh * LANES);
    lanes->m = splat(-INFINITY);
    lanes->l = splat(0.0f);
}

/* Pairs of values (v[2p][d], v[2p + 1][d]); tokens from n on are zeros, since stale memory may hold a NaN. */
INLINE void interleave_values(uint32_t *out, const bf16 *v, int n, int dh) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int p = 0; p < TILE / 2; p++)
        for (int d = 0; d < dh; d += 32) {
            const __m512i zero = _mm512_setzero_si512();
            __m512i a = 2 * p < n ? _mm512_loadu_si512(v + 2 * p * dh + d) : zero;
            __m512i b = 2 * p + 1 < n ? _mm512_loadu_si512(v + (2 * p + 1) * dh + d) : zero;
            __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
            _mm512_store_si512(out + p * dh + d, _mm512_permutex2var_epi32(low, first, high));
            _mm512_store_si512(out + p * dh + d + LANES, _mm512_permutex2var_epi32(low, second, high));
        }
}

/* One tile of n tokens from position `start`. */
static void lanes_tile(Lanes *lanes, const bf16 *k, const bf16 *v, int64_t start, int n, int dh, float scale) {
    __m512 s[TILE];
    for (int t = 0; t < TILE; t++) s[t] = _mm512_setzero_ps();
    for (int i = 0; i < dh / 2; i++) {
        __m512bh q = (__m512bh)_mm512_load_si512(lanes->queries + i * LANES);
#pragma GCC unroll 16
        for (int t = 0; t < TILE; t++) s[t] = _mm512_dpbf16_ps(s[t], q, (__m512bh)broadcast_word(k + t * dh + 2 * i));
    }
    vf top = lanes->m;
#pragma GCC unroll 16
    for (int t = 0; t < TILE; t++) {
        const vi visible = lanes->positions >= (int32_t)(start + t);
        s[t] = (__m512)blend(visible, (vf)s[t] * scale, splat(-INFINITY));
        top = (vf)_mm512_max_ps(s[t], (__m512)top); /* a NaN score is passed over here and comes back in exp */
    }
    const vf shrink = exp_g(lanes->m - top);
    vf sum = splat(0.0f);
    __m512bh pairs[TILE / 2];
#pragma GCC unroll 8
    for (int p = 0; p < TILE / 2; p++) {
        vf even = exp_g((vf)s[2 * p] - top), odd = exp_g((vf)s[2 * p + 1] - top);
        sum += even + odd;
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
        const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
        pairs[p] = (__m512bh)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
    lanes->m = top;
    lanes->l = lanes->l * shrink + sum;
    interleave_values(lanes->values, v, n, dh);
    for (int d = 0; d < dh; d += 4) {
        __m512 acc[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[j] = (__m512)(load_f32(lanes->acc + (d + j) * LANES) * shrink);
#pragma GCC unroll 8
        for (int p = 0; p < TILE / 2; p++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                acc[j] = _mm512_dpbf16_ps(acc[j], pairs[p], (__m512bh)broadcast_word(lanes->values + p * dh + d + j));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_store_ps(lanes->acc + (d + j) * LANES, acc[j]);
    }
}

INLINE void finish_lanes(const Lanes *lanes, const LayerArgs *layer, const CallArgs *call, int64_t row, int count, int64_t head) {
    const int dh = layer->head_dim, group = layer->num_heads / layer->num_kv_heads;
    const vf inverse = 1.0f / lanes->l;
    for (int d = 0; d < dh; d += LANES) {
        __m512i r[LANES];
        for (int i = 0; i < LANES; i++) r[i] = (__m512i)(load_f32(lanes->acc + (d + i) * LANES) * inverse);
        transpose_16x16(r);
        for (int i = 0; i < count * group; i++) {
            bf16 *out = (bf16 *)call->out + (row + i / group) * call->out_stride + (head * group + i % group) * dh;
            store_g_bf16(out + d, (vf)r[i]);
        }
    }
}

/* `count` rows from `row` (consecutive positions of one slot), at most 16 / group of them. */
static void attend_lanes(
    const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, int64_t row, int count, int64_t head, char *scratch
) {
    const int dh = layer->head_dim;
    Lanes lanes = {.queries = (uint32_t *)scratch};
    lanes.values = lanes.queries + dh / 2 * LANES;
    lanes.acc = (float *)(lanes.values + TILE / 2 * dh);
    start_lanes(&lanes, layer, rows, call, row, count, head);
    const int64_t last = rows->positions[row] + count - 1, size = layer->block_size;
    for (int64_t start = 0; start <= last; start += TILE) {
        const int64_t at = tile_offset(layer, physical_block(layer, rows, row, start / size), head) + start % size * dh;
        const int n = last + 1 - start < TILE ? (int)(last + 1 - start) : TILE;
        lanes_tile(&lanes, (const bf16 *)layer->k_cache + at, (const bf16 *)layer->v_cache + at, start, n, dh, layer->scale);
    }
    finish_lanes(&lanes, layer, call, row, count, head);
}
