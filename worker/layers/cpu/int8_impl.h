/* Body of the int8 product for one element type of its inputs and outputs; included once a type (see int8.c). */

/* The largest |x| as bits: infinity and NaN are above all numbers. */
static int32_t NAME(largest_size)(const T *x, int64_t k) {
    int32_t largest = 0;
    for (int64_t i = 0; i < k; i++) {
        const int32_t size = float_bits(GET(x + i)) & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* How many |x| are beyond a size, both as bits. */
static int32_t NAME(count_beyond)(const T *x, int64_t k, int32_t size) {
    int32_t count = 0;
    for (int64_t i = 0; i < k; i++) count += (float_bits(GET(x + i)) & 0x7fffffff) > size;
    return count;
}

/* x [LANES] * factor */
INLINE Parts NAME(scaled)(const T *x, float factor) {
    Parts y;
#pragma GCC unroll 2
    for (int i = 0; i < LANES / GEMM_LANES; i++) y.part[i] = LOAD(x + i * GEMM_LANES) * factor;
    return y;
}

/* One row x [k] -> padded(k) inputs and what is behind them. A row that holds no numbers gets a scale that is none. */
static void NAME(quantise_row)(char *to, const T *x, int64_t k, int64_t group) {
    const int64_t end = padded(k);
    const int32_t largest_bits = NAME(largest_size)(x, k);
    float largest;
    memcpy(&largest, &largest_bits, 4);
    const int counts = largest >= SMALLEST && largest_bits < 0x7f800000;
    float steps = 127.0f, size = largest / 2;
    for (int bits = 1; counts && bits <= WIDE_BITS; bits++, size /= 2, steps *= 2)
        if (NAME(count_beyond)(x, k, float_bits(size)) > most_wide(k)) break;
    const float inverse = counts ? steps / largest : 0.0f;
    RowScale row = {.scale = largest_bits >= 0x7f800000 ? NAN : counts ? largest / steps : 0.0f};
    int64_t i = 0;
    for (; i + LANES <= k && counts; i += LANES) store_inputs(to, i, end, NAME(scaled)(x + i, inverse), &row);
    if (i < k && counts) {
        T rest[LANES] = {0};
        memcpy(rest, x + i, (k - i) * sizeof(T));
        store_inputs(to, i, end, NAME(scaled)(rest, inverse), &row);
        i += LANES;
    }
    if (i < end) memset(to + i * INPUT_BYTES, 0, (end - i) * INPUT_BYTES);
    memcpy(to + end * INPUT_BYTES, &row, sizeof(row));
    const Input *inputs = (const Input *)to;
    const Wide *list = (const Wide *)(to + list_at(k));
    GroupEnd *ends = (GroupEnd *)(to + ends_at(k)), now = {0};
    for (int64_t begin = 0; begin < end; begin += group, *ends++ = now) {
        const int64_t stop = begin + group < end ? begin + group : end;
        now.sum = 0;
        for (i = begin; i < stop; i++) now.sum += inputs[i];
        for (; now.wide < row.wide && list[now.wide].step * 4 < stop; now.wide++)
            for (int j = 0; j < 4; j++) now.sum += 128 * list[now.wide].high[j];
    }
}

/* All n quantised rows times pair `pair`. */
static void NAME(int8_pair)(const Packed *layer, int64_t pair, const char *x, T *out, int64_t out_stride, int64_t n) {
    const int64_t width = layer->gated ? LANES : PAIR_COLUMNS, column = pair * width;
    const int64_t k = padded(layer->k), stride = row_bytes(layer->k);
    const uint8_t *w = (const uint8_t *)layer->packed + pair * k * PAIR_COLUMNS;
    const float *scales = layer->scales + pair * ((k + layer->group - 1) / layer->group) * PAIR_COLUMNS;
    int32_t sums[MAX_TILE_ROWS_OF_ALL * PAIR_COLUMNS] __attribute__((aligned(64)));
    float totals[MAX_TILE_ROWS_OF_ALL * PAIR_COLUMNS] __attribute__((aligned(64)));
    const int64_t most = tile_rows(n), tiles = (n + most - 1) / most;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t begin = n * tile / tiles, rows = n * (tile + 1) / tiles - begin;
        const char *from = x + begin * stride;
        for (int64_t i = 0, group = 0; i < k; i += layer->group, group++) {
            const int64_t length = k - i < layer->group ? k - i : layer->group;
            if (most == MAX_BYTE_ROWS) {
                byte_sums(rows, from + i * INPUT_BYTES, stride, w + i * PAIR_COLUMNS, length, sums);
            } else {
                amx_sums(rows, from + i * INPUT_BYTES, stride, w + i * PAIR_COLUMNS, length, sums);
            }
            add_group(totals, sums, rows, from, stride, w, k, group, scales + group * PAIR_COLUMNS);
        }
        scale_rows(totals, rows, from, stride, k);
        T *to = out + begin * out_stride + column;
        NAME(store_tile)(totals, rows, to, out_stride, layer->cols - column, layer->gated);
    }
}

void NAME(int8_team)(
    const Packed *layer, const T *x, int64_t x_stride, T *out, int64_t out_stride, int64_t n, char *quantised, Barrier *barrier
) {
    const int64_t stride = row_bytes(layer->k), pairs = layer_pairs(layer->cols, layer->gated);
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n; row++) NAME(quantise_row)(quantised + row * stride, x + row * x_stride, layer->k, layer->group);
    team_barrier(barrier);
    const int64_t chunks = (n + CHUNK_BYTE_ROWS - 1) / CHUNK_BYTE_ROWS;
#pragma omp for schedule(dynamic, task_share(pairs)) nowait
    for (int64_t task = 0; task < chunks * pairs; task++) {
        const int64_t row = task / pairs * CHUNK_BYTE_ROWS, count = n - row < CHUNK_BYTE_ROWS ? n - row : CHUNK_BYTE_ROWS;
        NAME(int8_pair)(layer, task % pairs, quantised + row * stride, out + row * out_stride, out_stride, count);
    }
    amx_done();
    team_barrier(barrier);
}

/* for the next type */
#undef T
#undef NAME
#undef LOAD
#undef STORE
#undef VROUND
#undef GET
