/* Quantised K and V: codes of a byte with a bfloat16 scale a vector, as worker/attention/kv_quantization.py says it.
 *
 * Products are of codes, which are whole in fp32; scores and weights are multiplied by the scales, a tile of 16 tokens at a time.
 */
#ifndef DEPTHBATCH_CODES_H
#define DEPTHBATCH_CODES_H

#include "attention.h"
#include "vec.h"

#define SMALLEST_SCALE 0x1p-126f
#define WHOLE_NUMBER 12582912.0f /* 1.5 * 2^23: in a sum with it the low bits are the nearest whole number, ties to even */

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE uint8_t encode_fp8(float x) { /* |x| < 464 */
    const uint32_t bits = bits_of(x), size = bits & 0x7fffffffu;
    const uint32_t normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120 << 3); /* exponents count from 7, not 127 */
    const uint32_t subnormal = bits_of(fabsf(x) * 512.0f + WHOLE_NUMBER);
    return (uint8_t)(bits >> 24 & 0x80) | (uint8_t)(size < 0x3c800000u ? subnormal : normal); /* below 2^-6 */
}

/* The number that a code stands for; of fp8 over 256, since a half, through which it goes below, has one bit of exponent more. */
INLINE float decode_code(uint8_t code, int kind) {
    if (kind == KV_INT8) return (float)(int8_t)code;
    const uint32_t size = code & 0x7f, bits = (size << 20) + (112u << 23);
    float normal;
    memcpy(&normal, &bits, 4);
    const float x = size < 8 ? (float)size * 0x1p-17f : normal;
    return code & 0x80 ? -x : x;
}

INLINE float scale_of(bf16 scale, int kind) { return widen(scale) * (kind == KV_INT8 ? 1.0f : 256.0f); }

/* codes [dh] of x [dh]; returns the scale. */
static bf16 encode_vector(uint8_t *codes, const float *x, int dh, int kind) {
    uint32_t highest = 0; /* as whole numbers a NaN is above all else, and gets through */
    for (int d = 0; d < dh; d++) {
        const uint32_t size = bits_of(x[d]) & 0x7fffffffu;
        highest = size > highest ? size : highest;
    }
    float most;
    memcpy(&most, &highest, 4);
    const bf16 scale = narrow(most / (kind == KV_INT8 ? 127.0f : 448.0f));
    const float divisor = widen(scale);
    if (!(divisor >= SMALLEST_SCALE && divisor < INFINITY)) {
        memset(codes, 0, dh);
    } else if (kind == KV_INT8) {
        for (int d = 0; d < dh; d++) codes[d] = (uint8_t)bits_of(x[d] / divisor + WHOLE_NUMBER);
    } else {
        for (int d = 0; d < dh; d++) codes[d] = encode_fp8(x[d] / divisor);
    }
    return scale;
}

#if defined(__AVX2__) && defined(__F16C__)
#define WIDE_CODES 1

/* 16 codes, as decode_code. */
INLINE void decode_16(__m256 out[2], __m128i codes, int kind) {
    if (kind == KV_INT8) {
        out[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
        out[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(codes, codes)));
    } else {
        const __m256i wide = _mm256_cvtepi8_epi16(codes), sign = _mm256_set1_epi16((short)0x8000);
        const __m256i size = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
        const __m256i half = _mm256_or_si256(size, _mm256_and_si256(wide, sign));
        out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
        out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
}

/* 16 vectors of 16 bytes -> columns. */
INLINE void transpose_bytes(__m128i r[16]) {
    __m128i t[16];
#define ROUND_OF(to, from, interleave) \
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) { \
        to[2 * i] = _mm_unpacklo_##interleave(from[i], from[i + 8]); \
        to[2 * i + 1] = _mm_unpackhi_##interleave(from[i], from[i + 8]); \
    }
    /* Four perfect shuffles of bytes: after each, a row holds elements of rows that were half of the rest apart. */
    ROUND_OF(t, r, epi8)
    ROUND_OF(r, t, epi8)
    ROUND_OF(t, r, epi8)
    ROUND_OF(r, t, epi8)
#undef ROUND_OF
}
#endif

/* factors [TILE] of the n tokens of a tile. */
INLINE void read_factors(float *factors, const bf16 *scales, int n, int kind) {
    for (int t = 0; t < TILE; t++) factors[t] = t < n ? scale_of(scales[t], kind) : 0.0f;
}

