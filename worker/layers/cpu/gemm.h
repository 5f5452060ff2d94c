/* Matrix products for AVX-512 and AVX2 with weights packed once: out [n, cols] = x [n, k] @ weight [cols, k].T
 *
 * Weights lie as pairs of panels of 16 columns, one contiguous stream read once for up to 14 rows at a time (AVX2: 6):
 *
 *     pair p:  | k step 0: 16 columns | 16 columns | k step 1: 16 columns | 16 columns | ...
 *
 * a k step is one fp32, or two bf16 (what vdpbf16ps takes; otherwise they are widened to fp32, weights as they are read, rows once
 * for several pairs). A pair is columns 32p..32p+31, or, for a gated layer, columns 16p..16p+15 of gate and of up. Every output is one chain of multiply-adds in the order of k: it depends
 * neither on n nor on the row's place nor on the threads.
 */
#ifndef DEPTHBATCH_GEMM_H
#define DEPTHBATCH_GEMM_H

#include "team.h"
#include "vec.h"

#if defined(__AVX2__) && defined(__FMA__)
#define HAVE_GEMM 1
#else
#define HAVE_GEMM 0
#endif

#define PAIR_COLUMNS 32
#define PARALLEL_MIN_PRODUCTS (1 << 20) /* some 30 us of one thread: to wake others for less costs more than they bring */

/* One linear layer; k even, unless it is int8. cols: columns of the output. Without scales: bf16 or fp32 elements, as the
 * function called says. */
typedef struct {
    const void *packed;
    const float *scales; /* of an int8 layer (int8.h), else NULL */
    int64_t cols, k;
    int32_t gated; /* the output is silu(gate) * up */
    int32_t group; /* inputs that share a scale in an int8 layer, a multiple of 64 */
} Packed;

/* Multiply-adds of one row. */
INLINE int64_t row_products(const Packed *layer) { return layer->cols * layer->k * (layer->gated ? 2 : 1); }

/* out [n, cols] = x [n, k] times the layer, rows `stride` elements apart. Called by every thread of a team; a barrier
 * ends it. Only there when HAVE_GEMM. */
void gemm_team_f32(const Packed *layer, const float *x, int64_t x_stride, float *out, int64_t out_stride, int64_t n,
                   Barrier *barrier);
void gemm_team_bf16(const Packed *layer, const bf16 *x, int64_t x_stride, bf16 *out, int64_t out_stride, int64_t n,
                   Barrier *barrier);

#endif
