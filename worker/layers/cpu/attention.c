/* Paged attention that reads the cache in place: append, rotate and attend in one call over all rows and heads.
 *
 * Decode takes a row at a time, prefill a run of consecutive positions of one sequence, so that a K/V tile loaded once
 * serves several queries. Softmax is online over tiles of 16 tokens in fp32; the order of every sum is fixed by the
 * position alone.
 */
#include "attention.h"
#include "vec.h"

#define TILE 16
#define MAX_RUN 8
#define PARALLEL_MIN_TOKENS 64 /* cached tokens over all rows and heads below which a second thread costs more than it saves */

/* Physical block of `row` at logical block index `index`. */
INLINE int64_t physical_block(const LayerArgs *layer, const RowArgs *rows, int64_t row, int64_t index) {
    int64_t logical = rows->block_tables[(int64_t)rows->slots[row] * rows->table_stride + index];
    int64_t plane = layer->planes == 1 ? 0 : (rows->planes ? rows->planes[row] : rows->plane);
    return logical * layer->planes + plane;
}

/* Element offset of (block, head, offset 0). */
INLINE int64_t tile_offset(const LayerArgs *layer, int64_t block, int64_t head) {
    return (block * layer->num_kv_heads + head) * layer->block_size * layer->head_dim;
}

/* Rows a thread takes at a time: half of what is left for it, at most 8. */
INLINE int64_t decode_share(int64_t items) {
    const int64_t share = items / (2 * team_size());
    return share < 1 ? 1 : share > 8 ? 8 : share;
}

#ifdef __AVX512F__
/* 16 accumulators -> their 16 sums, in one tree. */
INLINE vf reduce_lanes(const __m512 *a) {
    __m512 u[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 t0 = _mm512_add_ps(_mm512_unpacklo_ps(a[4 * i], a[4 * i + 1]), _mm512_unpackhi_ps(a[4 * i], a[4 * i + 1]));
        __m512 t1 =
            _mm512_add_ps(_mm512_unpacklo_ps(a[4 * i + 2], a[4 * i + 3]), _mm512_unpackhi_ps(a[4 * i + 2], a[4 * i + 3]));
        u[i] = _mm512_add_ps(_mm512_shuffle_ps(t0, t1, 0x44), _mm512_shuffle_ps(t0, t1, 0xEE));
    }
    __m512 w0 = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xDD));
    __m512 w1 = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xDD));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(w0, w1, 0x88), _mm512_shuffle_f32x4(w0, w1, 0xDD));
}
#endif

#define T float
#define NAME(x) x##_f32
#define LOAD load_f32
#define STORE store_f32
#define ROUND scalar_round_f32
#define GET scalar_get_f32
#define PUT scalar_put_f32
#include "attention_impl.h"

#define T bf16
#define NAME(x) x##_bf16
#define LOAD load_bf16
#define STORE store_bf16
#define ROUND scalar_round_bf16
#define GET scalar_get_bf16
#define PUT scalar_put_bf16
#ifdef __AVX512BF16__
#define DOT_BF16 1
#endif
#include "attention_impl.h"

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

/* Copies K and V of each row's position from plane source[b] to planes first[b] .. end[b]-1 of every layer. */
EXPORT void db_copy_planes(
    const LayerArgs *layers, int32_t num_layers, const RowArgs *rows, const int32_t *source, const int32_t *first,
    const int32_t *end, int32_t element_bytes
) {
    for (int32_t l = 0; l < num_layers; l++) {
        const LayerArgs *layer = &layers[l];
        size_t bytes = (size_t)layer->head_dim * element_bytes;
        for (int64_t b = 0; b < rows->num_rows; b++) {
            int64_t index = rows->positions[b] / layer->block_size, offset = rows->positions[b] % layer->block_size;
            if (first[b] >= end[b]) continue;
            int64_t block = rows->block_tables[(int64_t)rows->slots[b] * rows->table_stride + index] * (int64_t)layer->planes;
            for (int32_t head = 0; head < layer->num_kv_heads; head++) {
                int64_t from = (tile_offset(layer, block + source[b], head) + offset * layer->head_dim) * element_bytes;
                for (int32_t plane = first[b]; plane < end[b]; plane++) {
                    int64_t to = (tile_offset(layer, block + plane, head) + offset * layer->head_dim) * element_bytes;
                    memcpy((char *)layer->k_cache + to, (char *)layer->k_cache + from, bytes);
                    memcpy((char *)layer->v_cache + to, (char *)layer->v_cache + from, bytes);
                }
            }
        }
    }
}
