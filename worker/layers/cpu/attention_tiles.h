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
#define STEP (PARTS * CHAINS) /* elements of which each chain of a score has a word */

typedef struct {
    float *q;       /* [queries, head_dim], widened; chain by chain, if `single` by registers: first of each word, then second */
    float *acc;     /* [queries, acc_width] */
    float *m, *l;   /* [queries], [queries, GEMM_LANES] */
    float *keys;    /* [head_dim, TILE] of the tile at hand */
    const T *turned; /* where they are in the cache */
    float *weights; /* [queries, TILE] */
    int single;     /* a KV head has one query, whose scores are summed up as keys lie */
} NAME(Run);

INLINE int NAME(acc_width)(int dh) { return (dh + UNIT - 1) / UNIT * UNIT; }

/* Floats of scratch. */
INLINE size_t NAME(run_floats)(int dh, int queries) {
    return (size_t)dh * TILE + (size_t)queries * (TILE + dh + NAME(acc_width)(dh) + 1 + GEMM_LANES);
}

INLINE NAME(Run) NAME(make_run)(float *scratch, int dh, int queries, int of_head) {
    float *weights = scratch + dh * TILE, *acc = weights + queries * TILE, *q = acc + queries * NAME(acc_width)(dh);
    float *l = q + queries * dh;
    return (NAME(Run)){
        .keys = scratch, .weights = weights, .acc = acc, .q = q, .l = l, .m = l + queries * GEMM_LANES,
#ifdef __AVX2__
        .single = of_head == 1 && dh % STEP == 0,
#endif
    };
}

/* No token has been seen. */
INLINE void NAME(start_sums)(const NAME(Run) * run, int i, int dh) {
    memset(run->acc + i * NAME(acc_width)(dh), 0, sizeof(float) * NAME(acc_width)(dh));
    memset(run->l + i * GEMM_LANES, 0, sizeof(float) * GEMM_LANES);
    run->m[i] = -INFINITY;
}

INLINE void NAME(start_query)(
    const NAME(Run) * run, int i, const T *q, const T *bias, const float *cos, const float *sin, int rope, int dh
) {
    T rotated[dh];
    NAME(rotate)(rotated, q, bias, cos, sin, rope, dh);
    float *to = run->q + i * dh;
    int d = 0;
#ifdef __AVX2__
    for (; run->single && d < dh; d += STEP)
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++)
            _mm256_storeu_ps(to + d + part * CHAINS, OPERAND_256(_mm256_loadu_si256((const __m256i *)(rotated + d)), part));
#endif
    if (!run->single) {
        float wide[dh];
        for (; d + GEMM_LANES <= dh; d += GEMM_LANES) store_g(wide + d, LOAD(rotated + d));
        for (; d < dh; d++) wide[d] = GET(rotated + d);
        order_features(to, wide, dh, PARTS);
    }
    NAME(start_sums)(run, i, dh);
}

#define KEY(t) (k + ((t) < n ? (t) * dh : 0)) /* keys beyond n repeat key 0: their scores are masked later */
#ifdef __AVX2__

/* r[0..7]: STEP features from d of keys t .. t + 7, as words of a feature or two. Each line of the next block is asked for,
 * into the second-level cache, as its counterpart here is read: requests come no faster than they can be served. */
INLINE void NAME(turn)(__m256i r[8], const T *k, const T *next, int t, int64_t d, int n, int64_t dh) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        r[i] = _mm256_loadu_si256((const __m256i *)(KEY(t + i) + d));
        if (d % (64 / sizeof(T)) == 0) __builtin_prefetch(next + (t + i) * dh + d, 0, 2);
    }
    transpose_8x8(r);
}

/* scores [TILE] of one query: the sums of tile_scores. Each line of the next block is asked for, as in turn. dh a multiple of
 * STEP. */
