/* Body of the coda for one element type; included once a type (see coda.c). */

/* First index of the largest number of x [v]; a NaN is larger than all others. */
static int32_t NAME(first_largest)(const T *x, int64_t v) {
    float most = -INFINITY;
    int64_t begin = 0;
    for (int64_t block = 0; block < v; block += BLOCK) {
        const int64_t end = block + BLOCK < v ? block + BLOCK : v;
        int64_t i = block;
        vgi odd = {0};
        vg top = splat_g(-INFINITY);
        for (; i + GEMM_LANES <= end; i += GEMM_LANES) {
            const vg some = LOAD(x + i);
            top = max_g(top, some);
            odd |= some != some;
        }
        float here = hmax_g(top);
        int has_nan = any_lane(odd);
        for (; i < end; i++) {
            has_nan |= GET(x + i) != GET(x + i);
            here = GET(x + i) > here ? GET(x + i) : here;
        }
        if (has_nan)
            for (i = block;; i++)
                if (GET(x + i) != GET(x + i)) return (int32_t)i;
        if (here > most) most = here, begin = block;
    }
    while (GET(x + begin) != most) begin++;
    return (int32_t)begin;
}

static int32_t NAME(choose)(const CodaArgs *coda, const CodaCall *call, int64_t row) {
    const int64_t v = coda->head.cols;
    const T *logits = (const T *)call->logits + row * v;
    const int32_t *params = coda->params + call->frame[row] * coda->param_words;
    float temperature;
    memcpy(&temperature, params + coda->temperature, sizeof(temperature));
    if (!call->weights || !(temperature > 0.0f)) return NAME(first_largest)(logits, v);
    float *weights = call->weights + row * v;
    for (int64_t i = 0; i < v; i++) weights[i] = GET(logits + i);
    temper_row(weights, weights, v, temperature);
    const uint32_t seed_low = (uint32_t)params[coda->seed_low], seed_high = (uint32_t)params[coda->seed_high];
    return inverse_cdf(weights, v, uniform(seed_low, seed_high, call->frame[call->n + row] + 1));
}

/* Called by every thread of a team. */
static void NAME(coda_team)(const CodaArgs *coda, const CodaCall *call, Barrier *barrier) {
    const int64_t n = call->n, d = coda->head.k;
    const int32_t *slots = call->frame, *positions = slots + n, *exit_loops = positions + n, *lanes = exit_loops + n;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n; row++) {
        fill_planes(coda, slots[row], positions[row], exit_loops[row]);
        if (call->hidden) continue;
        const T *from = (const T *)coda->item + lanes[row] * d;
        T *to = (T *)call->normed + row * call->normed_stride;
        if (coda->norm) NAME(norm_row)(to, from, NULL, NULL, (const T *)coda->norm, d, coda->eps);
        else memcpy(to, from, d * sizeof(T));
    }
    team_barrier(barrier);
#if HAVE_GEMM
    const T *x = (const T *)(call->hidden ? call->hidden : call->normed);
    NAME(gemm_team)(&coda->head, x, call->hidden ? d : call->normed_stride, (T *)call->logits, coda->head.cols, n, barrier);
#endif
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t row = 0; row < n; row++) call->tokens[row] = NAME(choose)(coda, call, row);
}

EXPORT void NAME(db_coda)(const CodaArgs *coda, const CodaCall *call) {
    const int64_t n = call->n;
    const int32_t *lanes = call->frame + 3 * n;
    Barrier barrier = {0};
#pragma omp parallel if (n * row_products(&coda->head) >= PARALLEL_MIN_PRODUCTS)
    NAME(coda_team)(coda, call, &barrier);
    for (int64_t row = 0; row < n; row++) {
        const int64_t lane = coda->next_lane ? coda->next_lane[lanes[row]] : lanes[row];
        coda->token[lane] = call->tokens[row];
    }
}

/* for the next type */
#undef T
#undef NAME
#undef LOAD
#undef GET
