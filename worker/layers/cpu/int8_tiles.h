/* Sums of bytes by AMX tiles: 32 rows times a pair at a time. Included by int8.c; without tiles nothing calls it.
 *
 *     tile 0 1   sums of rows 0..15 with the pair's first and second 16 columns
 *     tile 2 3   those of rows 16..31
 *     tile 4 5   64 bytes of each of those rows      tile 6 7   16 k steps of each 16 columns
 */

#ifndef HAVE_TILES /* else whoever includes this has instructions of its own */
#if defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__linux__)
#define HAVE_TILES 1
#else
#define HAVE_TILES 0
#endif
#endif

#define AMX_ROWS 32 /* of one call */
#define AMX_MIN_ROWS 5 /* fewer leave a tile mostly empty */
#define MAX_TILE_ROWS_OF_ALL AMX_ROWS

#if HAVE_TILES
#define TILE_SIDE 16

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
} TileConfig;

#ifdef TILE_PERMISSION
static const int tiles_allowed = TILE_PERMISSION;
#else
#define ARCH_REQ_XCOMP_PERM 0x1023
#define TILE_DATA 18
static int tiles_allowed; /* the system has agreed to keep the tiles of this process */

__attribute__((constructor)) static void ask_for_tiles(void) {
    tiles_allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#endif

/* sums [rows, 32] of at most AMX_ROWS rows. */
static void amx_sums(int64_t rows, const char *x, int64_t stride, const uint8_t *w, int64_t k, int32_t *sums) {
    const int64_t first = rows < TILE_SIDE ? rows : TILE_SIDE, second = rows - first;
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.column_bytes[tile] = 64;
        config.rows[tile] = tile >= 6 ? TILE_SIDE : tile < 2 || tile == 4 ? first : second ? second : 1;
    }
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < k; i += INT8_STEP) {
        _tile_loadd(4, x + i, stride);
        _tile_loadd(6, w + i * PAIR_COLUMNS, 128);
        _tile_loadd(7, w + i * PAIR_COLUMNS + 64, 128);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        if (second) {
            _tile_loadd(5, x + TILE_SIDE * stride + i, stride);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + LANES, 128);
    if (second) {
        _tile_stored(2, sums + TILE_SIDE * PAIR_COLUMNS, 128);
        _tile_stored(3, sums + TILE_SIDE * PAIR_COLUMNS + LANES, 128);
    }
}

/* Rows of a tile where n are to be multiplied. */
INLINE int64_t tile_rows(int64_t n) { return tiles_allowed && n >= AMX_MIN_ROWS ? AMX_ROWS : MAX_BYTE_ROWS; }

/* A thread that has no tiles in use is switched faster. */
INLINE void amx_done(void) {
    if (tiles_allowed) _tile_release();
}
#else
INLINE int64_t tile_rows(int64_t n) { return MAX_BYTE_ROWS; }
INLINE void amx_done(void) {}
INLINE void amx_sums(int64_t rows, const char *x, int64_t stride, const uint8_t *w, int64_t k, int32_t *sums) {}
#endif
