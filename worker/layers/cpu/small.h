/* Row-wise operators that other kernels share. */
#ifndef DEPTHBATCH_SMALL_H
#define DEPTHBATCH_SMALL_H

#include "vec.h"

/* out [d] = (residual +) norm(x (+ y)) * weight, one row; y and residual may be NULL; out may be any of the inputs. */
void norm_row_f32(
    float *out, const float *x, const float *y, const float *residual, const float *weight, int64_t d, float eps
);
void norm_row_bf16(bf16 *out, const bf16 *x, const bf16 *y, const bf16 *residual, const bf16 *weight, int64_t d, float eps);

#endif
