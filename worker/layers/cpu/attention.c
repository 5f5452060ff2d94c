/* Paged attention that reads the cache in place: append, rotate and attend in one call over all rows and heads.
 *
 * Decode takes a row at a time, prefill a run of consecutive positions of one sequence, so that a K/V tile loaded once
 * serves several queries. Softmax is online over tiles of 16 tokens in fp32; the order of every sum is fixed by the
 * position alone.
 */
#include "attention.h"
#include "vec.h"

#define TILE 16
#define TILE_QUERIES 6 /* whose sums fit the registers of AVX2 */
#define MAX_SUMS 8 /* of a query at a time, likewise */
#define RUN_QUERIES 24 /* of a prefill run: they share each tile that is read, and stay in the first-level cache */
#define PARALLEL_MIN_TOKENS 64 /* cached tokens over all rows and heads below which a second thread costs more than it saves */

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

/* scores [ROWS, TILE] = q [ROWS, dh] times keys [dh, TILE], ROWS a constant. The sum of two chains, one a half of the features:
 * with few queries a chain takes as long as its steps wait for each other. */
INLINE void tile_scores(const int ROWS, const float *q, const float *keys, int dh, float *scores) {
    const int half = dh / 2, together = ROWS <= 2 ? 2 : 1; /* chains at a time */
#pragma GCC unroll 2
    for (int chain = 0; chain < 2; chain += together) {
        vg acc[2][TILE_QUERIES][TILE_VECTORS] = {0};
        for (int d = 0; d < half; d++)
#pragma GCC unroll 2
            for (int c = 0; c < together; c++) {
                const int at = (chain + c) * half + d;
                vg key[TILE_VECTORS];
#pragma GCC unroll 2
                for (int i = 0; i < TILE_VECTORS; i++) key[i] = load_g(keys + at * TILE + i * GEMM_LANES);
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; r++) {
                    const vg feature = splat_g(q[r * dh + at]);
#pragma GCC unroll 2
                    for (int i = 0; i < TILE_VECTORS; i++) acc[c][r][i] = multiply_add(key[i], feature, acc[c][r][i]);
                }
            }
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int i = 0; i < TILE_VECTORS; i++) {
                float *to = scores + r * TILE + i * GEMM_LANES;
                if (together == 2) store_g(to, acc[0][r][i] + acc[1][r][i]);
                else store_g(to, chain ? load_g(to) + acc[0][r][i] : acc[0][r][i]);
            }
        __asm__ volatile("" ::: "memory"); /* the first chain's sums wait in memory, or they take the second's registers */
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

/* Scores of tokens first .. n - 1 of a tile become weights, the others 0; brings maximum m and sum l up to date. Returns what
 * earlier sums are to be multiplied by. WHOLE, a constant: all 16 tokens. */
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
    const float top = hmax_g(TILE_VECTORS == 2 ? max_g(s[0], s[TILE_VECTORS - 1]) : s[0]);
    float shrink = 1.0f;
    if (top > *m) {
        shrink = *m == -INFINITY ? 0.0f : exp_g(splat_g(*m - top))[0];
        *l *= shrink;
        *m = top;
    }
    union { vg part[TILE_VECTORS]; vf whole; } weights;
#pragma GCC unroll 2
    for (int i = 0; i < TILE_VECTORS; i++) {
        weights.part[i] = exp_g(s[i] - *m);
        if (!WHOLE) weights.part[i] = blend_g(valid[i], weights.part[i], (vg){0});
        store_g(scores + i * GEMM_LANES, weights.part[i]);
    }
    *l += hsum(weights.whole);
    return shrink;
}

#include "codes.h"

#define T float
#define NAME(x) x##_f32
#define LOAD load_f32
#define STORE store_f32
#define ROUND scalar_round_f32
#define GET scalar_get_f32
#define PUT scalar_put_f32
#define PARTS 1
#define OPERAND(words, part) ((vg)(words))
#define WORDS(low, high) ((vgu)(low))
#define OPERAND_256(words, part) _mm256_castsi256_ps(words)
#include "attention_impl.h"
#define NAME(x) x##_f32_codes
#define CODES 1
#include "attention_impl.h"
#undef T
#undef LOAD
#undef STORE
#undef ROUND
#undef GET
#undef PUT

