/* Arguments of a prelude; mirrored by a ctypes structure in structs.py. */
#ifndef DEPTHBATCH_PRELUDE_H
#define DEPTHBATCH_PRELUDE_H

#include <stdint.h>

/* What is kept of lanes and slots (worker/slots.py), and the embedding. */
typedef struct {
    const char *embedding; /* [vocabulary], rows of row_bytes */
    char *item;            /* [lanes], likewise */
    int64_t row_bytes;
    const int32_t *token;         /* [lanes] */
    float *survival, *cumulated;  /* [lanes] */
    int32_t *block_tables;
    int64_t table_stride, block_size;
} PreludeArgs;

#endif
