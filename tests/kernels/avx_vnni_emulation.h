/* The AVX-VNNI instruction that int8.c uses, in plain C: put before it to run that way without such a processor. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd

static inline __m256i emulated_dpbusd(__m256i sums, __m256i weights, __m256i x) {
    int32_t sum[8];
    uint8_t w[32];
    int8_t signed_bytes[32];
    memcpy(sum, &sums, 32);
    memcpy(w, &weights, 32);
    memcpy(signed_bytes, &x, 32);
    for (int i = 0; i < 32; i++) sum[i / 4] += w[i] * signed_bytes[i];
    memcpy(&sums, sum, 32);
    return sums;
}
