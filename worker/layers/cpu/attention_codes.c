/* Attention to K and V that are codes of a byte: a file of its own, since it takes a compiler as long as attention.c does. */
#include "attention_base.h"
#include "codes.h"

#define NAME(x) x##_f32
#include "attention_f32.h" /* for its tiles; what else is in there is not called, so not compiled */

#include "attention_codes_tiles.h"
#define CODES 1
#define NAME(x) x##_f32_codes
#include "attention_f32.h"
#define CODES 1
#define NAME(x) x##_bf16_codes
#include "attention_bf16.h"

void attend_codes_team_f32(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier) {
    run_team_f32_codes(layer, rows, call, barrier);
}
void attend_codes_team_bf16(const LayerArgs *layer, const RowArgs *rows, const CallArgs *call, Barrier *barrier) {
    run_team_bf16_codes(layer, rows, call, barrier);
}
