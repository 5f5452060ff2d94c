/* Body of the matrix product for one element type; included once a type (see gemm.h). */

/* One linear layer. packed: [pairs, k / K_STEP, 2, 16, K_STEP]; k a multiple of K_STEP. */
typedef struct {
    const T *packed;
    int64_t cols, k; /* cols: of the weight, or of gate when gated */
    int gated;
} NAME(Packed);

INLINE void NAME(store_columns)(T *out, vf v, int64_t columns) {
    if (columns >= LANES) {
        STORE(out, v);
    } else if (columns > 0) {
        T padded[LANES];
        STORE(padded, v);
        memcpy(out, padded, columns * sizeof(T));
    }
}

/* ROWS rows of x times one pair. ROWS is a constant of every call, so that acc lives in registers. */
INLINE void NAME(gemm_tile)(
    const int ROWS, const T *x, int64_t x_stride, const T *w, int64_t k, T *out, int64_t out_stride, int64_t columns,
    int gated
) {
    __m512 acc[MAX_TILE_ROWS][2];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += K_STEP) {
        const T *step = w + i * PAIR_COLUMNS;
        OPERAND w0 = LOAD_OPERAND(step), w1 = LOAD_OPERAND(step + LANES * K_STEP);
        __builtin_prefetch(step + 2048 / sizeof(T) + 0, 0, 3);
        __builtin_prefetch(step + 2048 / sizeof(T) + LANES * K_STEP, 0, 3);
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) {
            OPERAND xr = BROADCAST(x + r * x_stride + i);
            acc[r][0] = MULTIPLY_ADD(acc[r][0], w0, xr);
            acc[r][1] = MULTIPLY_ADD(acc[r][1], w1, xr);
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++) {
        vf first = (vf)acc[r][0], second = (vf)acc[r][1];
        T *to = out + r * out_stride;
        if (gated) {
            NAME(store_columns)(to, VROUND(vsilu(VROUND(first))) * VROUND(second), columns);
        } else {
            NAME(store_columns)(to, first, columns);
            NAME(store_columns)(to + LANES, second, columns - LANES);
        }
    }
}

/* All n rows times pair `pair`. */
static void NAME(gemm_pair)(
    const NAME(Packed) * layer, int64_t pair, const T *x, int64_t x_stride, T *out, int64_t out_stride, int64_t n
) {
    const int64_t width = layer->gated ? LANES : PAIR_COLUMNS, column = pair * width;
    const T *w = layer->packed + pair * layer->k * PAIR_COLUMNS;
    const int64_t tiles = (n + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t begin = n * tile / tiles, rows = n * (tile + 1) / tiles - begin;
        const T *from = x + begin * x_stride;
        T *to = out + begin * out_stride + column;
#define TILE_CASE(R) \
    case R: \
        NAME(gemm_tile)(R, from, x_stride, w, layer->k, to, out_stride, layer->cols - column, layer->gated); \
        break;
        switch (rows) {
            TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6) TILE_CASE(7)
            TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12) TILE_CASE(13) TILE_CASE(14)
        }
#undef TILE_CASE
    }
}

INLINE int64_t NAME(packed_pairs)(const NAME(Packed) * layer) {
    return layer->gated ? (layer->cols + LANES - 1) / LANES : gemm_pairs(layer->cols);
}

/* Called by every thread of a team; ends with a barrier. */
static void NAME(gemm_team)(const NAME(Packed) * layer, const T *x, int64_t x_stride, T *out, int64_t out_stride, int64_t n) {
    const int64_t pairs = NAME(packed_pairs)(layer);
#pragma omp for schedule(dynamic, PAIRS_PER_TASK)
    for (int64_t pair = 0; pair < pairs; pair++) NAME(gemm_pair)(layer, pair, x, x_stride, out, out_stride, n);
}
