/* The prelude of a model without layers before the loop: rows begin a token. */
#include <string.h>

#include "prelude.h"
#include "vec.h"

/* frame [4, n]: slots, positions, new blocks (0: none), lanes (common/frames.py). */
EXPORT void db_prelude(const PreludeArgs *prelude, const int32_t *frame, int64_t n) {
    const int32_t *positions = frame + n, *blocks = positions + n, *lanes = blocks + n;
    for (int64_t row = 0; row < n; row++) {
        const int64_t lane = lanes[row];
        int32_t *table = prelude->block_tables + frame[row] * prelude->table_stride;
        if (blocks[row] > 0) table[positions[row] / prelude->block_size] = blocks[row];
        prelude->survival[lane] = 1.0f;
        prelude->cumulated[lane] = 0.0f;
        const char *from = prelude->embedding + prelude->token[lane] * prelude->row_bytes;
        memcpy(prelude->item + lane * prelude->row_bytes, from, prelude->row_bytes);
    }
}
