/* Matrix products for AVX-512 with weights packed once: out [n, cols] = x [n, k] @ weight [cols, k].T
 *
 * Weights lie as pairs of panels of 16 columns, one contiguous stream read once for up to 14 rows at a time:
 *
 *     pair p:  | k step 0: 16 columns | 16 columns | k step 1: 16 columns | 16 columns | ...
 *
 * a k step is one fp32, or two bf16 (what vdpbf16ps takes). A pair is columns 32p..32p+31, or, for a gated layer,
 * columns 16p..16p+15 of gate and of up. Every output is one chain of multiply-adds in the order of k: it depends
 * neither on n nor on the row's place nor on the threads.
 */
#ifndef DEPTHBATCH_GEMM_H
#define DEPTHBATCH_GEMM_H

#include "vec.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAVE_GEMM 1
#else
#define HAVE_GEMM 0
#endif

#define PAIR_COLUMNS 32
#define MAX_TILE_ROWS 14
#define PAIRS_PER_TASK 2

INLINE int64_t gemm_pairs(int64_t cols) { return (cols + PAIR_COLUMNS - 1) / PAIR_COLUMNS; }

#if HAVE_GEMM

#define T float
#define NAME(x) x##_f32
#define STORE store_f32
#define VROUND round_f32
#define K_STEP 1
#define BROADCAST(p) _mm512_set1_ps(*(p))
#define MULTIPLY_ADD(acc, w, x) _mm512_fmadd_ps(w, x, acc)
#define OPERAND __m512
#define LOAD_OPERAND(p) _mm512_loadu_ps(p)
#include "gemm_impl.h"
#undef T
#undef NAME
#undef STORE
#undef VROUND
#undef K_STEP
#undef BROADCAST
#undef MULTIPLY_ADD
#undef OPERAND
#undef LOAD_OPERAND

INLINE __m512bh broadcast_pair(const bf16 *p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}

#define T bf16
#define NAME(x) x##_bf16
#define STORE store_bf16
#define VROUND round_bf16
#define K_STEP 2
#define BROADCAST(p) broadcast_pair(p)
#define MULTIPLY_ADD(acc, w, x) _mm512_dpbf16_ps(acc, w, x)
#define OPERAND __m512bh
#define LOAD_OPERAND(p) (__m512bh)_mm512_loadu_si512(p)
#include "gemm_impl.h"
#undef T
#undef NAME
#undef STORE
#undef VROUND
#undef K_STEP
#undef BROADCAST
#undef MULTIPLY_ADD
#undef OPERAND
#undef LOAD_OPERAND

#endif
#endif
