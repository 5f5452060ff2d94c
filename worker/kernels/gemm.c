/* Linear layers: packing and products (see gemm.h for the layout). */
#include "gemm.h"

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
/* out [n, cols] = x [n, k] @ weight.T; gated: out [n, cols] = silu(gate) * up, cols of each. */
EXPORT void db_linear_f32(float *out, const float *x, const float *packed, int64_t n, int64_t cols, int64_t k, int32_t gated) {
    const Packed_f32 layer = {packed, cols, k, gated};
#pragma omp parallel
    gemm_team_f32(&layer, x, k, out, cols, n);
}
EXPORT void db_linear_bf16(bf16 *out, const bf16 *x, const bf16 *packed, int64_t n, int64_t cols, int64_t k, int32_t gated) {
    const Packed_bf16 layer = {packed, cols, k, gated};
#pragma omp parallel
    gemm_team_bf16(&layer, x, k, out, cols, n);
}
#endif
