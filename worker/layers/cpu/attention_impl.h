/* Body of the attention kernels for one element type; included once a type (see attention.c).
 *
 * A query's state while tiles stream by: running max m, running sum l, fp32 accumulator acc [Dh].
 */

/* Cached queries of one run: q as stored (rounded) and, where no bf16 dot product exists, widened. */
typedef struct {
    T *q;       /* [queries, head_dim] */
    float *acc; /* [queries, head_dim] */
    float *m, *l;
} NAME(Run);

INLINE vf NAME(load_tail)(const T *p) { /* 8 elements, the upper lanes 0 */
    T wide[LANES] = {0};
    memcpy(wide, p, 8 * sizeof(T));
    return LOAD(wide);
}

/* Dot products of q with the 16 keys of a tile; keys beyond n repeat key 0 (their scores are masked later).
 * Each line of the next block is asked for, into the second-level cache, as its counterpart here is read: requests
 * come no faster than they can be served. */
INLINE vf NAME(scores)(const T *q, const T *k, const T *next, int n, int dh) {
    float s[LANES];
    int d = 0;
#ifdef __AVX512F__
    __m512 acc[TILE];
#define KEY(t) (k + ((t) < n ? (t) * dh : 0))
#pragma GCC unroll 16
    for (int t = 0; t < TILE; t++) acc[t] = _mm512_setzero_ps();
#ifdef DOT_BF16
    for (; d + 32 <= dh; d += 32) {
        __m512bh qd = (__m512bh)_mm512_loadu_si512(q + d);
#pragma GCC unroll 16
        for (int t = 0; t < TILE; t++) {
            acc[t] = _mm512_dpbf16_ps(acc[t], (__m512bh)_mm512_loadu_si512(KEY(t) + d), qd);
            __builtin_prefetch(next + t * dh + d, 0, 2);
        }
    }
#endif
    for (; d + LANES <= dh; d += LANES) {
        vf qd = LOAD(q + d);
#pragma GCC unroll 16
        for (int t = 0; t < TILE; t++) {
            acc[t] = (__m512)((vf)acc[t] + LOAD(KEY(t) + d) * qd);
            if (sizeof(T) == 4) __builtin_prefetch(next + t * dh + d, 0, 2);
        }
    }
    if (d < dh) {
        vf qd = NAME(load_tail)(q + d);
        for (int t = 0; t < TILE; t++) acc[t] = (__m512)((vf)acc[t] + NAME(load_tail)(KEY(t) + d) * qd);
    }
#undef KEY
    (void)s;
    return reduce_lanes(acc);
#else
    for (int t = 0; t < TILE; t++) {
        if (t >= n) {
            s[t] = 0.0f;
            continue;
        }
        const T *key = k + t * dh;
        __builtin_prefetch(next + t * dh, 0, 2);
        vf acc = splat(0.0f);
        for (d = 0; d + LANES <= dh; d += LANES) acc += LOAD(key + d) * LOAD(q + d);
        if (d < dh) acc += NAME(load_tail)(key + d) * NAME(load_tail)(q + d);
        s[t] = hsum(acc);
    }
    return load_f32(s);
#endif
}

/* acc [Dh] += sum over t < n of p[t] * v[t]. Tokens beyond n are not read: stale memory may hold a NaN. */
INLINE void NAME(accumulate)(float *acc, vf weights, const T *v, const T *next, int n, int dh) {
    int d = 0;
    float p[LANES];
    store_f32(p, weights);
#ifdef DOT_BF16
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
#endif
    for (; d + 4 * LANES <= dh; d += 4 * LANES) {
        vf a0 = load_f32(acc + d), a1 = load_f32(acc + d + 16), a2 = load_f32(acc + d + 32), a3 = load_f32(acc + d + 48);
        for (int t = 0; t < n; t++) {
            const T *row = v + t * dh + d;
            __builtin_prefetch(next + t * dh + d, 0, 2);
            __builtin_prefetch(next + t * dh + d + 2 * LANES, 0, 2);
            vf pt = splat(p[t]);
            a0 += pt * LOAD(row);
            a1 += pt * LOAD(row + 16);
            a2 += pt * LOAD(row + 32);
            a3 += pt * LOAD(row + 48);
        }
        store_f32(acc + d, a0);
        store_f32(acc + d + 16, a1);
        store_f32(acc + d + 32, a2);
        store_f32(acc + d + 48, a3);
    }
    for (; d + LANES <= dh; d += LANES) {
        vf a = load_f32(acc + d);
        for (int t = 0; t < n; t++) a += splat(p[t]) * LOAD(v + t * dh + d);
        store_f32(acc + d, a);
    }
    if (d < dh) {
        vf a = NAME(load_tail)(v + d) * p[0];
        for (int t = 1; t < n; t++) a += splat(p[t]) * NAME(load_tail)(v + t * dh + d);
        for (int i = 0; i < 8; i++) acc[d + i] += a[i];
    }
}

