/* Parameters and body of a function that passes the tokens which `count` rows from `row` see by a run of their queries, of kv heads
 * head .. head + num_heads - 1. Heads of a block are neighbours in memory, so a block is read as one stream, once for all rows
 * and all query heads of a kv head. RUN: the type of run; STORED: of K and V; ATTEND_TILE: what a tile goes to. */
    RUN *run, const LayerArgs *layer, const RowArgs *rows, int64_t row, int count, int64_t head, int num_heads
) {
    const int dh = layer->head_dim, group = layer->num_heads / layer->num_kv_heads;
    const STORED *k = (const STORED *)layer->k_cache, *v = (const STORED *)layer->v_cache;
    const int64_t first = rows->positions[row], last = first + count - 1, size = layer->block_size;
    const int64_t unseen = layer->window && first >= layer->window ? first + 1 - layer->window : 0; /* by the first row */
    const int64_t begin = unseen / size * size;
    int64_t next_block = tile_offset(layer, physical_block(layer, rows, row, begin / size), head);
    for (int64_t start = begin; start <= last; start += size) {
        const int64_t block = next_block;
        if (start + size <= last) {
            next_block = tile_offset(layer, physical_block(layer, rows, row, start / size + 1), head);
        } else if (row + count < rows->num_rows) { /* most likely what this thread reads next */
            next_block = tile_offset(layer, physical_block(layer, rows, row + count, 0), head);
        }
        for (int64_t t = 0; t < size && start + t <= last; t += TILE) {
            const int64_t at = block + t * dh, next = next_block + t * dh;
#ifdef TAKE_SCALES
            TAKE_SCALES(run, layer, at / dh, next / dh, num_heads);
#endif
            const int64_t ahead = first + 1 - (start + t), behind = layer->window ? ahead - layer->window : -count;
            const int n = (int)smallest(TILE, size - t, ahead + count - 1);
            /* Row c sees the tokens behind + c .. ahead + c - 1 of the tile; those that see its first go together. */
            for (int c = ahead > 0 ? 0 : (int)(1 - ahead), together; c < count; c += together) {
                const int from = behind + c > 0 ? (int)(behind + c) : 0;
                together = 1;
                if (from >= n) continue;
                while (c + together < count && behind + c + together <= 0) together++;
                ATTEND_TILE(
                    run, k + at, v + at, k + next, v + next, size * dh, num_heads, count, group, c, together, from, ahead + c, n,
                    dh, layer->scale
                );
            }
        }
    }
}
#undef RUN
#undef ATTEND_TILE