INLINE void NAME(query_scores)(
    const float *q, const T *k, const T *next, int n, int64_t dh, float *scores
) {
#pragma GCC unroll 2
    for (int t = 0; t < TILE; t += 8) {
        __m256 acc[8] = {0};
        for (int64_t d = 0; d < dh; d += STEP)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m256i words = _mm256_loadu_si256((const __m256i *)(KEY(t + i) + d));
                if (d % (64 / sizeof(T)) == 0) __builtin_prefetch(next + (t + i) * dh + d, 0, 2);
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++)
                    acc[i] = multiply_add_256(OPERAND_256(words, part), _mm256_loadu_ps(q + d + part * CHAINS), acc[i]);
            }
        _mm256_storeu_ps(scores + t, sums_of_8(acc));
    }
}
#endif

/* keys [dh, TILE]: the n keys of a tile, feature by feature, chain by chain. */
INLINE void NAME(turn_keys)(float *keys, const T *k, const T *next, int n, int64_t dh) {
    int64_t d = 0;
#ifdef __AVX2__
    for (; d + STEP <= dh; d += STEP)
        for (int t = 0; t < TILE; t += 8) {
            __m256i r[8];
            NAME(turn)(r, k, next, t, d, n, dh);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++)
                    _mm256_storeu_ps(keys + (chain_place(d / PARTS + i, dh, PARTS) + part) * TILE + t, OPERAND_256(r[i], part));
        }
#endif
    for (; d < dh; d++)
        for (int t = 0; t < TILE; t++) keys[(chain_place(d / PARTS, dh, PARTS) + d % PARTS) * TILE + t] = GET(KEY(t) + d);
}

/* acc [ROWS][UNITS units] += weights [ROWS, n] times values; the last unit of a row has `elements` of them. Tokens beyond n
 * are not read: stale memory may hold a NaN. ROWS and UNITS are constants, so that sums live in registers. */
INLINE void NAME(add_values)(
    const int ROWS, const int UNITS, float *acc, int width, const float *weights, const T *v, const T *next, int n, int dh,
    int elements
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
            if (u * UNIT % (64 / sizeof(T)) == 0) __builtin_prefetch(next + t * dh + u * UNIT, 0, 2);
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
    const int ROWS, const int VECTORS, float *acc, const float *weights, const T *v, const T *next, int n, int dh
) {
    const int width = NAME(acc_width)(dh), units = VECTORS / PARTS;
    int d = 0;
    for (; d + units * UNIT <= dh; d += units * UNIT) NAME(add_values)(ROWS, units, acc + d, width, weights, v + d, next + d, n, dh, UNIT);
    for (; d + UNIT <= dh; d += UNIT) NAME(add_values)(ROWS, 1, acc + d, width, weights, v + d, next + d, n, dh, UNIT);
    if (d < dh) NAME(add_values)(ROWS, 1, acc + d, width, weights, v + d, next + d, n, dh, dh - d);
}

/* Scores of `count` queries from i with the tile at k. */
INLINE void NAME(score_head)(
    NAME(Run) * run, const T *k, const T *next, int i, int count, int n, int dh
) {
    const float *q = run->q + i * dh;
    float *weights = run->weights + i * TILE;
#ifdef __AVX2__
    if (run->single) {
        if (n == TILE) NAME(query_scores)(q, k, next, TILE, dh, weights);
        else NAME(query_scores)(q, k, next, n, dh, weights);
        return;
    }
#endif
    if (run->turned != k) {
        if (n == TILE) NAME(turn_keys)(run->keys, k, next, TILE, dh);
        else NAME(turn_keys)(run->keys, k, next, n, dh);
        run->turned = k;
    }
    tile_scores_of(count, q, run->keys, dh, weights);
}

/* Scores of `count` queries from i become weights; of these the first `group` see tokens first .. end - 1, the next one more,
 * but all only up to n. */
