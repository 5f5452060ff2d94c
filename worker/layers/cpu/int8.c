/* Products with int8 weights: packing, sums of bytes, and the two element types around them (see int8.h). */
#include "int8.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define BYTE_LANES 16 /* sums in a register; 28 accumulators, two weights and two spare registers */
#define MAX_BYTE_ROWS 14 /* rows of a tile */
#elif defined(__AVX2__)
#define BYTE_LANES 8 /* 12 accumulators, two weights and two spare registers */
#define MAX_BYTE_ROWS 6
#else
#define MAX_BYTE_ROWS 14
#endif
#include "int8_tiles.h"

#if HAVE_TILES || defined(__AVXVNNI__) || defined(BYTE_LANES) && BYTE_LANES == LANES
#define INPUT_BYTES 1 /* of a quantised input: there are products of bytes */
typedef int8_t Input;
#else
#define INPUT_BYTES 2
typedef int16_t Input;
#endif

#define SMALLEST 0x1p-100f /* rows below it count as zeros: 127 over less is no number */
#define CHUNK_BYTE_ROWS (11 * MAX_BYTE_ROWS) /* rows that pass all weights before the next */
#define BYTE_PREFETCH_MIN_ROWS 5
#define BYTE_PREFETCH 8192

/* What is behind the inputs of a quantised row, followed by a GroupEnd for each group, of which there are at most padded(k) /
 * INT8_STEP, and where inputs are bytes by the list of wide ones. */
typedef struct {
    float scale;
    int32_t wide; /* length of the list */
    char unused[INT8_STEP - 8];
} RowScale;

typedef struct {
    int32_t sum;  /* of the group's inputs */
    int32_t wide; /* entries of the list up to the group's end */
} GroupEnd;

/* The high bytes of a k step that has some. */
typedef struct {
    int32_t step;
    int8_t high[4];
} Wide;

INLINE int64_t padded(int64_t k) { return (k + INT8_STEP - 1) / INT8_STEP * INT8_STEP; }
INLINE int64_t most_wide(int64_t k) {
    const int64_t most = (k + WIDE_EVERY - 1) / WIDE_EVERY;
    return most < MOST_WIDE ? most : MOST_WIDE;
}
/* Offsets in a row. */
INLINE int64_t ends_at(int64_t k) { return padded(k) * INPUT_BYTES + (int64_t)sizeof(RowScale); }
INLINE int64_t list_at(int64_t k) { return ends_at(k) + padded(padded(k) / INT8_STEP * (int64_t)sizeof(GroupEnd)); }
INLINE int64_t row_bytes(int64_t k) {
    return list_at(k) + (INPUT_BYTES == 1 ? padded(most_wide(k) * (int64_t)sizeof(Wide)) : 0);
}
INLINE int64_t layer_pairs(int64_t cols, int gated) {
    return gated ? (cols + LANES - 1) / LANES : (cols + PAIR_COLUMNS - 1) / PAIR_COLUMNS;
}

/* Bytes of one quantised row of k features. */
EXPORT int64_t db_int8_row_bytes(int64_t k) { return row_bytes(k); }

/* Bytes of a packed weight [cols, k]; it has a column for every padded(k) of them. */
EXPORT int64_t db_int8_packed_size(int64_t cols, int64_t k, int32_t gated) {
    return layer_pairs(gated ? cols / 2 : cols, gated) * PAIR_COLUMNS * padded(k);
}

/* weight [cols, k], scales [cols, groups] -> packed and packed_scales; columns beyond cols are zeros. gated: first half gate,
 * second up. */
EXPORT void db_int8_pack(
    uint8_t *packed, float *packed_scales, const int8_t *weight, const float *scales, int64_t cols, int64_t k, int32_t gated,
    int64_t group
) {
    const int64_t groups = (padded(k) + group - 1) / group;
    const int64_t half = cols / 2, pairs = layer_pairs(gated ? half : cols, gated);
#pragma omp parallel for schedule(static)
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t lane = 0; lane < PAIR_COLUMNS; lane++) {
            int64_t column = pair * PAIR_COLUMNS + lane;
            if (gated) column = pair * LANES + lane % LANES < half ? pair * LANES + lane % LANES + (lane / LANES) * half : cols;
            for (int64_t g = 0; g < groups; g++) {
                packed_scales[(pair * groups + g) * PAIR_COLUMNS + lane] = column < cols ? scales[column * groups + g] : 0.0f;
            }
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
#define ALL_LANES(word) _mm512_set1_epi32(word)
#else
typedef __m256i Bytes;
#define ALL_LANES(word) _mm256_set1_epi32(word)
#endif
/* A k step is multiplied in PARTS parts, each of weights and of four bytes of inputs. acc + the products of a lane: */
#if INPUT_BYTES == 2
#define PARTS 2
#define PART_OF_WEIGHTS(w, part) ((part) ? _mm256_srli_epi16(w, 8) : _mm256_and_si256(w, _mm256_set1_epi16(255)))
INLINE Bytes add_products(Bytes acc, Bytes w, Bytes x) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(w, x));
    __asm__("" : "+x"(acc)); /* else the compiler adds up both parts' products first, and runs out of registers */
    return acc;
}
#else
#define PARTS 1
#define PART_OF_WEIGHTS(w, part) (w)
#if BYTE_LANES == LANES
INLINE Bytes add_products(Bytes acc, Bytes w, Bytes x) { return _mm512_dpbusd_epi32(acc, w, x); }
#else
INLINE Bytes add_products(Bytes acc, Bytes w, Bytes x) {
    acc = _mm256_dpbusd_avx_epi32(acc, w, x);
    __asm__("" : "+x"(acc));
    return acc;
}
#endif
#endif

