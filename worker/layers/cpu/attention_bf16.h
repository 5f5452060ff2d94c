/* attention_impl.h for queries in bf16. */
#define T bf16
#define LOAD load_g_bf16
#define STORE store_g_bf16
#define ROUND scalar_round_bf16
#define GET scalar_get_bf16
#define PUT scalar_put_bf16
#if defined(__AVX512BF16__) && !defined(CODES)
#define DOT_BF16 1
#endif
#define PARTS 2 /* of a word: its first, then its second bf16 */
#define OPERAND(words, part) ((vg)((part) ? (words) & 0xffff0000u : (words) << 16))
#define OPERAND_256(words, part) \
    _mm256_castsi256_ps((part) ? _mm256_and_si256(words, _mm256_set1_epi32(0xffff0000)) : _mm256_slli_epi32(words, 16))
#define WORDS(low, high) (rounded_words(low) >> 16 | (rounded_words(high) & 0xffff0000u))
#include "attention_impl.h"
