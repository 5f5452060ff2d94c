/* Products with int8 weights: packing, sums of bytes, and the two element types around them (see int8.h). */
#include "int8.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define BYTE_LANES 16 /* sums in a register; 28 accumulators, two weights and two spare registers */
#define MAX_BYTE_ROWS 14 /* rows of a tile */
#elif defined(__AVX2__)
#define BYTE_LANES 8 /* 8 accumulators, two weights twice, and four spare registers */
#define MAX_BYTE_ROWS 4
#else
#define MAX_BYTE_ROWS 14
#endif

#define SMALLEST 0x1p-100f /* rows below it count as zeros: 127 over less is no number */
#define CHUNK_BYTE_ROWS (9 * MAX_BYTE_ROWS) /* rows that pass all weights before the next */
#define BYTE_PREFETCH_MIN_ROWS 5
#define BYTE_PREFETCH 8192

/* What is behind the bytes of a quantised row. */
typedef struct {
    float scale;
    int32_t sum; /* of the row's bytes */
    char unused[INT8_STEP - 8];
} RowScale;

INLINE int64_t padded(int64_t k) { return (k + INT8_STEP - 1) / INT8_STEP * INT8_STEP; }
INLINE int64_t row_bytes(int64_t k) { return padded(k) + (int64_t)sizeof(RowScale); }
INLINE int64_t layer_pairs(int64_t cols, int gated) {
    return gated ? (cols + LANES - 1) / LANES : (cols + PAIR_COLUMNS - 1) / PAIR_COLUMNS;
}

/* Bytes of one quantised row of k features. */
EXPORT int64_t db_int8_row_bytes(int64_t k) { return row_bytes(k); }

/* Bytes of a packed weight [cols, k]; it has a scale for every padded(k) of them. */
EXPORT int64_t db_int8_packed_size(int64_t cols, int64_t k, int32_t gated) {
    return layer_pairs(gated ? cols / 2 : cols, gated) * PAIR_COLUMNS * padded(k);
}

/* weight [cols, k], scales [cols] -> packed and packed_scales; columns beyond cols are zeros. gated: first half gate, second
 * up. */
EXPORT void db_int8_pack(
    uint8_t *packed, float *packed_scales, const int8_t *weight, const float *scales, int64_t cols, int64_t k, int32_t gated
) {
    const int64_t half = cols / 2, pairs = layer_pairs(gated ? half : cols, gated);
#pragma omp parallel for schedule(static)
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t lane = 0; lane < PAIR_COLUMNS; lane++) {
            int64_t column = pair * PAIR_COLUMNS + lane;
            if (gated) column = pair * LANES + lane % LANES < half ? pair * LANES + lane % LANES + (lane / LANES) * half : cols;
            packed_scales[pair * PAIR_COLUMNS + lane] = column < cols ? scales[column] : 0.0f;
            for (int64_t i = 0; i < padded(k); i++) {
                const int value = column < cols && i < k ? weight[column * k + i] : 0;
                packed[(pair * padded(k) + i / 4 * 4) * PAIR_COLUMNS + lane * 4 + i % 4] = (uint8_t)(value + 128);
            }
        }
}

#ifdef BYTE_LANES
#define BYTE_VECTORS (PAIR_COLUMNS / BYTE_LANES)
#if BYTE_LANES == LANES
typedef __m512i Bytes;
#define ALL_BYTES(word) _mm512_set1_epi32(word)
#define LACKS_OFFSET 0
/* acc + the products of four bytes a lane; weights as they lie. */
INLINE Bytes add_products(Bytes acc, Bytes weights, Bytes x) { return _mm512_dpbusd_epi32(acc, weights, x); }
#else
typedef __m256i Bytes;
#define ALL_BYTES(word) _mm256_set1_epi32(word)
#ifdef __AVXVNNI__
#define LACKS_OFFSET 0
INLINE Bytes add_products(Bytes acc, Bytes weights, Bytes x) { return _mm256_dpbusd_avx_epi32(acc, weights, x); }
#else
#define LACKS_OFFSET 1 /* weights count without the 128 that they lie with */
/* Two products of at most 128 * 127 are exact in 16 bits; with the offset they would not be. */
INLINE Bytes add_products(Bytes acc, Bytes weights, Bytes x) {
    const Bytes w = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
    const Bytes pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
#endif

/* sums [ROWS, 32] = ROWS quantised rows times VECTORS vectors of a pair's columns, weights taken as they lie; w: the first
 * of them. Both are constants of every call. */
INLINE void byte_tile(
    const int ROWS, const int VECTORS, const int8_t *x, int64_t stride, const uint8_t *w, int64_t k, int32_t *sums
) {
    Bytes acc[MAX_BYTE_ROWS][BYTE_VECTORS];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++) {
        RowScale row = {0};
        if (LACKS_OFFSET) memcpy(&row, x + r * stride + k, sizeof(row));
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) acc[r][v] = ALL_BYTES(128 * row.sum);
    }
    for (int64_t i = 0; i < k; i += 4) {
        const uint8_t *step = w + i * PAIR_COLUMNS;
        if (ROWS >= BYTE_PREFETCH_MIN_ROWS) {
            __builtin_prefetch(step + BYTE_PREFETCH, 0, 2);
            __builtin_prefetch(step + BYTE_PREFETCH + 64, 0, 2);
        }
        Bytes weights[BYTE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) memcpy(&weights[v], step + v * sizeof(Bytes), sizeof(Bytes));
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) {
            int32_t four;
            memcpy(&four, x + r * stride + i, 4);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) acc[r][v] = add_products(acc[r][v], weights[v], ALL_BYTES(four));
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) memcpy(sums + r * PAIR_COLUMNS + v * BYTE_LANES, &acc[r][v], sizeof(Bytes));
}
#endif

