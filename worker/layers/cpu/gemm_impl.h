/* Body of the matrix product for one element type; included once a type (see gemm.h). */

/* sums [ROWS, 32] = ROWS rows of x times one pair. ROWS is a constant of every call, so that acc lives in registers. */
INLINE void NAME(gemm_tile)(const int ROWS, const T *x, int64_t x_stride, const T *w, int64_t k, float *sums) {
    __m512 acc[MAX_TILE_ROWS][2];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += K_STEP) {
        const T *step = w + i * PAIR_COLUMNS;
        OPERAND w0 = LOAD_OPERAND(step), w1 = LOAD_OPERAND(step + LANES * K_STEP);
        if (ROWS >= PREFETCH_MIN_ROWS) {
            __builtin_prefetch(step + PREFETCH_BYTES / sizeof(T), 0, 2);
            __builtin_prefetch(step + PREFETCH_BYTES / sizeof(T) + LANES * K_STEP, 0, 2);
        }
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) {
            OPERAND xr = BROADCAST(x + r * x_stride + i);
            acc[r][0] = MULTIPLY_ADD(acc[r][0], w0, xr);
            acc[r][1] = MULTIPLY_ADD(acc[r][1], w1, xr);
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++) {
        _mm512_store_ps(sums + r * PAIR_COLUMNS, acc[r][0]);
        _mm512_store_ps(sums + r * PAIR_COLUMNS + LANES, acc[r][1]);
    }
}

/* All n rows times pair `pair`. */
static void NAME(gemm_pair)(
    const Packed * layer, int64_t pair, const T *x, int64_t x_stride, T *out, int64_t out_stride, int64_t n
) {
    const int64_t width = layer->gated ? LANES : PAIR_COLUMNS, column = pair * width;
    const T *w = (const T *)layer->packed + pair * layer->k * PAIR_COLUMNS;
    float sums[MAX_TILE_ROWS * PAIR_COLUMNS] __attribute__((aligned(64)));
    const int64_t tiles = (n + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t begin = n * tile / tiles, rows = n * (tile + 1) / tiles - begin;
        const T *from = x + begin * x_stride;
#define TILE_CASE(R) \
    case R: \
        NAME(gemm_tile)(R, from, x_stride, w, layer->k, sums); \
        break;
        switch (rows) {
            TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6) TILE_CASE(7)
            TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12) TILE_CASE(13) TILE_CASE(14)
        }
#undef TILE_CASE
        T *to = out + begin * out_stride + column;
        NAME(store_tile)(sums, rows, to, out_stride, layer->cols - column, layer->gated);
    }
}

void NAME(gemm_team)(
    const Packed *layer, const T *x, int64_t x_stride, T *out, int64_t out_stride, int64_t n, Barrier *barrier
) {
    const int64_t pairs = layer->gated ? (layer->cols + LANES - 1) / LANES : gemm_pairs(layer->cols);
    const int64_t chunks = (n + CHUNK_ROWS - 1) / CHUNK_ROWS;
#pragma omp for schedule(dynamic, task_share(pairs)) nowait
    for (int64_t task = 0; task < chunks * pairs; task++) {
        const int64_t row = task / pairs * CHUNK_ROWS, rows = n - row < CHUNK_ROWS ? n - row : CHUNK_ROWS;
        NAME(gemm_pair)(layer, task % pairs, x + row * x_stride, x_stride, out + row * out_stride, out_stride, rows);
    }
    team_barrier(barrier);
}

/* for the next type */
#undef T
#undef NAME
#undef STORE
#undef VROUND
#undef K_STEP
#undef BROADCAST
#undef MULTIPLY_ADD
#undef OPERAND
#undef LOAD_OPERAND
