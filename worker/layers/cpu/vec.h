/* Sixteen-lane vectors and the two element types.
 *
 * GCC/Clang vector extensions: one source, lowered to AVX-512, AVX2 or SSE by the compiler. Reductions always run in
 * the same lane order, so a row's result depends neither on its address nor on the rows beside it.
 */
#ifndef DEPTHBATCH_VEC_H
#define DEPTHBATCH_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LANES 16
#ifndef GEMM_LANES /* else whoever builds this has chosen */
#ifdef __AVX512F__
#define GEMM_LANES 16 /* of a register */
#else
#define GEMM_LANES 8
#endif
#endif
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef float vf_u __attribute__((vector_size(64), aligned(4), may_alias));
typedef float vf8 __attribute__((vector_size(32)));
typedef float vf4 __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));

/* One register: whatever is to be fast, since the compiler cuts a longer vector in pieces and moves those through memory. */
typedef float vg __attribute__((vector_size(4 * GEMM_LANES)));
typedef float vg_u __attribute__((vector_size(4 * GEMM_LANES), aligned(4), may_alias));
typedef int32_t vgi __attribute__((vector_size(4 * GEMM_LANES)));
typedef uint32_t vgu __attribute__((vector_size(4 * GEMM_LANES)));
typedef uint16_t vgh_u __attribute__((vector_size(2 * GEMM_LANES), aligned(2), may_alias));

typedef uint16_t bf16;

typedef union {
    vf v;
    vg part[LANES / GEMM_LANES];
} Parts;

INLINE vg load_g(const float *p) { return *(const vg_u *)p; }
INLINE void store_g(float *p, vg v) { *(vg_u *)p = v; }
INLINE vg splat_g(float x) { return x - (vg){0}; }
INLINE vg blend_g(vgi mask, vg yes, vg no) { return (vg)((mask & (vgi)yes) | (~mask & (vgi)no)); }
INLINE vgu load_words(const void *p) {
    vgu words;
    memcpy(&words, p, sizeof(words));
    return words;
}
INLINE vgu broadcast_word(const void *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return (vgu){0} + word;
}

/* a * b + c, rounded once where the processor can: the compiler, left to itself, does so in some loops and not in others. */
INLINE vg multiply_add(vg a, vg b, vg c) {
#if defined(__AVX512F__) && GEMM_LANES == 16
    return (vg)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && GEMM_LANES == 8
    return (vg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return c + a * b;
#endif
}
INLINE vg max_g(vg a, vg b) {
#if defined(__AVX512F__) && GEMM_LANES == 16
    return (vg)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__) && GEMM_LANES == 8
    return (vg)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return blend_g(a > b, a, b);
#endif
}
INLINE float hmax_g(vg v) {
#if defined(__AVX512F__) && GEMM_LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__) && GEMM_LANES == 8
    __m128 a = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
#else
    float m = v[0];
    for (int i = 1; i < GEMM_LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

INLINE int any_above(vg v, float x) {
#if defined(__AVX512F__) && GEMM_LANES == 16
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__) && GEMM_LANES == 8
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(x), _CMP_GT_OQ)) != 0;
#else
    return hmax_g(v) > x;
#endif
}

/* A bf16 in the upper half of each word: rounded to nearest even; a NaN stays a NaN. */
INLINE vgu rounded_words(vg v) {
    const vgu bits = (vgu)v, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (vgu)blend_g(v != v, (vg)((vgu){0} + 0x7fc00000u), (vg)rounded);
}

/* bf16 in a register of fp32, and back. */
INLINE vg load_g_bf16(const bf16 *p) {
#if defined(__AVX2__) && GEMM_LANES == 8
    return (vg)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vg)(__builtin_convertvector(*(const vgh_u *)p, vgu) << 16);
#endif
}
INLINE void store_g_bf16(bf16 *p, vg v) {
#if defined(__AVX512BF16__) && GEMM_LANES == 16 /* the instruction takes numbers below 1e-38 for 0; nothing here depends on them */
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#elif defined(__AVX2__) && GEMM_LANES == 8
    const __m256i words = (__m256i)(rounded_words(v) >> 16);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    *(vgh_u *)p = __builtin_convertvector(rounded_words(v) >> 16, vgh_u);
#endif
}
INLINE vg round_g_bf16(vg v) {
#if defined(__AVX512BF16__) && GEMM_LANES == 16
    return (vg)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
#else
    return (vg)(rounded_words(v) & 0xffff0000u);
#endif
}
INLINE vg round_g_f32(vg v) { return v; }

INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest even; a NaN stays a NaN. */
INLINE bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE vf load_f32(const float *p) { return *(const vf_u *)p; }
INLINE void store_f32(float *p, vf v) { *(vf_u *)p = v; }
INLINE float scalar_get_f32(const float *p) { return *p; }
INLINE float scalar_get_bf16(const bf16 *p) { return widen(*p); }
INLINE void scalar_put_f32(float *p, float x) { *p = x; }
INLINE void scalar_put_bf16(bf16 *p, float x) { *p = narrow(x); }
INLINE float scalar_round_f32(float x) { return x; }
INLINE float scalar_round_bf16(float x) { return widen(narrow(x)); }

INLINE float hsum(vf v) {
    union { vf v; vf8 h[2]; } a = {v};
    union { vf8 v; vf4 h[2]; } b = {a.h[0] + a.h[1]};
    vf4 c = b.h[0] + b.h[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}
INLINE float hsum_g(vg v) {
#if GEMM_LANES == LANES
    return hsum(v);
#else
    union { vg v; vf4 h[2]; } b = {v};
    vf4 c = b.h[0] + b.h[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
#endif
}

INLINE float hmax(vf v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

INLINE vf blend(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* exp of |x| < 88 to about 1 ulp; 0 below -87. A NaN stays a NaN. */
INLINE vg exp_g(vg x) {
    const float magic = 12582912.0f + 127.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits, here to an exponent */
    vg shifted = x * 1.44269504088896341f + magic;
    vg n = shifted - magic;
    vg r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vg y = splat_g(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    vgi exponent = (vgi)shifted << 23;
    return blend_g(x < -87.0f, splat_g(0.0f), y * (vg)exponent);
}

INLINE vg silu_g(vg x) {
    const vg exponent = blend_g(x < -87.0f, splat_g(87.0f), -x); /* silu(-87) is 0 to the last bit already */
    return x / (1.0f + exp_g(exponent));
}

#endif
