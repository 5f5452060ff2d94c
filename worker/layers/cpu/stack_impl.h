/* Body of the block stack for one element type; included once a type (see stack.c). */

/* What a linear layer reads of a row of the stream, [d]: normed, where there is a norm. */
static void NAME(input_row)(const StackCall *call, int64_t row, const T *from, const void *norm, int64_t d, float eps) {
    T *to = (T *)call->normed + row * call->normed_stride;
    if (norm) NAME(norm_row)(to, from, NULL, NULL, (const T *)norm, d, eps);
    else memcpy(to, from, d * sizeof(T));
}

/* Adds a branch (normed, where it has a norm) to the stream and norms the sum for what comes next: `normed` rows, or the result when `last`.
 * Ends with a barrier. */
static void NAME(join_branch)(
    const StackArgs *stack, const StackCall *call, const void *stream, const void *norm, const void *next_norm, int last,
    int64_t n, Barrier *barrier
) {
    const int64_t d = stack->hidden;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n; row++) {
        const T *from = (const T *)stream + row * d, *branch = (const T *)call->branch + row * d;
        T *to = (T *)call->out + row * d;
        if (!norm) {
            for (int64_t i = 0; i < d; i++) PUT(to + i, GET(from + i) + GET(branch + i));
        } else if (stack->norm_on_sum) {
            NAME(norm_row)(to, from, branch, NULL, (const T *)norm, d, stack->eps);
        } else {
            NAME(norm_row)(to, branch, NULL, from, (const T *)norm, d, stack->eps);
        }
        if (!last) NAME(input_row)(call, row, to, next_norm, d, stack->eps);
        else if (next_norm) NAME(norm_row)(to, to, NULL, NULL, (const T *)next_norm, d, stack->eps);
    }
    team_barrier(barrier);
}

/* Norms a row's heads [width] where they are, as many features at a time as the norm has. */
static void NAME(norm_heads)(T *heads, const void *norm, int64_t width, int64_t norm_width, float eps) {
    if (!norm) return;
    for (int64_t i = 0; i < width; i += norm_width) {
        NAME(norm_row)(heads + i, heads + i, NULL, NULL, (const T *)norm, norm_width, eps);
    }
}

/* Norms q and k of every row; ends with a barrier. */
static void NAME(norm_qk)(const BlockArgs *block, const StackCall *call, int64_t n, float eps, Barrier *barrier) {
    const int64_t q_width = (int64_t)block->cache->num_heads * block->cache->head_dim;
    const int64_t k_width = (int64_t)block->cache->num_kv_heads * block->cache->head_dim;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n; row++) {
        T *q = (T *)call->projected + row * call->projected_stride, *k = q + q_width;
        NAME(norm_heads)(q, block->q_norm, q_width, block->q_norm_width, eps);
        NAME(norm_heads)(k, block->k_norm, k_width, block->k_norm_width, eps);
    }
    team_barrier(barrier);
}

/* out [n, cols] = x [n, k] times a layer of either kind; ends with a barrier. */
static void NAME(linear_team)(
    const Packed *layer, const StackCall *call, const void *x, int64_t x_stride, void *out, int64_t out_stride, int64_t n,
    Barrier *barrier
) {
    if (layer->scales) {
        NAME(int8_team)(layer, (const T *)x, x_stride, (T *)out, out_stride, n, call->quantised, barrier);
        return;
    }
#if HAVE_GEMM
    NAME(gemm_team)(layer, (const T *)x, x_stride, (T *)out, out_stride, n, barrier);
#endif
}

/* Called by every thread of a team. */
static void NAME(stack_team)(const StackArgs *stack, const RowArgs *rows, const StackCall *call, Barrier *barrier) {
    const int64_t n = rows->num_rows, d = stack->hidden;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n; row++) {
        NAME(input_row)(call, row, (const T *)call->x + row * d, stack->blocks[0].norm_in, d, stack->eps);
    }
    team_barrier(barrier);
    for (int64_t i = 0; i < stack->num_blocks; i++) {
        const BlockArgs *block = &stack->blocks[i];
        const int last = i + 1 == stack->num_blocks;
        const int64_t heads = block->cache->num_heads, kv_heads = block->cache->num_kv_heads, dh = block->cache->head_dim;
        const T *projected = (const T *)call->projected;
        const CallArgs attention = {
            .q = projected, .k = projected + heads * dh, .v = projected + (heads + kv_heads) * dh,
            .q_stride = call->projected_stride, .k_stride = call->projected_stride, .v_stride = call->projected_stride,
            .out = call->attended, .out_stride = call->attended_stride, .cos = call->cos, .sin = call->sin,
            .q_bias = block->q_bias, .k_bias = block->k_bias, .rope = call->rope,
        };
        NAME(linear_team)(&block->qkv, call, call->normed, call->normed_stride, call->projected, call->projected_stride, n, barrier);
        if (block->q_norm || block->k_norm) NAME(norm_qk)(block, call, n, stack->eps, barrier);
        NAME(attend_team)(block->cache, rows, &attention, barrier);
        NAME(linear_team)(&block->out, call, call->attended, call->attended_stride, call->branch, d, n, barrier);
        NAME(join_branch)(stack, call, i == 0 ? call->x : call->out, block->norm_out, block->norm_mlp_in, 0, n, barrier);
        NAME(linear_team)(&block->gate_up, call, call->normed, call->normed_stride, call->inner, call->inner_stride, n, barrier);
        NAME(linear_team)(&block->down, call, call->inner, call->inner_stride, call->branch, d, n, barrier);
        const void *next_norm = last ? stack->final_norm : stack->blocks[i + 1].norm_in;
        NAME(join_branch)(stack, call, call->out, block->norm_mlp_out, next_norm, last, n, barrier);
    }
}

/* Called by every thread of a team. */
static void NAME(core_team)(const CoreArgs *core, const CoreCall *call, const RowArgs *rows, Barrier *barrier) {
    const int64_t n = call->n, d = core->stack->hidden, half = core->half;
    const int32_t *loops = rows->positions + n, *lanes = loops + n;
    const T *injection = (const T *)core->injection;
    T *x = (T *)call->stack.out, *item = (T *)core->item;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n; row++) {
        const int32_t plane = loops[row] < core->planes ? loops[row] - 1 : core->planes - 1;
        call->planes[row] = plane < 0 ? 0 : plane; /* a padding row has loop 0 */
        T *to = injection ? (T *)call->wide + row * call->wide_stride : x + row * d;
        memcpy(to, item + lanes[row] * d, d * sizeof(T));
        if (injection) memcpy(to + d, injection + lanes[row] * d, d * sizeof(T));
        memcpy(call->cos + row * half, core->cos + rows->positions[row] * half, half * sizeof(float));
        memcpy(call->sin + row * half, core->sin + rows->positions[row] * half, half * sizeof(float));
    }
    team_barrier(barrier);
#if HAVE_GEMM
    if (injection) NAME(gemm_team)(&core->adapter, (const T *)call->wide, call->wide_stride, x, d, n, barrier);
#endif
    NAME(stack_team)(core->stack, rows, &call->stack, barrier);
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n; row++) memcpy(item + lanes[row] * d, x + row * d, d * sizeof(T));
}

/* for the next type */
#undef T
#undef NAME
#undef GET
#undef PUT