#define T bf16
#define LOAD load_bf16
#define STORE store_bf16
#define ROUND scalar_round_bf16
#define GET scalar_get_bf16
#define PUT scalar_put_bf16
#define NAME(x) x##_bf16_codes
#define CODES 1
#include "attention_impl.h"
#define NAME(x) x##_bf16
#ifdef __AVX512BF16__
#define DOT_BF16 1
#endif
#define PARTS 2 /* of a word: its first, then its second bf16 */
#define OPERAND(words, part) ((vg)((part) ? (words) & 0xffff0000u : (words) << 16))
#define OPERAND_256(words, part) \
    _mm256_castsi256_ps((part) ? _mm256_and_si256(words, _mm256_set1_epi32(0xffff0000)) : _mm256_slli_epi32(words, 16))
#define WORDS(low, high) (rounded_words(low) >> 16 | (rounded_words(high) & 0xffff0000u))
#include "attention_impl.h"

void attend_team_f32(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier) {
    if (layer->kind == KV_AUTO) run_team_f32(layer, rows, call, barrier);
    else run_team_f32_codes(layer, rows, call, barrier);
}
void attend_team_bf16(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier) {
    if (layer->kind == KV_AUTO) run_team_bf16(layer, rows, call, barrier);
    else run_team_bf16_codes(layer, rows, call, barrier);
}

/* Whether the work is worth a second thread. */
INLINE int is_large(const LayerArgs *layer, const RowArgs *rows) {
    int64_t tokens = 0;
    for (int64_t row = 0; row < rows->num_rows; row++) tokens += rows->positions[row] + 1;
    return tokens * layer->num_kv_heads >= PARALLEL_MIN_TOKENS;
}

EXPORT void db_attend_f32(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call) {
    Barrier barrier = {0};
#pragma omp parallel if (is_large(layer, rows))
    attend_team_f32(layer, rows, call, &barrier);
}
EXPORT void db_attend_bf16(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call) {
    Barrier barrier = {0};
#pragma omp parallel if (is_large(layer, rows))
    attend_team_bf16(layer, rows, call, &barrier);
}

/* Copies K and V of each row's position from plane source[b] to planes first[b] .. end[b]-1 of every layer. */
EXPORT void db_copy_planes(
    const LayerArgs *layers, int32_t num_layers, const RowArgs *rows, const int32_t *source, const int32_t *first,
    const int32_t *end, int32_t element_bytes
) {
    for (int32_t l = 0; l < num_layers; l++) {
        const LayerArgs *layer = &layers[l];
        const size_t bytes[4] = {layer->head_dim * element_bytes, layer->head_dim * element_bytes, 2, 2}; /* of a vector */
        char *memory[4] = {layer->k_cache, layer->v_cache, (char *)layer->k_scales, (char *)layer->v_scales};
        const int kept = layer->kind == KV_AUTO ? 2 : 4;
        for (int64_t b = 0; b < rows->num_rows; b++) {
            int64_t index = rows->positions[b] / layer->block_size, offset = rows->positions[b] % layer->block_size;
            if (first[b] >= end[b]) continue;
            int64_t block = rows->block_tables[(int64_t)rows->slots[b] * rows->table_stride + index] * (int64_t)layer->planes;
            for (int32_t head = 0; head < layer->num_kv_heads; head++) {
                int64_t from = tile_vector(layer, block + source[b], head) + offset;
                for (int32_t plane = first[b]; plane < end[b]; plane++) {
                    int64_t to = tile_vector(layer, block + plane, head) + offset;
                    for (int i = 0; i < kept; i++) memcpy(memory[i] + to * bytes[i], memory[i] + from * bytes[i], bytes[i]);
                }
            }
        }
    }
}
