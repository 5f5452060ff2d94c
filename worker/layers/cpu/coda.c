/* The coda of rows that ask for nothing but a token, greedy or drawn, in one parallel region: planes filled, rows gathered, norm,
 * head, choice.
 *
 * Norm and head are the kernels that the separate operators call; a choice is that of worker/sampling/sampler.py, bit for bit.
 */
#include <string.h>

#include "coda.h"
#include "small.h"

#define BLOCK 256 /* numbers of a row that are looked at together */

/* A register of x [v] from i on; past v what `rest` says. */
INLINE vg load_part(const float *x, int64_t i, int64_t v, float rest) {
    if (i + GEMM_LANES <= v) return load_g(x + i);
    vg part = splat_g(rest);
    for (int64_t j = i; j < v; j++) part[j - i] = x[j];
    return part;
}
INLINE void store_part(float *x, int64_t i, int64_t v, vg part) {
    if (i + GEMM_LANES <= v) store_g(x + i, part);
    else memcpy(x + i, &part, (v - i) * sizeof(float));
}

INLINE int any_lane(vgi lanes) {
    int any = 0;
    for (int lane = 0; lane < GEMM_LANES; lane++) any |= lanes[lane];
    return any;
}

/* out [v] = exp(logits / temperature - the largest of these), one row; out may be logits. A NaN makes all of them NaN. */
void temper_row(float *out, const float *logits, int64_t v, float temperature) {
    vg top = splat_g(-INFINITY);
    vgi odd = {0};
    for (int64_t i = 0; i < v; i += GEMM_LANES) {
        const vg scaled = load_part(logits, i, v, -INFINITY) / temperature;
        top = max_g(top, scaled);
        odd |= scaled != scaled;
        store_part(out, i, v, scaled);
    }
    const float most = any_lane(odd) ? NAN : hmax_g(top);
    for (int64_t i = 0; i < v; i += GEMM_LANES) store_part(out, i, v, exp_g(load_part(out, i, v, 0.0f) - most));
}

/* weights [n, v] of logits [n, v] at temperature [n]. */
EXPORT void db_temper_f32(float *weights, const float *logits, const float *temperature, int64_t n, int64_t v) {
#pragma omp parallel for schedule(static) if (n > 1)
    for (int64_t row = 0; row < n; row++) temper_row(weights + row * v, logits + row * v, v, temperature[row]);
}

/* First index whose cumulated weight exceeds number * total. */
static int32_t inverse_cdf(const float *weights, int64_t v, float number) {
    double before[(v + BLOCK - 1) / BLOCK], sum = 0;
    for (int64_t i = 0; i < v; i++) {
        if (i % BLOCK == 0) before[i / BLOCK] = sum;
        sum += (double)weights[i];
    }
    const double target = (double)number * sum;
    int64_t i = 0;
    while (i + BLOCK < v && !(before[i / BLOCK + 1] > target)) i += BLOCK;
    for (sum = before[i / BLOCK]; i < v; i++) {
        sum += (double)weights[i];
        if (sum > target) return (int32_t)i;
    }
    return (int32_t)(v - 1);
}

/* Random numbers of worker/sampling/random_numbers.py. */
INLINE uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
INLINE float uniform(uint32_t seed_low, uint32_t seed_high, int32_t position) {
    const uint64_t golden = 0x9E3779B97F4A7C15u, token_lane = 0;
    const uint64_t seed = seed_low | (uint64_t)seed_high << 32;
    const uint64_t key = mix64(mix64(seed + golden) + ((uint64_t)(int64_t)position + 1) * golden);
    const uint64_t bits = mix64(key + (token_lane + 1) * 0xBF58476D1CE4E5B9u);
    return ((float)(bits >> 41) + 0.5f) * 0x1p-23f;
}

/* K and V of the planes that a token which left the loop after `exit_loop` did not reach. */
INLINE void fill_planes(const CodaArgs *coda, int32_t slot, int32_t position, int32_t exit_loop) {
    if (exit_loop < 1) return;
    const int32_t source = exit_loop < coda->planes ? exit_loop - 1 : coda->planes - 1;
    const int32_t *table = coda->block_tables + slot * coda->table_stride;
    for (int32_t l = 0; l < coda->num_layers; l++) copy_planes(&coda->layers[l], table, position, source, source + 1, coda->planes);
}

#define T float
#define NAME(x) x##_f32
#define LOAD load_g
#define GET scalar_get_f32
#include "coda_impl.h"

#define T bf16
#define NAME(x) x##_bf16
#define LOAD load_g_bf16
#define GET scalar_get_bf16
#include "coda_impl.h"
