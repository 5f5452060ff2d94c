/* Body of the matrix product for one element type; included once a type (see gemm.h). */

/* sums [ROWS, 32] = ROWS rows of x times VECTORS vectors of a pair's columns; w: the first of them. Both are constants of
 * every call, so that acc lives in registers. */
INLINE void NAME(gemm_tile)(
    const int ROWS, const int VECTORS, const T *x, int64_t x_stride, const T *w, int64_t k, float *sums
) {
    vg acc[MAX_TILE_ROWS][PAIR_VECTORS];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) acc[r][v] = (vg){0};
    for (int64_t i = 0; i < k; i += K_STEP) {
        const T *step = w + i * PAIR_COLUMNS;
        if (ROWS >= PREFETCH_MIN_ROWS || VECTORS < PAIR_VECTORS) {
            __builtin_prefetch(step + PREFETCH_BYTES / sizeof(T), 0, 2);
            if (VECTORS == PAIR_VECTORS) __builtin_prefetch(step + (PREFETCH_BYTES + 64) / sizeof(T), 0, 2);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            vgu weights[PAIR_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) weights[v] = load_words(step + v * GEMM_LANES * K_STEP);
#pragma GCC unroll 14
            for (int r = 0; r < ROWS; r++) {
                const vgu xr = broadcast_word(x + r * x_stride + i);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++)
                    acc[r][v] = MULTIPLY_ADD(acc[r][v], OPERAND(weights[v], part), OPERAND(xr, part));
            }
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) memcpy(sums + r * PAIR_COLUMNS + v * GEMM_LANES, &acc[r][v], sizeof(vg));
}

/* sums [rows, 32] of at most MAX_TILE_ROWS rows and a whole pair. */
static void NAME(gemm_sums)(int64_t rows, const T *x, int64_t x_stride, const T *w, int64_t k, float *sums) {
#define TILE_CASE(R) \
    case R: \
        NAME(gemm_tile)(R, PAIR_VECTORS, x, x_stride, w, k, sums); \
        break;
#define HALVES_CASE(R) \
    case R: \
        NAME(gemm_tile)(R, PAIR_VECTORS / 2, x, x_stride, w, k, sums); \
        NAME(gemm_tile)(R, PAIR_VECTORS / 2, x, x_stride, w + LANES * K_STEP, k, sums + LANES); \
        break;
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2)
#if GEMM_LANES == LANES || PARTS == 1
        TILE_CASE(3)
#else
        HALVES_CASE(3)
#endif
#if GEMM_LANES == LANES
        TILE_CASE(4) TILE_CASE(5) TILE_CASE(6) TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11)
        TILE_CASE(12) TILE_CASE(13) TILE_CASE(14)
#else
        HALVES_CASE(4) HALVES_CASE(5) HALVES_CASE(6)
#endif
    }
#undef TILE_CASE
#undef HALVES_CASE
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
#if GEMM_LANES == LANES
        const int64_t begin = n * tile / tiles, rows = n * (tile + 1) / tiles - begin;
#else /* full tiles are so much better that one small one is the lesser evil */
        const int64_t begin = tile * MAX_TILE_ROWS, left = n - begin, rows = left < MAX_TILE_ROWS ? left : MAX_TILE_ROWS;
#endif
        const T *from = x + begin * x_stride;
        NAME(gemm_sums)(rows, from, x_stride, w, layer->k, sums);
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
#undef PARTS
#undef MULTIPLY_ADD
#undef OPERAND
