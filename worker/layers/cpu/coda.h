/* Arguments of a coda, from the state of the rows to their next tokens; mirrored by ctypes structures in structs.py. */
#ifndef DEPTHBATCH_CODA_H
#define DEPTHBATCH_CODA_H

#include "attention.h"
#include "gemm.h"

/* What stays the same: the head, and what is kept of lanes and slots (worker/slots.py). */
typedef struct {
    const void *item;         /* [lanes, hidden] */
    const void *norm;         /* [hidden] or NULL: of item, before the head */
    Packed head;              /* not int8 */
    const int64_t *next_lane; /* [lanes] or NULL: a token's successor is of its own lane */
    int32_t *token;           /* [lanes] */
    const int32_t *params;    /* [slots, param_words], of which the words ... */
    int64_t param_words;
    int32_t temperature, seed_low, seed_high;
    float eps;
    const LayerArgs *layers; /* whose planes are filled, num_layers of them, in which positions have `planes` planes */
    int32_t num_layers, planes;
    const int32_t *block_tables;
    int64_t table_stride;
} CodaArgs;

typedef struct {
    const int32_t *frame; /* [4, n]: slots, positions, exit loops (none above 0: nothing is filled), lanes (common/frames.py) */
    const void *hidden;   /* [n, hidden] for the head; NULL: those of item */
    void *normed;         /* scratch, n rows normed_stride elements apart */
    void *logits;         /* scratch [n, head.cols] */
    float *weights;       /* the same in fp32 where tokens are sampled, else NULL: all are greedy */
    int32_t *tokens;      /* [n] */
    int64_t n, normed_stride;
} CodaCall;

#endif
