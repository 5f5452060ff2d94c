/* How sums of a tile become outputs of one element type; included once a type by every kind of product. */

INLINE void NAME(store_columns)(T *out, vg v, int64_t columns) {
    if (columns >= GEMM_LANES) {
        STORE(out, v);
    } else if (columns > 0) {
        T padded[GEMM_LANES];
        STORE(padded, v);
        memcpy(out, padded, columns * sizeof(T));
    }
}

/* Writes a tile's sums; `columns` are left of the output. */
static void NAME(store_tile)(const float *sums, int64_t rows, T *out, int64_t out_stride, int64_t columns, int gated) {
    for (int64_t r = 0; r < rows; r++, out += out_stride)
#pragma GCC unroll 2
        for (int lane = 0; lane < LANES; lane += GEMM_LANES) {
            const vg first = load_g(sums + r * PAIR_COLUMNS + lane), second = load_g(sums + r * PAIR_COLUMNS + LANES + lane);
            if (gated) {
                NAME(store_columns)(out + lane, VROUND(silu_g(VROUND(first))) * VROUND(second), columns - lane);
            } else {
                NAME(store_columns)(out + lane, first, columns - lane);
                NAME(store_columns)(out + LANES + lane, second, columns - LANES - lane);
            }
        }
}
