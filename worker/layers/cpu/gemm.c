/* Linear layers: packing and products (see gemm.h for the layout). */
#include "gemm.h"

#define CHUNK_ROWS (9 * MAX_TILE_ROWS) /* rows that pass all weights before the next: they stay in the second-level cache */
#define MAX_SHARE 8 /* of task_share */
#define SHARE_BYTES (384 << 10) /* of weights that a task's rows pass in turn */
/* Measured on Zen 4: with few rows the hardware's own prefetch reaches the DRAM bound; with more, arithmetic starves it
 * and asking 8 KiB ahead into the second-level cache gains a third at 8 rows. */
#define PREFETCH_MIN_ROWS 5
#define PREFETCH_BYTES 8192

INLINE int64_t gemm_pairs(int64_t cols) { return (cols + PAIR_COLUMNS - 1) / PAIR_COLUMNS; }

EXPORT int32_t db_have_gemm(void) { return HAVE_GEMM; }

/* Elements of a packed weight. */
EXPORT int64_t db_packed_size(int64_t cols, int64_t k, int32_t gated) {
    return (gated ? (cols / 2 + LANES - 1) / LANES : gemm_pairs(cols)) * PAIR_COLUMNS * k;
}

/* weight [cols, k] of `bytes`-wide elements -> packed; rows beyond cols are zeros. gated: first half gate, second up. */
EXPORT void db_pack(char *packed, const char *weight, int64_t cols, int64_t k, int64_t bytes, int32_t gated) {
    const int64_t k_step = 4 / bytes, half = cols / 2, pairs = db_packed_size(cols, k, gated) / PAIR_COLUMNS / k;
#pragma omp parallel for schedule(static)
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t lane = 0; lane < PAIR_COLUMNS; lane++) {
            int64_t column = pair * PAIR_COLUMNS + lane;
            if (gated) column = pair * LANES + lane % LANES < half ? pair * LANES + lane % LANES + (lane / LANES) * half : cols;
            for (int64_t i = 0; i < k; i += k_step) {
                char *to = packed + ((pair * k + i) * PAIR_COLUMNS + lane * k_step) * bytes;
                if (column < cols) {
                    memcpy(to, weight + (column * k + i) * bytes, 4);
                } else {
                    memset(to, 0, 4);
                }
            }
        }
}

#if HAVE_GEMM

#define PAIR_VECTORS (PAIR_COLUMNS / GEMM_LANES)
#if GEMM_LANES == LANES
#define MAX_TILE_ROWS 14 /* 28 accumulators, two weights and two spare registers */
#else
#define MAX_TILE_ROWS 6 /* times half a pair: 12 accumulators, two weights and two spare registers */
#endif

/* Rows of a tile that begins at row `begin` of n. */
INLINE int64_t tile_rows(int64_t n, int64_t begin) {
    const int64_t left = n - begin, tiles = (left + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
#if GEMM_LANES == LANES
    return (left + tiles - 1) / tiles;
#else /* full tiles are so much better that one small one is the lesser evil */
    return tiles > 1 ? MAX_TILE_ROWS : left;
#endif
}

/* bf16 that is multiplied in fp32: rows are widened once for several pairs, in parts that stay in the first-level cache. */
#define WIDENED_INPUTS (GEMM_LANES == LANES ? 512 : 1024)
#define MIN_WIDENED_ROWS 4

/* How many of n rows: all but a last tile of few. */
INLINE int64_t widened_rows(int64_t n) {
    int64_t begin = 0;
    while (begin < n && tile_rows(n, begin) >= MIN_WIDENED_ROWS) begin += tile_rows(n, begin);
    return begin;
}

/* Pairs a task takes, so that their weights stay in the second-level cache while rows pass them. */
INLINE int64_t pair_share(int64_t pairs, int64_t pair_bytes) {
    const int64_t share = task_share(pairs), most = SHARE_BYTES / pair_bytes;
    return most < 1 ? 1 : most < share ? most : share;
}

#define T float
#define NAME(x) x##_f32
#define STORE store_g
#define VROUND round_g_f32
#define K_STEP 1
#define PARTS 1
#define OPERAND(words, part) ((vg)(words))
#define MULTIPLY_ADD(acc, w, x) multiply_add(w, x, acc)
#include "gemm_store.h"
#include "gemm_impl.h"

#define T bf16
#define NAME(x) x##_bf16
#define STORE store_g_bf16
#define VROUND round_g_bf16
#define K_STEP 2
#ifdef __AVX512BF16__
#define PARTS 1
#define OPERAND(words, part) ((__m512bh)(words))
#define MULTIPLY_ADD(acc, w, x) ((vg)_mm512_dpbf16_ps((__m512)(acc), w, x))
#else /* a word's first, then its second bf16 */
#define PARTS 2
#define OPERAND(words, part) ((vg)((part) ? (words) & 0xffff0000u : (words) << 16))
#define MULTIPLY_ADD(acc, w, x) multiply_add(w, x, acc)
#endif
#include "gemm_store.h"
#include "gemm_impl.h"

/* out [n, cols] = x [n, k] @ weight.T; gated: out [n, cols] = silu(gate) * up, cols of each. */
EXPORT void db_linear_f32(float *out, const float *x, const float *packed, int64_t n, int64_t cols, int64_t k, int32_t gated) {
    const Packed layer = {packed, NULL, cols, k, gated};
    Barrier barrier = {0};
#pragma omp parallel if (n * row_products(&layer) >= PARALLEL_MIN_PRODUCTS)
    gemm_team_f32(&layer, x, k, out, cols, n, &barrier);
}
EXPORT void db_linear_bf16(bf16 *out, const bf16 *x, const bf16 *packed, int64_t n, int64_t cols, int64_t k, int32_t gated) {
    const Packed layer = {packed, NULL, cols, k, gated};
    Barrier barrier = {0};
#pragma omp parallel if (n * row_products(&layer) >= PARALLEL_MIN_PRODUCTS)
    gemm_team_bf16(&layer, x, k, out, cols, n, &barrier);
}
#endif