/* Tokens first .. n - 1 of one tile for one query: online softmax. next_k, next_v: the same place in the next block. */
INLINE void NAME(tile)(
    const T *q, float *acc, float *m, float *l, const T *k, const T *v, const T *next_k, const T *next_v, int first, int n,
    int dh, float scale
) {
    static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi valid = (load_f32(lane) < (float)n) & (load_f32(lane) >= (float)first);
    const vf products = n == TILE ? NAME(scores)(q, k, next_k, TILE, dh) : NAME(scores)(q, k, next_k, n, dh);
    vf s = blend(valid, products * scale, splat(-INFINITY));
    float top = hmax(s);
    if (top > *m) {
        float shrink = *m == -INFINITY ? 0.0f : vexp(splat(*m - top))[0];
        for (int d = 0; d < dh; d += 8)
            for (int i = 0; i < 8; i++) acc[d + i] *= shrink;
        *l *= shrink;
        *m = top;
    }
    vf weights = blend(valid, vexp(s - *m), splat(0.0f));
    *l += hsum(weights);
    if (n == TILE) {
        NAME(accumulate)(acc, weights, v, next_v, TILE, dh);
    } else {
        NAME(accumulate)(acc, weights, v, next_v, n, dh);
    }
}

/* Asks for the block a row begins with, while its projections are rotated and appended. */
INLINE void NAME(prefetch_first_block)(
    const LayerArgs *layer, const RowArgs *rows, int64_t row, int64_t head, int64_t num_heads
) {
    const int64_t at = tile_offset(layer, physical_block(layer, rows, row, 0), head);
    const int64_t elements = num_heads * layer->block_size * layer->head_dim;
    for (int64_t i = 0; i < elements; i += 64 / (int64_t)sizeof(T)) {
        __builtin_prefetch((const T *)layer->k_cache + at + i, 0, 2);
        __builtin_prefetch((const T *)layer->v_cache + at + i, 0, 2);
    }
}

/* dst [Dh] = rotate(src [Dh] + bias), rounded to T after the bias and at the end, as the plain operators do. */
INLINE void NAME(rotate)(
    T *dst, const T *src, const T *bias, const float *cos, const float *sin, int rope, int dh
) {
    if (rope == ROPE_NONE) {
        memcpy(dst, src, dh * sizeof(T));
        return;
    }
    int half = dh / 2, step = rope == ROPE_SPLIT_HALF ? half : 1, spread = rope == ROPE_SPLIT_HALF ? 1 : 2;
    if (rope == ROPE_SPLIT_HALF && !bias && half % LANES == 0) {
        for (int i = 0; i < half; i += LANES) {
            vf a = LOAD(src + i), b = LOAD(src + i + half), c = load_f32(cos + i), s = load_f32(sin + i);
            STORE(dst + i, a * c - b * s);
            STORE(dst + i + half, b * c + a * s);
        }
        return;
    }
    for (int i = 0; i < half; i++) {
        int at = i * spread;
        float a = GET(src + at), b = GET(src + at + step);
        if (bias) {
            a = ROUND(a + GET(bias + at));
            b = ROUND(b + GET(bias + at + step));
        }
        PUT(dst + at, a * cos[i] - b * sin[i]);
        PUT(dst + at + step, b * cos[i] + a * sin[i]);
    }
}

