/* Body of the int8 product for one element type of its inputs and outputs; included once a type (see int8.c). */

/* One row x [k] -> padded(k) bytes and their RowScale. A row that holds no numbers gets a scale that is none. */
static void NAME(quantise_row)(int8_t *to, const T *x, int64_t k) {
    vi top = {0}; /* the largest |x| as bits: infinity and NaN are above all numbers */
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        const vi bits = (vi)LOAD(x + i) & 0x7fffffff, above = bits > top;
        top = (above & bits) | (~above & top);
    }
    int32_t largest_bits = 0;
    for (int lane = 0; lane < LANES; lane++) largest_bits = top[lane] > largest_bits ? top[lane] : largest_bits;
    for (; i < k; i++) {
        const float value = GET(x + i);
        int32_t bits;
        memcpy(&bits, &value, 4);
        bits &= 0x7fffffff;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    float largest;
    memcpy(&largest, &largest_bits, 4);
    const int counts = largest >= SMALLEST && largest_bits < 0x7f800000;
    const float inverse = counts ? 127.0f / largest : 0.0f;
    RowScale row = {.scale = largest_bits >= 0x7f800000 ? NAN : counts ? largest / 127.0f : 0.0f};
    memset(to + k, 0, padded(k) - k);
    i = 0;
    if (counts) {
#ifdef __AVX512F__
        __m512i sum = _mm512_setzero_si512();
        for (; i + LANES <= k; i += LANES) {
            const __m512i q = _mm512_cvtps_epi32((__m512)(LOAD(x + i) * inverse));
            sum = _mm512_add_epi32(sum, q);
            _mm_storeu_si128((__m128i *)(to + i), _mm512_cvtepi32_epi8(q));
        }
        row.sum = _mm512_reduce_add_epi32(sum);
#elif defined(__AVX2__)
        vi sum = {0};
        for (; i + LANES <= k; i += LANES) {
            const vf scaled = LOAD(x + i) * inverse;
            __m256 halves[2];
            memcpy(halves, &scaled, sizeof(halves));
            const __m256i q[2] = {_mm256_cvtps_epi32(halves[0]), _mm256_cvtps_epi32(halves[1])};
            vi both;
            memcpy(&both, q, sizeof(both));
            sum += both;
            const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xd8);
            const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
            _mm_storeu_si128((__m128i *)(to + i), bytes);
        }
        for (int lane = 0; lane < LANES; lane++) row.sum += sum[lane];
#endif
        for (; i < k; i++) row.sum += to[i] = (int8_t)lrintf(GET(x + i) * inverse);
    } else {
        memset(to, 0, k);
    }
    memcpy(to + padded(k), &row, sizeof(row));
}

/* All n quantised rows times pair `pair`. */
static void NAME(int8_pair)(const Packed *layer, int64_t pair, const int8_t *x, T *out, int64_t out_stride, int64_t n) {
    const int64_t width = layer->gated ? LANES : PAIR_COLUMNS, column = pair * width;
    const int64_t k = padded(layer->k), stride = row_bytes(layer->k);
    const uint8_t *w = (const uint8_t *)layer->packed + pair * k * PAIR_COLUMNS;
    int32_t sums[MAX_TILE_ROWS_OF_ALL * PAIR_COLUMNS] __attribute__((aligned(64)));
    const int64_t most = tile_rows(n), tiles = (n + most - 1) / most;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t begin = n * tile / tiles, rows = n * (tile + 1) / tiles - begin;
        const int8_t *from = x + begin * stride;
        if (most == MAX_BYTE_ROWS) {
            byte_sums(rows, from, stride, w, k, sums);
        } else {
            amx_sums(rows, from, stride, w, k, sums);
        }
        scale_tile(sums, rows, from, stride, k, layer->scales + pair * PAIR_COLUMNS);
        T *to = out + begin * out_stride + column;
        NAME(store_tile)((const float *)sums, rows, to, out_stride, layer->cols - column, layer->gated);
    }
}

void NAME(int8_team)(
    const Packed *layer, const T *x, int64_t x_stride, T *out, int64_t out_stride, int64_t n, char *quantised, Barrier *barrier
) {
    const int64_t stride = row_bytes(layer->k), pairs = layer_pairs(layer->cols, layer->gated);
    int8_t *rows = (int8_t *)quantised;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n; row++) NAME(quantise_row)(rows + row * stride, x + row * x_stride, layer->k);
    team_barrier(barrier);
    const int64_t chunks = (n + CHUNK_BYTE_ROWS - 1) / CHUNK_BYTE_ROWS;
#pragma omp for schedule(dynamic, task_share(pairs)) nowait
    for (int64_t task = 0; task < chunks * pairs; task++) {
        const int64_t row = task / pairs * CHUNK_BYTE_ROWS, count = n - row < CHUNK_BYTE_ROWS ? n - row : CHUNK_BYTE_ROWS;
        NAME(int8_pair)(layer, task % pairs, rows + row * stride, out + row * out_stride, out_stride, count);
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
