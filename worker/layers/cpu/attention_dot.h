/* Decode attention in bf16 with vdpbf16ps: a query at a time, products of pairs of features, keys and values as they are
 * stored. Included by attention_impl.h where the processor has bf16 dot products; the same names as attention_tiles.h.
 */

/* 16 accumulators -> their 16 sums, in one tree. */
INLINE vf reduce_lanes(const __m512 *a) {
    __m512 u[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 t0 = _mm512_add_ps(_mm512_unpacklo_ps(a[4 * i], a[4 * i + 1]), _mm512_unpackhi_ps(a[4 * i], a[4 * i + 1]));
        __m512 t1 =
            _mm512_add_ps(_mm512_unpacklo_ps(a[4 * i + 2], a[4 * i + 3]), _mm512_unpackhi_ps(a[4 * i + 2], a[4 * i + 3]));
        u[i] = _mm512_add_ps(_mm512_shuffle_ps(t0, t1, 0x44), _mm512_shuffle_ps(t0, t1, 0xEE));
    }
    __m512 w0 = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xDD));
    __m512 w1 = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xDD));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(w0, w1, 0x88), _mm512_shuffle_f32x4(w0, w1, 0xDD));
}

INLINE vf load_tail(const bf16 *p) { /* 8 elements, the upper lanes 0 */
    bf16 wide[LANES] = {0};
    memcpy(wide, p, 8 * sizeof(bf16));
    return load_g_bf16(wide);
}

/* Dot products of q with the 16 keys of a tile; keys beyond n repeat key 0 (their scores are masked later).
 * Each line of the next block is asked for, into the second-level cache, as its counterpart here is read: requests
 * come no faster than they can be served. */
INLINE vf dot_scores(const bf16 *q, const bf16 *k, const bf16 *next, int n, int dh) {
    int d = 0;
    __m512 acc[TILE];
#define KEY(t) (k + ((t) < n ? (t) * dh : 0))
#pragma GCC unroll 16
    for (int t = 0; t < TILE; t++) acc[t] = _mm512_setzero_ps();
    for (; d + 32 <= dh; d += 32) {
        __m512bh qd = (__m512bh)_mm512_loadu_si512(q + d);
#pragma GCC unroll 16
        for (int t = 0; t < TILE; t++) {
            acc[t] = _mm512_dpbf16_ps(acc[t], (__m512bh)_mm512_loadu_si512(KEY(t) + d), qd);
            __builtin_prefetch(next + t * dh + d, 0, 2);
        }
    }
    for (; d + LANES <= dh; d += LANES) {
        vf qd = load_g_bf16(q + d);
#pragma GCC unroll 16
        for (int t = 0; t < TILE; t++) acc[t] = (__m512)((vf)acc[t] + load_g_bf16(KEY(t) + d) * qd);
    }
    if (d < dh) {
        vf qd = load_tail(q + d);
        for (int t = 0; t < TILE; t++) acc[t] = (__m512)((vf)acc[t] + load_tail(KEY(t) + d) * qd);
    }
#undef KEY
    return reduce_lanes(acc);
}

/* acc [Dh] += sum over t < n of p[t] * v[t]. Tokens beyond n are not read: stale memory may hold a NaN. */
INLINE void dot_accumulate(float *acc, vf weights, const bf16 *v, const bf16 *next, int n, int dh) {
    int d = 0;
    float p[LANES];
    store_f32(p, weights);
    int32_t pairs[TILE / 2];
    _mm256_storeu_si256((__m256i *)pairs, (__m256i)_mm512_cvtneps_pbh((__m512)weights));
    for (; d + 32 <= dh; d += 32) {
        __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int t = 0; t < n; t += 2) {
            __builtin_prefetch(next + t * dh + d, 0, 2);
            __builtin_prefetch(next + (t + 1) * dh + d, 0, 2);
            __m512i v0 = _mm512_loadu_si512(v + t * dh + d);
            __m512i v1 = t + 1 < n ? _mm512_loadu_si512(v + (t + 1) * dh + d) : _mm512_setzero_si512();
            __m512bh pp = (__m512bh)_mm512_set1_epi32(pairs[t / 2]);
            low = _mm512_dpbf16_ps(low, (__m512bh)_mm512_unpacklo_epi16(v0, v1), pp);
            high = _mm512_dpbf16_ps(high, (__m512bh)_mm512_unpackhi_epi16(v0, v1), pp);
        }
        /* unpack works within 128-bit lanes: low holds features 8i..8i+3, high 8i+4..8i+7 of lane i */
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        store_f32(acc + d, load_f32(acc + d) + (vf)_mm512_permutex2var_ps(low, first, high));
        store_f32(acc + d + 16, load_f32(acc + d + 16) + (vf)_mm512_permutex2var_ps(low, second, high));
    }
    for (; d + LANES <= dh; d += LANES) {
        vf a = load_f32(acc + d);
        for (int t = 0; t < n; t++) a += splat(p[t]) * load_g_bf16(v + t * dh + d);
        store_f32(acc + d, a);
    }
    if (d < dh) {
        vf a = load_tail(v + d) * p[0];
        for (int t = 1; t < n; t++) a += splat(p[t]) * load_tail(v + t * dh + d);
        for (int i = 0; i < 8; i++) acc[d + i] += a[i];
    }
}

