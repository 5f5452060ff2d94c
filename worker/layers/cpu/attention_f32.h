/* attention_impl.h for queries in fp32. */
#define T float
#define LOAD load_g
#define STORE store_g
#define ROUND scalar_round_f32
#define GET scalar_get_f32
#define PUT scalar_put_f32
#define PARTS 1
#define OPERAND(words, part) ((vg)(words))
#define WORDS(low, high) ((vgu)(low))
#define OPERAND_256(words, part) _mm256_castsi256_ps(words)
#include "attention_impl.h"