#define KEY(t) (k + ((t) < n ? (t) * dh : 0)) /* keys beyond n repeat key 0: their scores are masked later */
#ifdef WIDE_CODES
/* r[i]: feature d + i of the 16 keys of a tile. next: the same place in the next block, each line of which is asked for as its
 * counterpart here is read. */
INLINE void turn_16(__m128i r[16], const uint8_t *k, const uint8_t *next, int64_t d, int n, int64_t dh) {
#pragma GCC unroll 16
    for (int t = 0; t < 16; t++) {
        r[t] = _mm_loadu_si128((const __m128i *)(KEY(t) + d));
        if (d % 64 == 0) __builtin_prefetch(next + t * dh + d, 0, 2);
    }
    transpose_bytes(r);
}

/* scores [TILE] of one query, without the keys' scales: the sums of tile_scores. dh a multiple of 16. */
INLINE void query_codes(const float *q, const uint8_t *k, const uint8_t *next, int n, int64_t dh, float *scores, int kind) {
#pragma GCC unroll 2
    for (int t = 0; t < TILE; t += 8) {
        __m256 acc[8] = {0};
        for (int64_t d = 0; d < dh; d += 16)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                __m256 x[2];
                decode_16(x, _mm_loadu_si128((const __m128i *)(KEY(t + i) + d)), kind);
                if (d % 64 == 0) __builtin_prefetch(next + (t + i) * dh + d, 0, 2);
                acc[i] = multiply_add_256(x[0], _mm256_loadu_ps(q + d), acc[i]);
                acc[i] = multiply_add_256(x[1], _mm256_loadu_ps(q + d + 8), acc[i]);
            }
        _mm256_storeu_ps(scores + t, sums_of_8(acc));
    }
}

/* x [count], widened, as whole numbers of 15 bits and a sign of which the largest is 32767; returns what one of them is worth. Padding
 * up to `padded` is 0. Where x is no finite number the worth is none either, and so is what it is multiplied by. */
INLINE float to_whole(int16_t *whole, const float *x, int count, int padded) {
    uint32_t highest = 0;
    for (int i = 0; i < count; i++) {
        const uint32_t size = bits_of(x[i]) & 0x7fffffffu;
        highest = size > highest ? size : highest;
    }
    float most;
    memcpy(&most, &highest, 4);
    const float worth = most * (1.0f / 32767.0f);
    const float times = worth >= SMALLEST_SCALE && worth < INFINITY ? 1.0f / worth : 0.0f;
    for (int i = 0; i < padded; i++) {
        const float scaled = i < count && times != 0.0f ? x[i] * times : 0.0f;
        whole[i] = (int16_t)bits_of(scaled + WHOLE_NUMBER);
    }
    return worth;
}

/* scores [TILE] of one query of whole numbers with int8 keys, without their scales: exact sums. dh a multiple of 16. */
INLINE void whole_scores(
    const int16_t *q, float worth, const uint8_t *k, const uint8_t *next, int n, int64_t dh, float *scores
) {
    for (int g = 0; g < TILE; g += 8) {
        __m256i sum[8] = {0};
        for (int64_t d = 0; d < dh; d += 16) {
            const __m256i features = _mm256_loadu_si256((const __m256i *)(q + d));
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m256i key = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(KEY(g + i) + d)));
                if (d % 64 == 0) __builtin_prefetch(next + (g + i) * dh + d, 0, 2);
                sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(key, features));
            }
        }
        const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3]));
        const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[4], sum[5]), _mm256_hadd_epi32(sum[6], sum[7]));
        const __m256i all = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
        _mm256_storeu_ps(scores + g, _mm256_mul_ps(_mm256_cvtepi32_ps(all), _mm256_set1_ps(worth)));
    }
}

/* acc [dh] += sum over t < n of weights [t], as whole numbers, times the int8 codes of token t: exact but for the last step.
 * dh a multiple of 16. */
