/* The tile instructions that int8_tiles.h uses, in plain C, by the manual: put before int8.c to run it without AMX. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_release

#define HAVE_TILES 1
#define TILE_PERMISSION 1 /* granted: there is nothing to ask for */

static _Thread_local struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
} tile_shape;
static _Thread_local uint8_t tile_data[8][16][64];
__attribute__((visibility("default"))) int64_t emulated_products;

#define _tile_loadconfig(from) (memset(tile_data, 0, sizeof(tile_data)), memcpy(&tile_shape, from, 64))
#define _tile_zero(t) memset(tile_data[t], 0, sizeof(tile_data[t]))
#define _tile_release() memset(&tile_shape, 0, sizeof(tile_shape))
#define _tile_loadd(t, from, stride) tile_load(t, (const char *)(from), stride)
#define _tile_stored(t, to, stride) tile_store(t, (char *)(to), stride)
#define _tile_dpbsud(c, a, b) tile_multiply(c, a, b)

static void tile_load(int t, const char *from, int64_t stride) {
    memset(tile_data[t], 0, sizeof(tile_data[t]));
    for (int row = 0; row < tile_shape.rows[t]; row++)
        memcpy(tile_data[t][row], from + row * stride, tile_shape.column_bytes[t]);
}

static void tile_store(int t, char *to, int64_t stride) {
    for (int row = 0; row < tile_shape.rows[t]; row++)
        memcpy(to + row * stride, tile_data[t][row], tile_shape.column_bytes[t]);
}

static void tile_multiply(int c, int a, int b) {
    __atomic_fetch_add(&emulated_products, 1, __ATOMIC_RELAXED);
    for (int m = 0; m < tile_shape.rows[c]; m++)
        for (int k = 0; k < tile_shape.column_bytes[a] / 4; k++)
            for (int n = 0; n < tile_shape.column_bytes[c] / 4; n++) {
                int32_t sum;
                memcpy(&sum, tile_data[c][m] + 4 * n, 4);
                for (int j = 0; j < 4; j++)
                    sum += (int8_t)tile_data[a][m][4 * k + j] * (int)tile_data[b][k][4 * n + j];
                memcpy(tile_data[c][m] + 4 * n, &sum, 4);
            }
}
