/* What attention to stored numbers and to codes share: where a tile lies, scores of a turned tile, its softmax. */
#ifndef DEPTHBATCH_ATTENTION_BASE_H
#define DEPTHBATCH_ATTENTION_BASE_H

#include "attention.h"
#include "vec.h"

#define TILE 16
#define CHAINS 8 /* that a score is the sum of */
#define TILE_QUERIES 6 /* whose sums fit the registers of AVX2 */
#define MAX_SUMS 8 /* of a query at a time, likewise */
#define RUN_QUERIES 48 /* of a prefill run: they share each tile that is read and turned, and stay near the first-level cache */

/* Physical block of `row` at logical block index `index`. */
INLINE int64_t physical_block(const LayerArgs *layer, const RowArgs *rows, int64_t row, int64_t index) {
    int64_t logical = rows->block_tables[(int64_t)rows->slots[row] * rows->table_stride + index];
    int64_t plane = layer->planes == 1 ? 0 : (rows->planes ? rows->planes[row] : rows->plane);
    return logical * layer->planes + plane;
}

/* Number of the vector of (block, head, offset 0), and the offset of its first element. */
INLINE int64_t tile_vector(const LayerArgs *layer, int64_t block, int64_t head) {
    return (block * layer->num_kv_heads + head) * layer->block_size;
}
INLINE int64_t tile_offset(const LayerArgs *layer, int64_t block, int64_t head) {
    return tile_vector(layer, block, head) * layer->head_dim;
}

INLINE int64_t smallest(int64_t a, int64_t b, int64_t c) {
    const int64_t d = a < b ? a : b;
    return d < c ? d : c;
}

/* Rows a thread takes at a time: half of what is left for it, at most 8. */
INLINE int64_t decode_share(int64_t items) {
    const int64_t share = items / (2 * team_size());
    return share < 1 ? 1 : share > 8 ? 8 : share;
}

#ifdef __AVX2__
INLINE __m256 multiply_add_256(__m256 a, __m256 b, __m256 c) {
#ifdef __FMA__
    return _mm256_fmadd_ps(a, b, c);
#else
    return _mm256_add_ps(_mm256_mul_ps(a, b), c);
#endif
}
/* The sums of 8 registers, each ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)) of its lanes. */
INLINE __m256 sums_of_8(const __m256 a[8]) {
    __m256 two[4], four[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* lanes 0 + 2 and 1 + 3 of both, in each half */
        two[i] = _mm256_add_ps(_mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0x4e), _mm256_blend_ps(a[2 * i], a[2 * i + 1], 0xcc));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) four[i] = _mm256_hadd_ps(two[2 * i], two[2 * i + 1]);
    return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x21), _mm256_blend_ps(four[0], four[1], 0xf0));
}
/* Rows r[0..7] of 8 words -> columns. */
INLINE void transpose_8x8(__m256i r[8]) {
    __m256i t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x20);
        t[4 + i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = t[i];
}
#endif

#define TILE_VECTORS (TILE / GEMM_LANES)

/* A score is the sum of CHAINS chains of multiply-adds: what a register of so many words holds, of 1 or 2 features each (`parts`),
 * that walks along a key. Queries and turned keys lie chain by chain, in the order in which chains are added up:
 * ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)). */
static const int chain_order[CHAINS] = {0, 2, 1, 3, 4, 6, 5, 7}; /* its own inverse */

/* Where the first feature of word `word` of a vector is among chains; others of the word follow. */
INLINE int64_t chain_place(int64_t word, int64_t dh, const int parts) {
    if (dh % (parts * CHAINS)) return word * parts; /* too short a rest: such vectors are summed up in chains only */
    return chain_order[word % CHAINS] * (dh / CHAINS) + word / CHAINS * parts;
}

/* to [dh] = features [dh] chain by chain. */
INLINE void order_features(float *to, const float *features, int dh, const int parts) {
    const int in_chains = dh % (parts * CHAINS) == 0, step = parts * (in_chains ? CHAINS : 1);
    for (int c = 0; c < (in_chains ? CHAINS : 1); c++)
        for (int d = chain_order[c] * parts; d < dh; d += step, to += parts) memcpy(to, features + d, parts * sizeof(float));
}

