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
typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint16_t vh_u __attribute__((vector_size(32), aligned(2), may_alias));

/* One register: for kernels that keep sums in registers, where the compiler would cut sixteen lanes in two and spill. */
typedef float vg __attribute__((vector_size(4 * GEMM_LANES)));
typedef float vg_u __attribute__((vector_size(4 * GEMM_LANES), aligned(4), may_alias));
typedef int32_t vgi __attribute__((vector_size(4 * GEMM_LANES)));
typedef uint32_t vgu __attribute__((vector_size(4 * GEMM_LANES)));

typedef uint16_t bf16;

typedef union {
    vf v;
    vg part[LANES / GEMM_LANES];
} Parts;

/* What compares is done a register at a time: of longer vectors the compiler compares lane by lane. */
#define BY_PART(parts, function) \
    _Pragma("GCC unroll 2") for (int i = 0; i < LANES / GEMM_LANES; i++) (parts).part[i] = (vg)function((parts).part[i]);

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

/* A bf16 in the upper half of each word: rounded to nearest even; a NaN stays a NaN. */
INLINE vgu rounded_words(vg v) {
    const vgu bits = (vgu)v, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (vgu)blend_g(v != v, (vg)((vgu){0} + 0x7fc00000u), (vg)rounded);
}

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
INLINE vf load_bf16(const bf16 *p) { return (vf)(__builtin_convertvector(*(const vh_u *)p, vu) << 16); }
#ifdef __AVX512BF16__ /* the instruction takes numbers below 1e-38 for 0; nothing here depends on them */
INLINE void store_bf16(bf16 *p, vf v) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v)); }
INLINE vf round_bf16(vf v) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
}
#else
INLINE vu rounded_bits(vf v) {
    Parts bits = {v};
    BY_PART(bits, rounded_words)
    return (vu)bits.v;
}
INLINE void store_bf16(bf16 *p, vf v) { *(vh_u *)p = __builtin_convertvector(rounded_bits(v) >> 16, vh); }
INLINE vf round_bf16(vf v) { return (vf)(rounded_bits(v) & 0xffff0000u); }
#endif
INLINE vf round_f32(vf v) { return v; }
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
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
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
    vgi exponent = ((vgi)shifted - (vgi)splat_g(magic) + 127) << 23;
    return blend_g(x < -87.0f, splat_g(0.0f), y * (vg)exponent);
}
INLINE vf vexp(vf x) {
    Parts y = {x};
    BY_PART(y, exp_g)
    return y.v;
}

INLINE vg silu_g(vg x) {
    const vg exponent = blend_g(x < -87.0f, splat_g(87.0f), -x); /* silu(-87) is 0 to the last bit already */
    return x / (1.0f + exp_g(exponent));
}
INLINE vf vsilu(vf x) {
    Parts y = {x};
    BY_PART(y, silu_g)
    return y.v;
}

#endif
