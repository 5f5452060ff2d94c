/* How sums of a tile become outputs of one element type; included once a type by every kind of product. */

INLINE void NAME(store_columns)(T *out, vf v, int64_t columns) {
    if (columns >= LANES) {
        STORE(out, v);
    } else if (columns > 0) {
        T padded[LANES];
        STORE(padded, v);
        memcpy(out, padded, columns * sizeof(T));
    }
}

/* Writes a tile's sums; `columns` are left of the output. */
static void NAME(store_tile)(const float *sums, int64_t rows, T *out, int64_t out_stride, int64_t columns, int gated) {
    for (int64_t r = 0; r < rows; r++, out += out_stride) {
        vf first = load_f32(sums + r * PAIR_COLUMNS), second = load_f32(sums + r * PAIR_COLUMNS + LANES);
        if (gated) {
            NAME(store_columns)(out, VROUND(vsilu(VROUND(first))) * VROUND(second), columns);
        } else {
            NAME(store_columns)(out, first, columns);
            NAME(store_columns)(out + LANES, second, columns - LANES);
        }
    }
}