/* Tokens first .. n - 1 of one tile for one query: online softmax. next_k, next_v: the same place in the next block. */
INLINE void dot_tile(
    const bf16 *q, float *acc, float *m, float *l, const bf16 *k, const bf16 *v, const bf16 *next_k, const bf16 *next_v,
    int first, int n, int dh, float scale
) {
    static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi valid = (load_f32(lane) < (float)n) & (load_f32(lane) >= (float)first);
    const vf products = n == TILE ? dot_scores(q, k, next_k, TILE, dh) : dot_scores(q, k, next_k, n, dh);
    vf s = blend(valid, products * scale, splat(-INFINITY));
    float top = hmax(s);
    if (top > *m) {
        float shrink = *m == -INFINITY ? 0.0f : exp_g(splat(*m - top))[0];
        for (int d = 0; d < dh; d += 8)
            for (int i = 0; i < 8; i++) acc[d + i] *= shrink;
        *l *= shrink;
        *m = top;
    }
    vf weights = blend(valid, exp_g(s - *m), splat(0.0f));
    *l += hsum(weights);
    if (n == TILE) {
        dot_accumulate(acc, weights, v, next_v, TILE, dh);
    } else {
        dot_accumulate(acc, weights, v, next_v, n, dh);
    }
}

/* Cached queries of one run, rounded as they are stored. */
typedef struct {
    bf16 *q;    /* [queries, head_dim] */
    float *acc; /* [queries, head_dim] */
    float *m, *l;
} NAME(Run);

/* Floats of scratch. */
INLINE size_t NAME(run_floats)(int dh, int queries) { return (size_t)queries * (2 * dh + 2); }

INLINE NAME(Run) NAME(make_run)(float *scratch, int dh, int queries, int of_head) {
    float *acc = scratch + queries * dh, *m = acc + queries * dh;
    return (NAME(Run)){.q = (bf16 *)scratch, .acc = acc, .m = m, .l = m + queries};
}

INLINE void NAME(start_query)(
    const NAME(Run) * run, int i, const bf16 *q, const bf16 *bias, const float *cos, const float *sin, int rope, int dh
) {
    NAME(rotate)(run->q + i * dh, q, bias, cos, sin, rope, dh);
    memset(run->acc + i * dh, 0, sizeof(float) * dh);
    run->m[i] = -INFINITY;
    run->l[i] = 0.0f;
}

/* See attention_tiles.h. */
static void NAME(attend_tile)(
    NAME(Run) * run, const bf16 *k, const bf16 *v, const bf16 *next_k, const bf16 *next_v, int64_t stride, int num_heads,
    int count, int group, int c, int together, int first, int64_t end, int n, int dh, float scale
) {
    for (int h = 0; h < num_heads; h++) {
        const int64_t at = h * stride;
        for (int j = 0; j < together * group; j++) {
            const int i = (h * count + c) * group + j, last = (int)smallest(n, end + j / group, n);
#define TILE_OF(width) \
    dot_tile( \
        run->q + i * dh, run->acc + i * dh, run->m + i, run->l + i, k + at, v + at, next_k + at, next_v + at, first, last, width, \
        scale \
    )
            if (dh == 64) {
                TILE_OF(64);
            } else if (dh == 128) {
                TILE_OF(128);
            } else {
                TILE_OF(dh);
            }
#undef TILE_OF
        }
    }
}

/* out [dh] = acc / l of one query. */
INLINE void NAME(finish_query)(const NAME(Run) * run, int i, bf16 *out, int dh) {
    const float *acc = run->acc + i * dh, inverse = 1.0f / run->l[i];
    int d = 0;
    for (; d + LANES <= dh; d += LANES) store_g_bf16(out + d, load_f32(acc + d) * inverse);
    for (; d < dh; d++) scalar_put_bf16(out + d, acc[d] * inverse);
}