/* scores [ROWS, TILE] = q [ROWS, dh] times keys [dh, TILE], both chain by chain; ROWS a constant. */
INLINE void tile_scores(const int ROWS, const float *q, const float *keys, int dh, float *scores) {
    float two[TILE_QUERIES * TILE], four[TILE_QUERIES * TILE];
    for (int c = 0; c < CHAINS; c++) {
        vg acc[TILE_QUERIES][TILE_VECTORS] = {0};
        for (int d = 0; d < dh / CHAINS; d++, q++, keys += TILE) {
            vg key[TILE_VECTORS];
#pragma GCC unroll 2
            for (int i = 0; i < TILE_VECTORS; i++) key[i] = load_g(keys + i * GEMM_LANES);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const vg feature = splat_g(q[r * dh]);
#pragma GCC unroll 2
                for (int i = 0; i < TILE_VECTORS; i++) acc[r][i] = multiply_add(key[i], feature, acc[r][i]);
            }
        }
        float *to = c % 2 == 0 ? two : c % 4 == 1 ? four : scores;
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int i = 0; i < TILE_VECTORS; i++) {
                const int at = r * TILE + i * GEMM_LANES;
                vg sum = acc[r][i];
                if (c % 2 == 1) sum = load_g(two + at) + sum;
                if (c % 4 == 3) sum = load_g(four + at) + sum;
                if (c == 7) sum = load_g(scores + at) + sum;
                store_g(to + at, sum);
            }
    }
}

/* Queries of a block of at most TILE_QUERIES, of `left`: two even ones rather than a full one and a small one. */
INLINE int block_of(int left) {
    return left <= TILE_QUERIES ? left : left < 2 * TILE_QUERIES ? (left + 1) / 2 : TILE_QUERIES;
}

/* tile_scores of any number of queries. */
INLINE void tile_scores_of(int count, const float *q, const float *keys, int dh, float *scores) {
    for (int rows; count > 0; count -= rows, q += rows * dh, scores += rows * TILE) {
        rows = block_of(count);
#define ROWS_CASE(R) \
    case R: \
        tile_scores(R, q, keys, dh, scores); \
        break;
        switch (rows) { ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6) }
#undef ROWS_CASE
    }
}

/* Scores of tokens first .. n - 1 of a tile become weights, the others 0; brings maximum m and sums l [GEMM_LANES] up to date.
 * Returns what earlier sums are to be multiplied by. WHOLE, a constant: all 16 tokens. */
INLINE float tile_softmax(const int WHOLE, float *scores, float *m, float *l, int first, int n, float scale) {
    static const int32_t lane[TILE] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vg s[TILE_VECTORS];
    vgi valid[TILE_VECTORS];
#pragma GCC unroll 2
    for (int i = 0; i < TILE_VECTORS; i++) {
        const vgi token = (vgi)load_words(lane + i * GEMM_LANES);
        valid[i] = (token < n) & (token >= first);
        s[i] = load_g(scores + i * GEMM_LANES) * scale;
        if (!WHOLE) s[i] = blend_g(valid[i], s[i], splat_g(-INFINITY));
    }
    const vg largest = TILE_VECTORS == 2 ? max_g(s[0], s[TILE_VECTORS - 1]) : s[0];
    float shrink = 1.0f;
    vg sum = load_g(l);
    if (any_above(largest, *m)) { /* rare: after a few tiles the largest has been seen */
        const float top = hmax_g(largest);
        shrink = *m == -INFINITY ? 0.0f : exp_g(splat_g(*m - top))[0];
        sum *= shrink;
        *m = top;
    }
#pragma GCC unroll 2
    for (int i = 0; i < TILE_VECTORS; i++) {
        vg weights = exp_g(s[i] - *m);
        if (!WHOLE) weights = blend_g(valid[i], weights, (vg){0});
        store_g(scores + i * GEMM_LANES, weights);
        sum += weights;
    }
    store_g(l, sum);
    return shrink;
}

#endif
