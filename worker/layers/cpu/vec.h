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

typedef uint16_t bf16;

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
    vu bits = (vu)v;
    vu rounded = bits + 0x7fff + ((bits >> 16) & 1);
    vi is_nan = v != v;
    return ((vu)is_nan & 0x7fc00000u) | (~(vu)is_nan & rounded);
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
INLINE vf vexp(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    vf shifted = x * 1.44269504088896341f + magic;
    vf n = shifted - magic;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    vi exponent = ((vi)shifted - (vi)splat(magic) + 127) << 23;
    return blend(x < -87.0f, splat(0.0f), y * (vf)exponent);
}

INLINE vf vsilu(vf x) {
    const vf exponent = blend(x < -87.0f, splat(87.0f), -x); /* silu(-87) is 0 to the last bit already */
    return x / (1.0f + vexp(exponent));
}

#endif