/* sums [ROWS, 32] = ROWS quantised rows times VECTORS vectors of a pair's columns, weights taken as they lie; w: the first
 * of them. Both are constants of every call. */
INLINE void byte_tile(
    const int ROWS, const int VECTORS, const char *x, int64_t stride, const uint8_t *w, int64_t k, int32_t *sums
) {
    Bytes acc[MAX_BYTE_ROWS][BYTE_VECTORS] = {0};
    for (int64_t i = 0; i < k; i += 4) {
        const uint8_t *step = w + i * PAIR_COLUMNS;
        if (ROWS >= BYTE_PREFETCH_MIN_ROWS || VECTORS < BYTE_VECTORS) {
            __builtin_prefetch(step + BYTE_PREFETCH, 0, 2);
            if (VECTORS == BYTE_VECTORS) __builtin_prefetch(step + BYTE_PREFETCH + 64, 0, 2);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            Bytes weights[BYTE_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                memcpy(&weights[v], step + v * sizeof(Bytes), sizeof(Bytes));
                weights[v] = PART_OF_WEIGHTS(weights[v], part);
            }
#pragma GCC unroll 14
            for (int r = 0; r < ROWS; r++) {
                int32_t four;
                memcpy(&four, x + r * stride + i * INPUT_BYTES + 4 * part, 4);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) acc[r][v] = add_products(acc[r][v], weights[v], ALL_LANES(four));
            }
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) memcpy(sums + r * PAIR_COLUMNS + v * BYTE_LANES, &acc[r][v], sizeof(Bytes));
}
#endif

/* sums [rows, 32] of at most MAX_BYTE_ROWS rows and one pair, weights taken as they lie. */
static void byte_sums(int64_t rows, const char *x, int64_t stride, const uint8_t *w, int64_t k, int32_t *sums) {
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
        vu acc[2] = {{0}, {0}};
        for (int64_t i = 0; i < k; i += 4)
            for (int half = 0; half < 2; half++) {
                vu four; /* a column's four weights in a lane */
                memcpy(&four, w + i * PAIR_COLUMNS + half * 64, 64);
                for (int j = 0; j < 4; j++) acc[half] += ((four >> (8 * j)) & 255) * (uint32_t)((const Input *)x)[i + j];
            }
        memcpy(sums, acc, sizeof(acc));
    }
#elif BYTE_LANES == LANES
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6) TILE_CASE(7)
        TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12) TILE_CASE(13) TILE_CASE(14)
    }
#else
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2) HALVES_CASE(3) HALVES_CASE(4) HALVES_CASE(5) HALVES_CASE(6)
    }
#endif
#undef TILE_CASE
#undef HALVES_CASE
}

#if INPUT_BYTES == 1
/* What the high bytes of a row's wide inputs add to its sums [32]. */
INLINE void add_wide(int32_t *sums, const Wide *wide, int32_t count, const uint8_t *w) {
    vu high[2] = {{0}, {0}}, low[2];
#ifdef BYTE_LANES
    Bytes acc[BYTE_VECTORS] = {0};
    for (int32_t i = 0; i < count; i++)
#pragma GCC unroll 4
        for (int v = 0; v < BYTE_VECTORS; v++) {
            Bytes weights;
            int32_t four;
            memcpy(&weights, w + wide[i].step * 4 * PAIR_COLUMNS + v * sizeof(Bytes), sizeof(Bytes));
            memcpy(&four, wide[i].high, 4);
            acc[v] = add_products(acc[v], weights, ALL_LANES(four));
        }
    memcpy(high, acc, sizeof(high));
#else
    for (int32_t i = 0; i < count; i++)
        for (int half = 0; half < 2; half++) {
            vu four;
            memcpy(&four, w + wide[i].step * 4 * PAIR_COLUMNS + half * 64, 64);
            for (int j = 0; j < 4; j++) high[half] += ((four >> (8 * j)) & 255) * (uint32_t)wide[i].high[j];
        }
#endif
    memcpy(low, sums, sizeof(low));
    low[0] += high[0] * 128;
    low[1] += high[1] * 128;
    memcpy(sums, low, sizeof(low));
}
#endif

