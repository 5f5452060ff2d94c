/* A whole run of transformer blocks in one parallel region: no operator dispatch between its parts, one team of threads.
 *
 * Every part is the kernel that the separate operators call, with the same roundings, so the result is bit for bit
 * that of calling them one by one. Layers are int8, or where there are products of their own type of that.
 */
#include <string.h>

#include "int8.h"
#include "small.h"
#include "stack.h"

#define T float
#define NAME(x) x##_f32
#define GET scalar_get_f32
#define PUT scalar_put_f32
#include "stack_impl.h"

#define T bf16
#define NAME(x) x##_bf16
#define GET scalar_get_bf16
#define PUT scalar_put_bf16
#include "stack_impl.h"

/* Whether the work is worth a second thread. */
INLINE int is_large_stack(const StackArgs *stack, const RowArgs *rows) {
    int64_t tokens = 0, products = 0;
    for (int64_t row = 0; row < rows->num_rows; row++) tokens += rows->positions[row] + 1;
    for (int64_t i = 0; i < stack->num_blocks && products < PARALLEL_MIN_PRODUCTS; i++) {
        const BlockArgs *block = &stack->blocks[i];
        const int64_t layers = row_products(&block->qkv) + row_products(&block->out) + row_products(&block->gate_up) +
                               row_products(&block->down);
        products += rows->num_rows * layers + tokens * 2 * block->cache->num_heads * block->cache->head_dim;
    }
    return products >= PARALLEL_MIN_PRODUCTS;
}

EXPORT void db_stack_f32(const StackArgs *stack, const RowArgs *rows, const StackCall *call) {
    Barrier barrier = {0};
#pragma omp parallel if (is_large_stack(stack, rows))
    stack_team_f32(stack, rows, call, &barrier);
}
EXPORT void db_stack_bf16(const StackArgs *stack, const RowArgs *rows, const StackCall *call) {
    Barrier barrier = {0};
#pragma omp parallel if (is_large_stack(stack, rows))
    stack_team_bf16(stack, rows, call, &barrier);
}

/* Where the rows of a core step live. */
INLINE RowArgs core_rows(const CoreArgs *core, CoreCall *call) {
    call->stack.x = call->stack.out;
    call->stack.cos = call->cos, call->stack.sin = call->sin;
    return (RowArgs){
        .slots = call->frame, .positions = call->frame + call->n, .planes = call->planes, .block_tables = core->block_tables,
        .table_stride = core->table_stride, .num_rows = (int32_t)call->n,
    };
}
EXPORT void db_core_f32(const CoreArgs *core, CoreCall *call) {
    const RowArgs rows = core_rows(core, call);
    Barrier barrier = {0};
#pragma omp parallel if (is_large_stack(core->stack, &rows))
    core_team_f32(core, call, &rows, &barrier);
}
EXPORT void db_core_bf16(const CoreArgs *core, CoreCall *call) {
    const RowArgs rows = core_rows(core, call);
    Barrier barrier = {0};
#pragma omp parallel if (is_large_stack(core->stack, &rows))
    core_team_bf16(core, call, &rows, &barrier);
}
