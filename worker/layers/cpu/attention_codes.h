/* What of attention to quantised K and V depends on the type of queries and outputs; included by attention_impl.h, the same names
 * as attention_tiles.h. The rest is attention_codes_tiles.h.
 */

typedef CodesRun NAME(Run);

INLINE size_t NAME(run_floats)(int dh, int queries) { return codes_run_floats(dh, queries); }

INLINE void NAME(widen)(float *wide, const T *x, int dh) {
    int d = 0;
    for (; d + GEMM_LANES <= dh; d += GEMM_LANES) store_g(wide + d, LOAD(x + d));
    for (; d < dh; d++) wide[d] = GET(x + d);
}

INLINE CodesRun NAME(make_run)(float *scratch, int dh, int queries, int of_head) {
    return make_codes_run(scratch, dh, queries, of_head);
}

INLINE void NAME(take_kind)(CodesRun *run, int kind, int dh) {
    run->kind = kind;
#ifdef WIDE_CODES
    run->in_whole = kind == KV_INT8 && sizeof(T) == 2 && dh % 16 == 0;
#endif
}

INLINE void NAME(start_query)(
    const CodesRun *run, int i, const T *q, const T *bias, const float *cos, const float *sin, int rope, int dh
) {
    T rotated[dh];
    NAME(rotate)(rotated, q, bias, cos, sin, rope, dh);
    float *to = run->tiles.q + i * dh, wide[dh];
    NAME(widen)(wide, rotated, dh);
#ifdef WIDE_CODES
    if (run->in_whole) { /* [head_dim] whole numbers, then what one is worth */
        int16_t whole[dh];
        const float worth = to_whole(whole, wide, dh, dh);
        memcpy(to, whole, sizeof(whole));
        to[dh / 2] = worth;
    } else
#endif
    if (run->tiles.single) memcpy(to, wide, sizeof(wide));
    else order_features(to, wide, dh, 1);
    start_sums_f32(&run->tiles, i, dh);
}

/* out [dh] = acc / l of one query. */
INLINE void NAME(finish_query)(const CodesRun *run, int i, T *out, int dh) {
    const float *acc = run->tiles.acc + i * acc_width_f32(dh), inverse = 1.0f / hsum_g(load_g(run->tiles.l + i * GEMM_LANES));
    int d = 0;
    for (; d + GEMM_LANES <= dh; d += GEMM_LANES) STORE(out + d, load_g(acc + d) * inverse);
    for (; d < dh; d++) PUT(out + d, acc[d] * inverse);
}