/* a * b, rounded: what follows does not become one operation with it. */
INLINE vg product_of(vg a, vg b) {
#if defined(__AVX512F__) && GEMM_LANES == LANES
    vg product = a * b;
    __asm__("" : "+v"(product));
#elif defined(__AVX2__) && GEMM_LANES == 8
    vg product = a * b;
    __asm__("" : "+x"(product));
#else
    const volatile vg product = a * b;
#endif
    return product;
}

/* Adds the sums of group `group` of a tile to its totals. x: its quantised rows, w: the weights of the pair. */
INLINE void add_group(
    float *totals, int32_t *sums, int64_t rows, const char *x, int64_t stride, const uint8_t *w, int64_t k, int64_t group,
    const float *scales
) {
    for (int64_t r = 0; r < rows; r++, x += stride) {
        GroupEnd end;
        memcpy(&end, x + ends_at(k) + group * (int64_t)sizeof(end), sizeof(end));
        int32_t *sum = sums + r * PAIR_COLUMNS;
#if INPUT_BYTES == 1
        GroupEnd before = {0};
        if (group) memcpy(&before, x + ends_at(k) + (group - 1) * (int64_t)sizeof(end), sizeof(end));
        if (end.wide > before.wide) add_wide(sum, (const Wide *)(x + list_at(k)) + before.wide, end.wide - before.wide, w);
#endif
        const uint32_t offset = 128u * (uint32_t)end.sum; /* sums are modulo 2^32, which the difference is below */
        float *total = totals + r * PAIR_COLUMNS;
#pragma GCC unroll 4
        for (int lane = 0; lane < PAIR_COLUMNS; lane += GEMM_LANES) {
            const vg exact = __builtin_convertvector((vgi)(load_words(sum + lane) - offset), vg);
            const vg product = product_of(exact, load_g(scales + lane));
            store_g(total + lane, group ? load_g(total + lane) + product : product);
        }
    }
}

/* Totals of a tile as outputs, in place. */
INLINE void scale_rows(float *totals, int64_t rows, const char *x, int64_t stride, int64_t k) {
    for (int64_t r = 0; r < rows; r++, totals += PAIR_COLUMNS) {
        RowScale row;
        memcpy(&row, x + r * stride + k * INPUT_BYTES, sizeof(row));
        for (int lane = 0; lane < PAIR_COLUMNS; lane += GEMM_LANES) store_g(totals + lane, load_g(totals + lane) * row.scale);
    }
}

INLINE int32_t float_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* Sixteen numbers to the nearest integers, ties to even, as inputs i and on of a row [k] whose RowScale is `row`. */
INLINE void store_inputs(char *x, int64_t i, int64_t k, Parts numbers, RowScale *row) {
    union {
        Parts numbers;
        vi q;
        int64_t words[LANES / 2];
#ifdef __AVX2__
        __m256 halves[2];
        __m256i integers[2];
#endif
    } all = {numbers};
#if defined(__AVX512F__)
    all.q = (vi)_mm512_cvtps_epi32((__m512)numbers.v);
#elif defined(__AVX2__)
    all.integers[0] = _mm256_cvtps_epi32(all.halves[0]);
    all.integers[1] = _mm256_cvtps_epi32(all.halves[1]);
#else
    for (int lane = 0; lane < LANES; lane++) all.q[lane] = (int32_t)lrintf(all.numbers.v[lane]);
#endif
#if INPUT_BYTES == 1
    Wide *list = (Wide *)(x + list_at(k));
    const vi q = all.q;
    all.q = ((127 - q) | (127 + q)) >> 31; /* the sign: of vectors longer than a register the compiler compares lane by lane */
    for (int word = 1; word < LANES / 2; word++) all.words[0] |= all.words[word];
    const int64_t some_wide = all.words[0];
    all.q = q;
    for (int lane = 0; some_wide && lane < LANES; lane++) {
        if (all.q[lane] >= -127 && all.q[lane] <= 127) continue;
        const int32_t step = (int32_t)(i + lane) / 4, high = (all.q[lane] + 64) >> 7;
        if (!row->wide || list[row->wide - 1].step != step) list[row->wide++] = (Wide){.step = step};
        list[row->wide - 1].high[lane % 4] = (int8_t)high;
        all.q[lane] -= high * 128;
    }
#endif
#if INPUT_BYTES == 1 || !defined(BYTE_LANES)
    typedef Input Inputs __attribute__((vector_size(LANES * INPUT_BYTES)));
    const Inputs inputs = __builtin_convertvector(all.q, Inputs);
#else /* of every four the first and third, then the others: as weights are split */
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(all.integers[0], all.integers[1]), 0xd8);
    const __m256i inputs = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
#endif
    memcpy(x + i * INPUT_BYTES, &inputs, sizeof(inputs));
}

#define T float
#define NAME(x) x##_f32
#define LOAD load_g
#define STORE store_g
#define VROUND round_g_f32
#define GET scalar_get_f32
#include "gemm_store.h"
#include "int8_impl.h"

#define T bf16
#define NAME(x) x##_bf16
#define LOAD load_g_bf16
#define STORE store_g_bf16
#define VROUND round_g_bf16
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
