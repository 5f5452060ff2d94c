/* Matrix products with int8 weights: out [n, cols] = x [n, k] @ weight [cols, k].T, on every processor the same integers.
 *
 * A row of x becomes integers q with one scale, by itself alone: q = x / scale to the nearest, ties to even, where
 * scale = max |x| / (127 * 2^t). t is the greatest up to WIDE_BITS at which no more than one input in WIDE_EVERY is beyond
 * max |x| / 2^t: those are wide, of up to 15 bits, all others signed bytes.
 *
 * A weight is a byte times a scale that it shares with a group of its column's inputs, and lies as that byte + 128, in the
 * order of gemm.h:
 *
 *     pair p:  | k step 0: 16 columns | 16 columns | k step 1: 16 columns | 16 columns | ...
 *
 * a k step is four bytes: what vpdpbusd adds up, and, 16 steps together, a tile of AMX. k is padded to a multiple of 64
 * with weights of 0. Scales lie pair by pair, in it group by group, 32 of each. The sum of a row and a column over a group is
 * an exact int32, whatever its order; groups are added up in fp32 in theirs, each operation rounded:
 *
 *     out = (sum over groups of (float)(sum - 128 * sum of q) * scale) * row scale
 *
 * A processor that multiplies bytes takes a wide input as high * 128 + low: low is in the row as any other, high in a list of
 * its own. One that does not multiplies 16 bits, whatever is in them.
 */
#ifndef DEPTHBATCH_INT8_H
#define DEPTHBATCH_INT8_H

#include "gemm.h"

#define INT8_STEP 64 /* k is a multiple of it */
#define WIDE_EVERY 64
#define WIDE_BITS 7
#define MOST_WIDE 256 /* of a row */

/* out [n, cols] = x times an int8 layer, rows `stride` elements apart. Called by every thread of a team; a barrier ends it.
 * quantised: room for n rows of db_int8_row_bytes. */
void int8_team_f32(const Packed *layer, const float *x, int64_t x_stride, float *out, int64_t out_stride, int64_t n,
                   char *quantised, Barrier *barrier);
void int8_team_bf16(const Packed *layer, const bf16 *x, int64_t x_stride, bf16 *out, int64_t out_stride, int64_t n,
                    char *quantised, Barrier *barrier);

#endif
