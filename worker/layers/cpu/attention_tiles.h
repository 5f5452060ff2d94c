/* Attention by tiles of 16 tokens, in registers of GEMM_LANES lanes: what is read of the cache serves all queries of a run.
 *
 *     scores  [6 queries][16 tokens]      two chains of multiply-adds over the features, keys turned into [features][16 tokens]
 *     softmax                             online, a query at a time
 *     acc     [6 queries][2 registers]    a chain over the tokens, values as they lie
 *
 * A query's sums do not depend on how many others share its tile, so a prefilled token has the bits of a decoded one.
 * Elements of two bytes are read as words of two: acc holds the first of each word, then the second, a register at a time.
 */

#define UNIT (PARTS * GEMM_LANES) /* elements in a register of words */

typedef struct {
    float *q;       /* [queries, head_dim], widened */
    float *acc;     /* [queries, head_dim up to a whole UNIT] */
    float *m, *l;
    float *keys;    /* [head_dim, TILE] of the tile at hand */
    float *weights; /* [TILE_QUERIES, TILE] */
    const T *v;     /* of the tile at hand */
} NAME(Run);

INLINE int NAME(acc_width)(int dh) { return (dh + UNIT - 1) / UNIT * UNIT; }

/* Floats of scratch. */
INLINE size_t NAME(run_floats)(int dh, int queries) {
    return (size_t)(dh + TILE_QUERIES) * TILE + (size_t)queries * (dh + NAME(acc_width)(dh) + 2);
}

INLINE NAME(Run) NAME(make_run)(float *scratch, int dh, int queries) {
    float *weights = scratch + dh * TILE, *acc = weights + TILE_QUERIES * TILE, *q = acc + queries * NAME(acc_width)(dh);
    float *m = q + queries * dh;
    return (NAME(Run)){.keys = scratch, .weights = weights, .acc = acc, .q = q, .m = m, .l = m + queries};
}

INLINE void NAME(start_query)(
    const NAME(Run) * run, int i, const T *q, const T *bias, const float *cos, const float *sin, int rope, int dh
) {
    T rotated[dh];
    NAME(rotate)(rotated, q, bias, cos, sin, rope, dh);
    int d = 0;
    for (; d + LANES <= dh; d += LANES) store_f32(run->q + i * dh + d, LOAD(rotated + d));
    for (; d < dh; d++) run->q[i * dh + d] = GET(rotated + d);
    memset(run->acc + i * NAME(acc_width)(dh), 0, sizeof(float) * NAME(acc_width)(dh));
}

/* keys [dh, TILE]: the n keys of a tile, feature by feature; keys beyond n repeat key 0 (their scores are masked later).
 * Each line of the next block is asked for, into the second-level cache, as its counterpart here is read: requests
 * come no faster than they can be served. */
INLINE void NAME(turn_keys)(float *keys, const T *k, const T *next_k, const T *next_v, int n, int64_t dh) {
    int64_t d = 0;
#define KEY(t) (k + ((t) < n ? (t) * dh : 0))
#ifdef __AVX2__
    const int step = 8 * PARTS, line = 64 / sizeof(T);
    for (; d + step <= dh; d += step) {
        for (int t = 0; t < TILE; t += 8) {
            __m256i r[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                r[i] = _mm256_loadu_si256((const __m256i *)(KEY(t + i) + d));
                if (d % line == 0) {
                    __builtin_prefetch(next_k + (t + i) * dh + d, 0, 2);
                    __builtin_prefetch(next_v + (t + i) * dh + d, 0, 2);
                }
            }
            transpose_8x8(r);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                float *to = keys + (d + PARTS * i) * TILE + t;
                if (PARTS == 1) {
                    _mm256_store_si256((__m256i *)to, r[i]);
                } else {
                    _mm256_store_si256((__m256i *)to, _mm256_slli_epi32(r[i], 16));
                    _mm256_store_si256((__m256i *)(to + TILE), _mm256_and_si256(r[i], _mm256_set1_epi32(0xffff0000)));
                }
            }
        }
    }
#endif
    for (; d < dh; d++)
        for (int t = 0; t < TILE; t++) keys[d * TILE + t] = GET(KEY(t) + d);
#undef KEY
}

INLINE void NAME(read_tile)(NAME(Run) * run, const T *k, const T *v, const T *next_k, const T *next_v, int n, int dh) {
    if (n == TILE) NAME(turn_keys)(run->keys, k, next_k, next_v, TILE, dh);
    else NAME(turn_keys)(run->keys, k, next_k, next_v, n, dh);
    run->v = v;
}

/* acc [ROWS][UNITS units] += weights [ROWS, n] times values; the last unit of a row has `elements` of them. Tokens beyond n
 * are not read: stale memory may hold a NaN. ROWS and UNITS are constants, so that sums live in registers. */
