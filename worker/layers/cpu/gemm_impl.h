/* Body of the matrix product for one element type; included once a type (see gemm.h). */

/* sums [ROWS, 32] = ROWS rows of x times VECTORS vectors of a pair's columns; w: the first of them. Both are constants of
 * every call, so that acc lives in registers, and so is WIDENED: whether x is fp32 whatever T. Its sums go on
 * from what they are. */
INLINE void NAME(gemm_tile)(
    const int ROWS, const int VECTORS, const int WIDENED, const void *x, int64_t x_stride, const T *w, int64_t k, float *sums
) {
    vg acc[MAX_TILE_ROWS][PAIR_VECTORS];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) acc[r][v] = !WIDENED ? (vg){0} : load_g(sums + r * PAIR_COLUMNS + v * GEMM_LANES);
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
                const int64_t at = r * x_stride + i;
#if PARTS == 2
                const vgu word = WIDENED ? broadcast_word((const float *)x + at + part) : broadcast_word((const T *)x + at);
                const vg xr = WIDENED ? (vg)word : OPERAND(word, part);
#else
                const vgu word = broadcast_word((const T *)x + at);
#define xr OPERAND(word, part)
#endif
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) acc[r][v] = MULTIPLY_ADD(acc[r][v], OPERAND(weights[v], part), xr);
#undef xr
            }
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) memcpy(sums + r * PAIR_COLUMNS + v * GEMM_LANES, &acc[r][v], sizeof(vg));
}

/* sums [rows, 32] of at most MAX_TILE_ROWS rows and a whole pair. */
INLINE void NAME(gemm_sums)(
    const int WIDENED, int64_t rows, const void *x, int64_t x_stride, const T *w, int64_t k, float *sums
) {
#define TILE_CASE(R) \
    case R: \
        NAME(gemm_tile)(R, PAIR_VECTORS, WIDENED, x, x_stride, w, k, sums); \
        break;
#define HALVES_CASE(R) \
    case R: \
        NAME(gemm_tile)(R, PAIR_VECTORS / 2, WIDENED, x, x_stride, w, k, sums); \
        NAME(gemm_tile)(R, PAIR_VECTORS / 2, WIDENED, x, x_stride, w + LANES * K_STEP, k, sums + LANES); \
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
static void NAME(gemm_stored)(int64_t rows, const T *x, int64_t x_stride, const T *w, int64_t k, float *sums) {
    NAME(gemm_sums)(0, rows, x, x_stride, w, k, sums);
}
#if PARTS == 2
/* As a function of its own: where the compiler knows the stride, it runs out of registers. */
static __attribute__((noinline, noclone)) void NAME(gemm_widened)(
    int64_t rows, const float *x, int64_t x_stride, const T *w, int64_t k, float *sums
) {
    NAME(gemm_sums)(1, rows, x, x_stride, w, k, sums);
}

/* to [rows, stride] = x [rows, k] in fp32. */
static void NAME(widen_rows)(float *to, int64_t stride, const T *x, int64_t x_stride, int64_t rows, int64_t k) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t i = 0;
        for (; i + GEMM_LANES <= k; i += GEMM_LANES) store_g(to + r * stride + i, load_g_bf16(x + r * x_stride + i));
        for (; i < k; i++) to[r * stride + i] = widen(x[r * x_stride + i]);
    }
}
#endif

/* Bytes of a pair's weights that rows pass in turn. */
INLINE int64_t NAME(pass_bytes)(int64_t k) {
    return (PARTS == 2 && k > WIDENED_INPUTS ? WIDENED_INPUTS : k) * PAIR_COLUMNS * (int64_t)sizeof(T);
}

/* All n rows times pairs `first` .. `end` - 1. */
static void NAME(gemm_pairs)(
    const Packed *layer, int64_t first, int64_t end, const T *x, int64_t x_stride, T *out, int64_t out_stride, int64_t n
) {
    const int64_t k = layer->k, width = layer->gated ? LANES : PAIR_COLUMNS, size = n * PAIR_COLUMNS;
    const T *packed = (const T *)layer->packed;
    float sums[(end - first) * size] __attribute__((aligned(64))); /* [pairs, n, 32] */
    int64_t row = 0;
#if PARTS == 2
    const int64_t widened = widened_rows(n), stride = WIDENED_INPUTS + LANES; /* rows a power of two apart would share few sets */
    float wide[MAX_TILE_ROWS * (WIDENED_INPUTS + LANES)] __attribute__((aligned(64)));
    if (widened) memset(sums, 0, sizeof(sums));
    for (int64_t i = 0; widened && i < k; i += WIDENED_INPUTS) {
        const int64_t inputs = k - i < WIDENED_INPUTS ? k - i : WIDENED_INPUTS;
        for (int64_t rows, begin = 0; begin < widened; begin += rows) {
            rows = tile_rows(n, begin);
            NAME(widen_rows)(wide, stride, x + begin * x_stride + i, x_stride, rows, inputs);
            for (int64_t pair = first; pair < end; pair++) {
                float *to = sums + (pair - first) * size + begin * PAIR_COLUMNS;
                NAME(gemm_widened)(rows, wide, stride, packed + (pair * k + i) * PAIR_COLUMNS, inputs, to);
            }
        }
    }
    row = widened;
#endif
    for (int64_t rows; row < n; row += rows) {
        rows = tile_rows(n, row);
        for (int64_t pair = first; pair < end; pair++) {
            float *to = sums + (pair - first) * size + row * PAIR_COLUMNS;
            NAME(gemm_stored)(rows, x + row * x_stride, x_stride, packed + pair * k * PAIR_COLUMNS, k, to);
        }
    }
    for (int64_t pair = first; pair < end; pair++)
        NAME(store_tile)(sums + (pair - first) * size, n, out + pair * width, out_stride, layer->cols - pair * width, layer->gated);
}

void NAME(gemm_team)(
    const Packed *layer, const T *x, int64_t x_stride, T *out, int64_t out_stride, int64_t n, Barrier *barrier
) {
    const int64_t pairs = layer->gated ? (layer->cols + LANES - 1) / LANES : gemm_pairs(layer->cols);
    const int64_t chunks = (n + CHUNK_ROWS - 1) / CHUNK_ROWS, share = pair_share(pairs, NAME(pass_bytes)(layer->k));
    const int64_t shares = (pairs + share - 1) / share;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t task = 0; task < chunks * shares; task++) {
        const int64_t row = task / shares * CHUNK_ROWS, rows = n - row < CHUNK_ROWS ? n - row : CHUNK_ROWS;
        const int64_t first = task % shares * share, end = first + share < pairs ? first + share : pairs;
        NAME(gemm_pairs)(layer, first, end, x + row * x_stride, x_stride, out + row * out_stride, out_stride, rows);
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