/* Writes k and v of one row and head to the cache. */
INLINE void NAME(append)(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, int64_t row, int64_t head) {
    int dh = layer->head_dim;
    int64_t position = rows->positions[row], index = position / layer->block_size;
    int64_t at = tile_offset(layer, physical_block(layer, rows, row, index), head) + position % layer->block_size * dh;
    const T *bias = call->k_bias ? (const T *)call->k_bias + head * dh : NULL;
    const T *k = (const T *)call->k + row * call->k_stride + head * dh;
    NAME(rotate)((T *)layer->k_cache + at, k, bias, call->cos + row * (dh / 2), call->sin + row * (dh / 2), call->rope, dh);
    memcpy((T *)layer->v_cache + at, (const T *)call->v + row * call->v_stride + head * dh, dh * sizeof(T));
}

#ifdef DOT_BF16
#include "attention_lanes.h"
#endif

/* State of the queries of `count` rows from `row` and `num_heads` kv heads from `head`: [num_heads, count, group]. */
INLINE void NAME(start_run)(
    const LayerArgs *layer, const CallArgs *call, const NAME(Run) * run, int64_t row, int count, int64_t head, int num_heads
) {
    const int dh = layer->head_dim, group = layer->num_heads / layer->num_kv_heads, queries = count * group * num_heads;
    for (int i = 0; i < queries; i++) {
        const int64_t r = row + i / group % count, h = (head + i / (group * count)) * group + i % group;
        const T *q = (const T *)call->q + r * call->q_stride + h * dh;
        const T *bias = call->q_bias ? (const T *)call->q_bias + h * dh : NULL;
        NAME(rotate)(run->q + i * dh, q, bias, call->cos + r * (dh / 2), call->sin + r * (dh / 2), call->rope, dh);
        run->m[i] = -INFINITY;
        run->l[i] = 0.0f;
    }
    memset(run->acc, 0, sizeof(float) * queries * dh);
}

/* Writes acc / l of every query to the output. */
INLINE void NAME(finish_run)(
    const LayerArgs *layer, const CallArgs *call, const NAME(Run) * run, int64_t row, int count, int64_t head, int num_heads
) {
    const int dh = layer->head_dim, group = layer->num_heads / layer->num_kv_heads, queries = count * group * num_heads;
    for (int i = 0; i < queries; i++) {
        const int64_t r = row + i / group % count, h = (head + i / (group * count)) * group + i % group;
        T *out = (T *)call->out + r * call->out_stride + h * dh;
        const float *acc = run->acc + i * dh;
        const float inverse = 1.0f / run->l[i];
        int d = 0;
        for (; d + LANES <= dh; d += LANES) STORE(out + d, load_f32(acc + d) * inverse);
        for (; d < dh; d++) PUT(out + d, acc[d] * inverse);
    }
}

/* `count` rows from `row` (consecutive positions of one slot), kv heads head .. head + num_heads - 1. Heads of a block
 * are neighbours in memory, so a block is read as one stream. */
