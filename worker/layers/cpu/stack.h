/* Arguments of a whole run of transformer blocks; mirrored by ctypes structures in library.py. */
#ifndef DEPTHBATCH_STACK_H
#define DEPTHBATCH_STACK_H

#include "attention.h"
#include "gemm.h"

typedef struct {
    const void *norm_in, *norm_mlp_in, *norm_out, *norm_mlp_out; /* [hidden] or NULL */
    const void *q_norm, *k_norm; /* or NULL; before rotation, each over as many features at a time as it has: */
    int64_t q_norm_width, k_norm_width; /* all heads of q, of k, or one head_dim */
    const void *q_bias, *k_bias; /* or NULL */
    const LayerArgs *cache;
    Packed qkv, out, gate_up, down;
} BlockArgs;

typedef struct {
    const BlockArgs *blocks;
    const void *final_norm; /* [hidden] or NULL: applied to the result */
    int64_t num_blocks, hidden;
    int32_t norm_on_sum; /* x = norm(x + branch) instead of x + norm(branch) */
    float eps;
} StackArgs;

/* x and out [n, hidden], contiguous. The scratch areas have rows of the given strides. */
typedef struct {
    const void *x;
    void *out, *normed, *projected, *attended, *branch, *inner;
    char *quantised; /* for int8 layers: room for n rows of the widest input (int8.h) */
    int64_t normed_stride, projected_stride, attended_stride, inner_stride; /* branch: hidden */
    const float *cos, *sin;
    int32_t rope;
} StackCall;

/* A core step: a stack from the state that is kept of lanes and back into it (worker/slots.py). */
typedef struct {
    const StackArgs *stack;
    void *item;            /* [lanes, hidden] */
    const void *injection; /* [lanes, hidden] or NULL: the stack starts from the adapter's product with both */
    Packed adapter;        /* 2 * hidden -> hidden, not int8 */
    const float *cos, *sin; /* [max_positions, half] */
    int64_t half;
    const int32_t *block_tables;
    int64_t table_stride;
    int32_t planes; /* of a looped layer */
} CoreArgs;

typedef struct {
    const int32_t *frame; /* [4, n]: slots, positions, loops, lanes (common/frames.py) */
    int64_t n;
    int32_t *planes; /* scratch [n] */
    float *cos, *sin; /* scratch [n, half] */
    void *wide;       /* scratch, n rows of 2 * hidden, wide_stride elements apart */
    int64_t wide_stride;
    StackCall stack; /* but for x, cos and sin; out is scratch, too */
} CoreCall;

#endif