INLINE void add_whole(float *acc, const float *weights, const uint8_t *v, const uint8_t *next, int n, int64_t dh) {
    int16_t whole[TILE];
    const __m256 worth = _mm256_set1_ps(to_whole(whole, weights, n, TILE));
    for (int64_t d = 0, width; d < dh; d += width) {
        width = dh - d >= 64 ? 64 : 16;
        __m256i low[4] = {0}, high[4] = {0};
        for (int t = 0; t < n; t += 2) {
            const uint8_t *one = v + t * dh + d, *other = t + 1 < n ? one + dh : one; /* whose weight is then 0 */
            int32_t pair;
            memcpy(&pair, whole + t, 4);
            const __m256i weight = _mm256_set1_epi32(pair);
            if (d % 64 == 0) {
                __builtin_prefetch(next + t * dh + d, 0, 2);
                __builtin_prefetch(next + (t + 1) * dh + d, 0, 2);
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                if (16 * i >= width) continue;
                const __m256i a = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(one + 16 * i)));
                const __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(other + 16 * i)));
                low[i] = _mm256_add_epi32(low[i], _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), weight));
                high[i] = _mm256_add_epi32(high[i], _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), weight));
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            if (16 * i >= width) continue;
            float *to = acc + d + 16 * i; /* unpacking works within 128 bits: low has features 0..3 and 8..11 */
            const __m256 first = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(low[i], high[i], 0x20));
            const __m256 second = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(low[i], high[i], 0x31));
            _mm256_storeu_ps(to, multiply_add_256(first, worth, _mm256_loadu_ps(to)));
            _mm256_storeu_ps(to + 8, multiply_add_256(second, worth, _mm256_loadu_ps(to + 8)));
        }
    }
}

/* acc [dh] += sum over t < n of weights [t] times the codes of token t. dh a multiple of 16. */
INLINE void add_codes(float *acc, const float *weights, const uint8_t *v, const uint8_t *next, int n, int64_t dh, int kind) {
    for (int64_t d = 0, width; d < dh; d += width) {
        width = dh - d >= 64 ? 64 : 16;
        __m256 sum[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            if (8 * i < width) sum[i] = _mm256_loadu_ps(acc + d + 8 * i);
        for (int t = 0; t < n; t++) {
            const __m256 weight = _mm256_broadcast_ss(weights + t);
            if (d % 64 == 0) __builtin_prefetch(next + t * dh + d, 0, 2);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                if (16 * i >= width) continue;
                __m256 x[2];
                decode_16(x, _mm_loadu_si128((const __m128i *)(v + t * dh + d + 16 * i)), kind);
                sum[2 * i] = multiply_add_256(x[0], weight, sum[2 * i]);
                sum[2 * i + 1] = multiply_add_256(x[1], weight, sum[2 * i + 1]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            if (8 * i < width) _mm256_storeu_ps(acc + d + 8 * i, sum[i]);
    }
}
#endif

/* keys [dh, TILE]: the n keys of a tile without their scales, feature by feature, chain by chain. */
INLINE void turn_codes(float *keys, const uint8_t *k, const uint8_t *next, int n, int64_t dh, int kind) {
    int64_t d = 0;
#ifdef WIDE_CODES
    for (; d + 16 <= dh; d += 16) {
        __m128i r[16];
        turn_16(r, k, next, d, n, dh);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m256 x[2];
            decode_16(x, r[i], kind);
            float *to = keys + chain_place(d + i, dh, 1) * TILE;
            _mm256_storeu_ps(to, x[0]);
            _mm256_storeu_ps(to + 8, x[1]);
        }
    }
#endif
    for (; d < dh; d++)
        for (int t = 0; t < TILE; t++) keys[chain_place(d, dh, 1) * TILE + t] = decode_code(KEY(t)[d], kind);
}
#undef KEY

/* values [n, dh]: the values of a tile without their scales. */
INLINE void widen_codes(float *values, const uint8_t *v, const uint8_t *next, int n, int64_t dh, int kind) {
    for (int t = 0; t < n; t++) {
        int64_t d = 0;
#ifdef WIDE_CODES
        for (; d + 16 <= dh; d += 16) {
            __m256 x[2];
            decode_16(x, _mm_loadu_si128((const __m128i *)(v + t * dh + d)), kind);
            if (d % 64 == 0) __builtin_prefetch(next + t * dh + d, 0, 2);
            _mm256_storeu_ps(values + t * dh + d, x[0]);
            _mm256_storeu_ps(values + t * dh + d + 8, x[1]);
        }
#endif
        for (; d < dh; d++) values[t * dh + d] = decode_code(v[t * dh + d], kind);
    }
}

#endif
