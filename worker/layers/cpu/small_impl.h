/* Body of the row-wise operators for one element type; included once a type (see small.c). */

/* 16 features of x (+ y), the sum rounded; past `d` zeros. */
INLINE vf NAME(load_sum)(const T *x, const T *y, int64_t i, int64_t d) {
    if (i + LANES <= d) return y ? VROUND(LOAD(x + i) + LOAD(y + i)) : LOAD(x + i);
    vf v = splat(0.0f);
    for (int64_t j = i; j < d; j++) v[j - i] = y ? ROUND(GET(x + j) + GET(y + j)) : GET(x + j);
    return v;
}

/* out = (residual +) norm(x (+ y)) * weight, one row; out may be residual, x or y. */
void NAME(norm_row)(
    T *out, const T *x, const T *y, const T *residual, const T *weight, int64_t d, float eps
) {
    vf sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    for (int64_t i = 0; i < d; i += LANES) {
        vf v = NAME(load_sum)(x, y, i, d);
        sum[(i / LANES) % 4] += v * v;
    }
    const float scale = 1.0f / sqrtf(hsum((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)d + eps);
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES) {
        vf v = VROUND(NAME(load_sum)(x, y, i, d) * scale) * LOAD(weight + i);
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
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t lanes = width - i < LANES ? width - i : LANES;
            T g[LANES] = {0}, u[LANES] = {0}, result[LANES];
            if (lanes < LANES) { /* the last few features go through a padded copy */
                memcpy(g, gate + i, lanes * sizeof(T));
                memcpy(u, up + i, lanes * sizeof(T));
            }
            const vf x = lanes < LANES ? LOAD(g) : LOAD(gate + i);
            const vf y = lanes < LANES ? LOAD(u) : LOAD(up + i);
            const vf silu = VROUND(vsilu(x));
            if (lanes < LANES) {
                STORE(result, silu * y);
                memcpy(to + i, result, lanes * sizeof(T));
            } else {
                STORE(to + i, silu * y);
            }
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
            for (; !interleaved && i + LANES <= half; i += LANES) {
                vf a = LOAD(from + i), b = LOAD(from + i + half), cv = load_f32(c + i), sv = load_f32(s + i);
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