INLINE void NAME(add_values)(
    const int ROWS, const int UNITS, float *acc, int width, const float *weights, const T *v, int n, int dh, int elements
) {
    vg sum[TILE_QUERIES][MAX_SUMS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int i = 0; i < UNITS * PARTS; i++) sum[r][i] = load_g(acc + r * width + i * GEMM_LANES);
    for (int t = 0; t < n; t++) {
        vgu words[MAX_SUMS] = {0};
#pragma GCC unroll 8
        for (int u = 0; u < UNITS; u++) {
            if (elements == UNIT) words[u] = load_words(v + t * dh + u * UNIT);
            else memcpy(&words[u], v + t * dh + u * UNIT, elements * sizeof(T));
        }
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const vg weight = splat_g(weights[r * TILE + t]);
#pragma GCC unroll 8
            for (int i = 0; i < UNITS * PARTS; i++)
                sum[r][i] = multiply_add(OPERAND(words[i / PARTS], i % PARTS), weight, sum[r][i]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int i = 0; i < UNITS * PARTS; i++) store_g(acc + r * width + i * GEMM_LANES, sum[r][i]);
}

/* The same for all dh features, VECTORS registers of sums a query at a time. */
INLINE void NAME(add_rows)(
    const int ROWS, const int VECTORS, float *acc, const float *weights, const T *v, int n, int dh
) {
    const int width = NAME(acc_width)(dh), units = VECTORS / PARTS;
    int d = 0;
    for (; d + units * UNIT <= dh; d += units * UNIT) NAME(add_values)(ROWS, units, acc + d, width, weights, v + d, n, dh, UNIT);
    for (; d + UNIT <= dh; d += UNIT) NAME(add_values)(ROWS, 1, acc + d, width, weights, v + d, n, dh, UNIT);
    if (d < dh) NAME(add_values)(ROWS, 1, acc + d, width, weights, v + d, n, dh, dh - d);
}

/* ROWS queries from i; see attend_tile. VECTORS: registers of sums a query. */
INLINE void NAME(attend_rows)(
    const int ROWS, const int VECTORS, const NAME(Run) * run, int i, int first, const int *ends, int dh, float scale
) {
    const int width = NAME(acc_width)(dh);
    float *acc = run->acc + i * width, *weights = run->weights;
    tile_scores(ROWS, run->q + i * dh, run->keys, dh, weights);
    const int whole = first == 0 && ends[0] == TILE;
    for (int r = 0; r < ROWS; r++) {
        float *w = weights + r * TILE, *m = run->m + i + r, *l = run->l + i + r;
        const float shrink =
            whole ? tile_softmax(1, w, m, l, 0, TILE, scale) : tile_softmax(0, w, m, l, first, ends[r], scale);
        if (shrink != 1.0f)
            for (int d = 0; d < width; d += GEMM_LANES) store_g(acc + r * width + d, load_g(acc + r * width + d) * shrink);
    }
    NAME(add_rows)(ROWS, VECTORS, acc, weights, run->v, ends[0], dh);
    for (int r = 1; r < ROWS; r++) {
        if (ends[r] == ends[0]) continue;
        NAME(add_rows)(1, MAX_SUMS, acc + r * width, weights + r * TILE + ends[0], run->v + ends[0] * dh, ends[r] - ends[0], dh);
    }
}

/* Tokens first .. of the tile for `count` queries from `begin`: the first `group` of them up to `end`, the next to one more,
 * but all only to n. */
static void NAME(attend_tile)(
    const NAME(Run) * run, int begin, int count, int group, int first, int end, int n, int dh, float scale
) {
    for (int done = 0, rows; done < count; done += rows) {
        const int left = count - done;
        rows = left <= TILE_QUERIES ? left : left < 2 * TILE_QUERIES ? (left + 1) / 2 : TILE_QUERIES;
        int ends[TILE_QUERIES];
        for (int r = 0; r < rows; r++) ends[r] = end >= n ? n : (int)smallest(n, end + (done + r) / group, n);
#define ROWS_CASE(R, VECTORS) \
    case R: \
        NAME(attend_rows)(R, VECTORS, run, begin + done, first, ends, dh, scale); \
        break;
        switch (rows) {
            ROWS_CASE(1, MAX_SUMS) ROWS_CASE(2, 4) ROWS_CASE(3, 2) ROWS_CASE(4, 2) ROWS_CASE(5, 2) ROWS_CASE(6, 2)
        }
#undef ROWS_CASE
    }
}

/* out [dh] = acc / l of one query. */
INLINE void NAME(finish_query)(const NAME(Run) * run, int i, T *out, int dh) {
    const float *acc = run->acc + i * NAME(acc_width)(dh), inverse = 1.0f / run->l[i];
    for (int d = 0; d < dh; d += UNIT) {
        const vgu words = WORDS(load_g(acc + d) * inverse, load_g(acc + d + (PARTS - 1) * GEMM_LANES) * inverse);
        memcpy(out + d, &words, (d + UNIT <= dh ? UNIT : dh - d) * sizeof(T));
    }
}

#undef UNIT
