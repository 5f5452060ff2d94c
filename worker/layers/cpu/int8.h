/* Matrix products with int8 weights: out [n, cols] = x [n, k] @ weight [cols, k].T, on every processor the same integers.
 *
 * A row of x becomes signed bytes q with one scale, by itself alone: scale = max |x| / 127, q = x / scale to the nearest,
 * ties to even. A weight is a byte times its column's scale, and lies as that byte + 128, in the order of gemm.h:
 *
 *     pair p:  | k step 0: 16 columns | 16 columns | k step 1: 16 columns | 16 columns | ...
 *
 * a k step is four bytes: what vpdpbusd adds up, and, 16 steps together, a tile of AMX. k is padded to a multiple of 64
 * with weights of 0. The sum of a row and a column is an exact int32, whatever its order; then
 *
 *     out = ((float)(sum - 128 * sum of q) * row scale) * column scale
 */
#ifndef DEPTHBATCH_INT8_H
#define DEPTHBATCH_INT8_H

#include "gemm.h"

#define INT8_STEP 64 /* k is a multiple of it */

/* out [n, cols] = x times an int8 layer, rows `stride` elements apart. Called by every thread of a team; a barrier ends it.
 * quantised: room for n rows of db_int8_row_bytes. */
void int8_team_f32(const Packed *layer, const float *x, int64_t x_stride, float *out, int64_t out_stride, int64_t n,
                   char *quantised, Barrier *barrier);
void int8_team_bf16(const Packed *layer, const bf16 *x, int64_t x_stride, bf16 *out, int64_t out_stride, int64_t n,
                    char *quantised, Barrier *barrier);

#endif
