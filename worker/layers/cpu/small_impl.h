/* Body of the row-wise operators for one element type; included once a type (see small.c). */

/* A register of features i, i + 1, ... of x (+ y), the sum rounded; past `d` zeros. */
INLINE vg NAME(load_sum)(const T *x, const T *y, int64_t i, int64_t d) {
    if (i + GEMM_LANES <= d) return y ? VROUND(LOAD(x + i) + LOAD(y + i)) : LOAD(x + i);
    vg v = splat_g(0.0f);
    for (int64_t j = i; j < d; j++) v[j - i] = y ? ROUND(GET(x + j) + GET(y + j)) : GET(x + j);
    return v;
}

/* out = (residual +) norm(x (+ y)) * weight, one row; out may be residual, x or y. */
void NAME(norm_row)(
    T *out, const T *x, const T *y, const T *residual, const T *weight, int64_t d, float eps
) {
    Parts sum[4] = {0}, all;
    for (int64_t at = 0; at < d; at += 4 * LANES)
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            if (at + s * LANES >= d) continue;
#pragma GCC unroll 2
            for (int p = 0; p < LANES / GEMM_LANES; p++) {
                const vg v = NAME(load_sum)(x, y, at + s * LANES + p * GEMM_LANES, d);
                sum[s].part[p] = multiply_add(v, v, sum[s].part[p]);
            }
        }
#pragma GCC unroll 2
    for (int p = 0; p < LANES / GEMM_LANES; p++)
        all.part[p] = (sum[0].part[p] + sum[1].part[p]) + (sum[2].part[p] + sum[3].part[p]);
    const float scale = 1.0f / sqrtf(hsum(all.v) / (float)d + eps);
    int64_t i = 0;
    for (; i + GEMM_LANES <= d; i += GEMM_LANES) {
        const vg v = VROUND(NAME(load_sum)(x, y, i, d) * scale) * LOAD(weight + i);
        STORE(out + i, residual ? VROUND(v) + LOAD(residual + i) : v);
    }
    for (; i < d; i++) {
        float v = y ? ROUND(GET(x + i) + GET(y + i)) : GET(x + i);
        v = ROUND(ROUND(v * scale) * GET(weight + i));
        PUT(out + i, residual ? v + GET(residual + i) : v);
    }
}

/* out [n, d] = (residual +) rms_norm(x (+ y)); y and residual may be NULL. */
EXPORT void NAME(db_norm)(
    void *out, const void *x, const void *y, const void *residual, const void *weight, int64_t n, int64_t d, float eps
) {
#pragma omp parallel for schedule(static) if (n * d >= PARALLEL_MIN_ELEMENTS)
    for (int64_t row = 0; row < n; row++) {
        const int64_t at = row * d;
        NAME(norm_row)(
            (T *)out + at, (const T *)x + at, y ? (const T *)y + at : NULL, residual ? (const T *)residual + at : NULL,
            (const T *)weight, d, eps
        );
    }
}

/* sum [n, d] = residual + rms_norm(x, weight); next [n, d] = rms_norm(sum, next_weight). sum may be residual. */
EXPORT void NAME(db_norm_add_norm)(
    void *sum, void *next, const void *residual, const void *x, const void *weight, const void *next_weight, int64_t n,
    int64_t d, float eps
) {
#pragma omp parallel for schedule(static) if (n * d >= PARALLEL_MIN_ELEMENTS)
    for (int64_t row = 0; row < n; row++) {
        const int64_t at = row * d;
        NAME(norm_row)((T *)sum + at, (const T *)x + at, NULL, (const T *)residual + at, (const T *)weight, d, eps);
        NAME(norm_row)((T *)next + at, (const T *)sum + at, NULL, NULL, (const T *)next_weight, d, eps);
    }
}

/* out [n, width] = silu(gate) * up of gate_up [n, 2 * width]. */
EXPORT void NAME(db_silu_mul)(void *out, const void *gate_up, int64_t n, int64_t width) {
#pragma omp parallel for schedule(static) if (n * width >= PARALLEL_MIN_ELEMENTS)
    for (int64_t row = 0; row < n; row++) {
        const T *gate = (const T *)gate_up + row * 2 * width, *up = gate + width;
        T *to = (T *)out + row * width;
        for (int64_t i = 0; i < width; i += GEMM_LANES) {
            const int64_t lanes = width - i < GEMM_LANES ? width - i : GEMM_LANES;
            if (lanes == GEMM_LANES) {
                STORE(to + i, VROUND(silu_g(LOAD(gate + i))) * LOAD(up + i));
                continue;
            }
            T g[GEMM_LANES] = {0}, u[GEMM_LANES] = {0}; /* the last few features go through a padded copy */
            memcpy(g, gate + i, lanes * sizeof(T));
            memcpy(u, up + i, lanes * sizeof(T));
            STORE(g, VROUND(silu_g(LOAD(g))) * LOAD(u));
            memcpy(to + i, g, lanes * sizeof(T));
        }
    }
}

/* out [n, heads, dh] = rotated x; rows of x are `stride` elements apart, cos and sin [n, dh / 2]. */
EXPORT void NAME(db_rope)(
    void *out, const void *x, const float *cos, const float *sin, int64_t n, int64_t heads, int64_t dh, int64_t stride,
    int64_t interleaved
) {
    const int64_t half = dh / 2;
#pragma omp parallel for schedule(static) if (n * heads * dh >= PARALLEL_MIN_ELEMENTS)
    for (int64_t row = 0; row < n; row++) {
        const float *c = cos + row * half, *s = sin + row * half;
        for (int64_t head = 0; head < heads; head++) {
            const T *from = (const T *)x + row * stride + head * dh;
            T *to = (T *)out + (row * heads + head) * dh;
            int64_t i = 0;
            for (; !interleaved && i + GEMM_LANES <= half; i += GEMM_LANES) {
                vg a = LOAD(from + i), b = LOAD(from + i + half), cv = load_g(c + i), sv = load_g(s + i);
                STORE(to + i, a * cv - b * sv);
                STORE(to + i + half, b * cv + a * sv);
            }
            for (; i < half; i++) {
                const int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
                const float a = GET(from + first), b = GET(from + second);
                PUT(to + first, a * c[i] - b * s[i]);
                PUT(to + second, b * c[i] + a * s[i]);
            }
        }
    }
}

/* for the next type */
#undef T
#undef NAME
#undef LOAD
#undef STORE
#undef VROUND
#undef ROUND
#undef GET
#undef PUT