INLINE void NAME(attend_run)(
    const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, int64_t row, int count, int64_t head, int num_heads,
    float *scratch
) {
    const int dh = layer->head_dim, group = layer->num_heads / layer->num_kv_heads, queries = count * group * num_heads;
    const NAME(Run) run = {
        (T *)scratch, scratch + queries * dh, scratch + 2 * queries * dh, scratch + 2 * queries * dh + queries
    };
    NAME(start_run)(layer, call, &run, row, count, head, num_heads);
    const int64_t first = rows->positions[row], last = first + count - 1, size = layer->block_size;
    const int64_t unseen = layer->window && first >= layer->window ? first + 1 - layer->window : 0; /* by the first row */
    const int64_t begin = unseen / size * size;
    int64_t next_block = tile_offset(layer, physical_block(layer, rows, row, begin / size), head);
    for (int64_t start = begin; start <= last; start += size) {
        const int64_t block = next_block;
        if (start + size <= last) {
            next_block = tile_offset(layer, physical_block(layer, rows, row, start / size + 1), head);
        } else if (row + count < rows->num_rows) { /* most likely what this thread reads next */
            next_block = tile_offset(layer, physical_block(layer, rows, row + count, 0), head);
        }
        for (int h = 0; h < num_heads; h++) {
            for (int64_t t = 0; t < size && start + t <= last; t += TILE) {
                const int64_t at = block + (h * size + t) * dh, next = next_block + (h * size + t) * dh;
                for (int c = 0; c < count; c++) {
                    int64_t n = first + c + 1 - (start + t); /* tokens of this tile that the query may see */
                    if (n <= 0) continue;
                    n = n > TILE ? TILE : n;
                    n = n > size - t ? size - t : n;
                    int64_t from = layer->window ? first + c + 1 - layer->window - (start + t) : 0;
                    if (from >= n) continue;
                    from = from < 0 ? 0 : from;
                    const T *k = (const T *)layer->k_cache, *v = (const T *)layer->v_cache;
                    for (int i = (h * count + c) * group; i < (h * count + c + 1) * group; i++) {
#define TILE_OF(width) \
    NAME(tile)( \
        run.q + i * dh, run.acc + i * dh, run.m + i, run.l + i, k + at, v + at, k + next, v + next, (int)from, (int)n, width, \
        layer->scale \
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
        }
    }
    NAME(finish_run)(layer, call, &run, row, count, head, num_heads);
}

/* Rows row, row + 1, ... below `end` that continue the sequence of `row`. */
INLINE int NAME(run_length)(const RowArgs *rows, int64_t row, int64_t end) {
    int count = 1;
    while (row + count < end && rows->slots[row + count] == rows->slots[row] &&
           rows->positions[row + count] == rows->positions[row] + count)
        count++;
    return count;
}

/* Rows that read nothing of each other (distinct slots, or distinct planes of one): a task is a row and all its heads,
 * or a share of them where rows are too few for the team. */
static void NAME(decode_team)(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call) {
    const int64_t n = rows->num_rows, heads = layer->num_kv_heads;
    const int64_t num_heads = n < 4 * team_size() ? 1 : heads, shares = heads / num_heads;
    const int64_t queries = layer->num_heads / heads * num_heads;
    float scratch[queries * (2 * layer->head_dim + 2)] __attribute__((aligned(64)));
    /* A thread takes several neighbours at a time, since the prefetch at a row's end is for the next row. */
#pragma omp for schedule(dynamic, decode_share(n * shares)) nowait
    for (int64_t task = 0; task < n * shares; task++) {
        const int64_t head = task % shares * num_heads, row = task / shares;
        NAME(prefetch_first_block)(layer, rows, row, head, num_heads);
        for (int64_t h = head; h < head + num_heads; h++) NAME(append)(layer, rows, call, row, h);
        NAME(attend_run)(layer, rows, call, row, 1, head, (int)num_heads, scratch);
    }
}

/* Rows of a sequence read what others of it append: all appends first. A task is some rows and one kv head; runs are
 * found from multiples of that many rows, so that threads agree on them without a list. */
static void NAME(prefill_team)(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier) {
    const int64_t n = rows->num_rows, heads = layer->num_kv_heads;
    const int group = layer->num_heads / layer->num_kv_heads;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n; row++)
        for (int64_t head = 0; head < heads; head++) NAME(append)(layer, rows, call, row, head);
    team_barrier(barrier);
#ifdef DOT_BF16
    const int in_lanes = fits_lanes(layer);
    const size_t bytes = in_lanes ? lanes_scratch(layer->head_dim) : 0;
#else
    const int in_lanes = 0;
    const size_t bytes = 0;
#endif
    const int64_t stride = in_lanes ? LANES / group : MAX_RUN;
    const size_t plain_bytes = (size_t)MAX_RUN * group * (2 * layer->head_dim + 2) * sizeof(float);
    char scratch[in_lanes ? bytes : plain_bytes] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, 4) nowait
    for (int64_t task = 0; task < (n + stride - 1) / stride * heads; task++) {
        const int64_t head = task % heads, begin = task / heads * stride;
        const int64_t end = begin + stride < n ? begin + stride : n;
        for (int64_t row = begin, count; row < end; row += count) {
            count = NAME(run_length)(rows, row, end);
#ifdef DOT_BF16
            if (in_lanes) {
                attend_lanes(layer, rows, call, row, (int)count, head, scratch);
                continue;
            }
#endif
            NAME(attend_run)(layer, rows, call, row, (int)count, head, 1, (float *)scratch);
        }
    }
}

void NAME(attend_team)(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier) {
    if (rows->rows_share_slots) {
        NAME(prefill_team)(layer, rows, call, barrier);
    } else {
        NAME(decode_team)(layer, rows, call);
    }
    team_barrier(barrier);
}

/* for the next type */
#undef T
#undef NAME
#undef LOAD
#undef STORE
#undef ROUND
#undef GET
#undef PUT