INLINE void NAME(weigh)(
    NAME(Run) * run, int i, int count, int group, int first, int64_t end, int n, int dh, float scale
) {
    const int width = NAME(acc_width)(dh);
    for (int j = 0, row = 0, of_row = 0; j < count; j++) {
        const int last = (int)smallest(n, end + row, n);
        float *w = run->weights + (i + j) * TILE, *m = run->m + i + j, *l = run->l + (i + j) * GEMM_LANES;
        float *acc = run->acc + (i + j) * width;
        if (++of_row == group) row++, of_row = 0;
        const float shrink = first == 0 && last == TILE ? tile_softmax(1, w, m, l, 0, TILE, scale)
                                                        : tile_softmax(0, w, m, l, first, last, scale);
        if (shrink != 1.0f)
            for (int d = 0; d < width; d += GEMM_LANES) store_g(acc + d, load_g(acc + d) * shrink);
    }
}

/* Adds the values at v, weighed, to the sums of `count` queries from i; of those the first `group` take tokens up to `end`,
 * the next to one more, but all only to n. */
INLINE void NAME(value_head)(
    const NAME(Run) * run, const T *v, const T *next, int i, int count, int group, int64_t end, int n, int dh
) {
    const int width = NAME(acc_width)(dh);
    for (int done = 0, rows; done < count; done += rows) {
        float *acc = run->acc + (i + done) * width, *weights = run->weights + (i + done) * TILE;
        const int common = (int)smallest(n, end + done / group, n);
        rows = block_of(count - done);
#define ROWS_CASE(R, VECTORS) \
    case R: \
        NAME(add_rows)(R, VECTORS, acc, weights, v, next, common, dh); \
        break;
        switch (rows) {
            ROWS_CASE(1, MAX_SUMS) ROWS_CASE(2, 4) ROWS_CASE(3, 2) ROWS_CASE(4, 2) ROWS_CASE(5, 2) ROWS_CASE(6, 2)
        }
#undef ROWS_CASE
        for (int r = 1; r < rows && common < n; r++) {
            const int more = (int)smallest(n, end + (done + r) / group, n) - common;
            NAME(add_rows)(1, MAX_SUMS, acc + r * width, weights + r * TILE + common, v + common * dh, next + common * dh, more, dh);
        }
    }
}

/* One tile of every head: tokens first .. n - 1 for `together` rows from row c, of which the first sees `end` tokens and each
 * following one more. Heads are `stride` elements apart in the cache. One step of all heads and queries is done
 * before the next, since within one query every step waits for the last. */
static void NAME(attend_tile)(
    NAME(Run) * run, const T *k, const T *v, const T *next_k, const T *next_v, int64_t stride, int num_heads, int count,
    int group, int c, int together, int first, int64_t end, int n, int dh, float scale
) {
    const int queries = together * group;
    for (int h = 0; h < num_heads; h++) {
        const int64_t at = h * stride;
        NAME(score_head)(run, k + at, next_k + at, (h * count + c) * group, queries, n, dh);
    }
    for (int h = 0; h < num_heads; h++) NAME(weigh)(run, (h * count + c) * group, queries, group, first, end, n, dh, scale);
    for (int h = 0; h < num_heads; h++)
        NAME(value_head)(run, v + h * stride, next_v + h * stride, (h * count + c) * group, queries, group, end, n, dh);
}

/* out [dh] = acc / l of one query. */
INLINE void NAME(finish_query)(const NAME(Run) * run, int i, T *out, int dh) {
    const float *acc = run->acc + i * NAME(acc_width)(dh), inverse = 1.0f / hsum_g(load_g(run->l + i * GEMM_LANES));
    for (int d = 0; d < dh; d += UNIT) {
        const vgu words = WORDS(load_g(acc + d) * inverse, load_g(acc + d + (PARTS - 1) * GEMM_LANES) * inverse);
        memcpy(out + d, &words, (d + UNIT <= dh ? UNIT : dh - d) * sizeof(T));
    }
}

#undef UNIT
#undef KEY
#undef STEP
