/* Paged attention that reads the cache in place: append, rotate and attend in one call over all rows and heads.
 *
 * Decode takes a row at a time, prefill a run of consecutive positions of one sequence, so that a K/V tile loaded once
 * serves several queries. Softmax is online over tiles of 16 tokens in fp32; the order of every sum is fixed by the
 * position alone. Here K and V are of the queries' type; attention_codes.c is for quantised ones.
 */
#include "attention_base.h"

#define PARALLEL_MIN_TOKENS 64 /* cached tokens over all rows and heads below which a second thread costs more than it saves */

#define NAME(x) x##_f32
#include "attention_f32.h"
#define NAME(x) x##_bf16
#include "attention_bf16.h"

void attend_team_f32(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier) {
    if (layer->kind == KV_AUTO) run_team_f32(layer, rows, call, barrier);
    else attend_codes_team_f32(layer, rows, call, barrier);
}
void attend_team_bf16(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier) {
    if (layer->kind == KV_AUTO) run_team_bf16(layer, rows, call, barrier);
    else attend_codes_team_bf16(layer, rows, call, barrier);
}

/* Whether the work is worth a second thread. */
INLINE int is_large(const LayerArgs *layer, const RowArgs *rows) {
    int64_t tokens = 0;
    for (int64_t row = 0; row < rows->num_rows; row++) tokens += rows->positions[row] + 1;
    return tokens * layer->num_kv_heads >= PARALLEL_MIN_TOKENS;
}

EXPORT void db_attend_f32(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call) {
    Barrier barrier = {0};
#pragma omp parallel if (is_large(layer, rows))
    attend_team_f32(layer, rows, call, &barrier);
}
EXPORT void db_attend_bf16(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call) {
    Barrier barrier = {0};
#pragma omp parallel if (is_large(layer, rows))
    attend_team_bf16(layer, rows, call, &barrier);
}

void copy_planes(const LayerArgs *layer, const int32_t *table, int64_t position, int32_t source, int32_t first, int32_t end) {
    const size_t of_numbers = (size_t)layer->head_dim * layer->element_bytes, bytes[4] = {of_numbers, of_numbers, 2, 2};
    char *memory[4] = {layer->k_cache, layer->v_cache, (char *)layer->k_scales, (char *)layer->v_scales};
    const int kept = layer->kind == KV_AUTO ? 2 : 4;
    if (first >= end) return;
    const int64_t block = (int64_t)table[position / layer->block_size] * layer->planes, offset = position % layer->block_size;
    for (int32_t head = 0; head < layer->num_kv_heads; head++) {
        const int64_t from = tile_vector(layer, block + source, head) + offset;
        for (int32_t plane = first; plane < end; plane++) {
            const int64_t to = tile_vector(layer, block + plane, head) + offset;
            for (int i = 0; i < kept; i++) memcpy(memory[i] + to * bytes[i], memory[i] + from * bytes[i], bytes[i]);
        }
    }
}

/* The same of every layer and row: plane source[b] -> planes first[b] .. end[b] - 1. */
EXPORT void db_copy_planes(
    const LayerArgs *layers, int32_t num_layers, const RowArgs *rows, const int32_t *source, const int32_t *first,
    const int32_t *end
) {
    for (int32_t l = 0; l < num_layers; l++)
        for (int64_t b = 0; b < rows->num_rows; b++) {
            const int32_t *table = rows->block_tables + rows->slots[b] * rows->table_stride;
            copy_planes(&layers[l], table, rows->positions[b], source[b], first[b], end[b]);
        }
}