#include "int8_tiles.h"

/* sums [rows, 32] of at most MAX_BYTE_ROWS rows and one pair, weights taken as they lie. */
static void byte_sums(int64_t rows, const int8_t *x, int64_t stride, const uint8_t *w, int64_t k, int32_t *sums) {
#define TILE_CASE(R) \
    case R: \
        byte_tile(R, BYTE_VECTORS, x, stride, w, k, sums); \
        break;
#define HALVES_CASE(R) \
    case R: \
        byte_tile(R, BYTE_VECTORS / 2, x, stride, w, k, sums); \
        byte_tile(R, BYTE_VECTORS / 2, x, stride, w + 4 * LANES, k, sums + LANES); \
        break;
#if !defined(BYTE_LANES)
    for (int64_t r = 0; r < rows; r++, x += stride, sums += PAIR_COLUMNS) {
        vi acc[2] = {{0}, {0}};
        for (int64_t i = 0; i < k; i += 4)
            for (int half = 0; half < 2; half++) {
                vu four; /* a column's four weights in a lane */
                memcpy(&four, w + i * PAIR_COLUMNS + half * 64, 64);
                for (int j = 0; j < 4; j++) acc[half] += (vi)((four >> (8 * j)) & 255) * (int32_t)x[i + j];
            }
        memcpy(sums, acc, sizeof(acc));
    }
#elif BYTE_LANES == LANES
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6) TILE_CASE(7)
        TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12) TILE_CASE(13) TILE_CASE(14)
    }
#else
    switch (rows) { TILE_CASE(1) TILE_CASE(2) HALVES_CASE(3) HALVES_CASE(4) }
#endif
#undef TILE_CASE
#undef HALVES_CASE
}

/* The sums of a tile as fp32 products, in place. x: its quantised rows. */
INLINE void scale_tile(int32_t *sums, int64_t rows, const int8_t *x, int64_t stride, int64_t k, const float *columns) {
    const vf first = load_f32(columns), second = load_f32(columns + LANES);
    for (int64_t r = 0; r < rows; r++) {
        RowScale row;
        memcpy(&row, x + r * stride + k, sizeof(row));
        vi exact[2];
        memcpy(exact, sums + r * PAIR_COLUMNS, sizeof(exact));
        const vf low = __builtin_convertvector(exact[0] - 128 * row.sum, vf) * row.scale * first;
        const vf high = __builtin_convertvector(exact[1] - 128 * row.sum, vf) * row.scale * second;
        store_f32((float *)sums + r * PAIR_COLUMNS, low);
        store_f32((float *)sums + r * PAIR_COLUMNS + LANES, high);
    }
}

#define T float
#define NAME(x) x##_f32
#define LOAD load_f32
#define STORE store_f32
#define VROUND round_f32
#define GET scalar_get_f32
#include "gemm_store.h"
#include "int8_impl.h"

#define T bf16
#define NAME(x) x##_bf16
#define LOAD load_bf16
#define STORE store_bf16
#define VROUND round_bf16
#define GET scalar_get_bf16
#include "gemm_store.h"
#include "int8_impl.h"

/* out [n, cols] = x [n, k] times an int8 layer; gated: out [n, cols] = silu(gate) * up, cols of each. quantised: see int8.h. */
EXPORT void db_int8_linear_f32(float *out, const float *x, const Packed *layer, int64_t n, char *quantised) {
    Barrier barrier = {0};
#pragma omp parallel if (n * row_products(layer) >= PARALLEL_MIN_PRODUCTS)
    int8_team_f32(layer, x, layer->k, out, layer->cols, n, quantised, &barrier);
}
EXPORT void db_int8_linear_bf16(bf16 *out, const bf16 *x, const Packed *layer, int64_t n, char *quantised) {
    Barrier barrier = {0};
#pragma omp parallel if (n * row_products(layer) >= PARALLEL_MIN_PRODUCTS)
    int8_team_bf16(layer, x, layer->k, out, layer->cols, n, quantised, &barrier);
}
