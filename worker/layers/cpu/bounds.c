/* What the machine can do at most, which kernels are measured against: bytes read and multiply-adds of a type, by all threads. */
#include "gemm.h"

/* Reads `bytes` (a multiple of 4096); the result only keeps the compiler from leaving it out. */
EXPORT int64_t db_read(const char *from, int64_t bytes) {
    int64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (int64_t page = 0; page < bytes / 4096; page++) {
        const char *at = from + page * 4096;
        vgu words[4] = {0}; /* registers, not longer vectors: those would be held up by the stack rather than by memory */
        for (int i = 0; i < 4096; i += sizeof(words))
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) words[r] ^= load_words(at + i + r * sizeof(vgu));
        sum += (words[0] ^ words[1] ^ words[2] ^ words[3])[0];
    }
    return sum;
}

#define CHAINS 12 /* enough to hide what one step takes, few enough for registers */
#define EVERY_STEP(step, per_lane) \
    for (int64_t i = 0; i < rounds; i++) { \
        _Pragma("GCC unroll 12") for (int c = 0; c < CHAINS; c++) chain[c] = step; \
    } \
    operations += rounds * CHAINS * GEMM_LANES * (per_lane);

enum { MULTIPLY_FP32 = 0, MULTIPLY_BF16 = 1, MULTIPLY_INT8 = 2 };

/* Multiply-adds in registers, `rounds` on each of twelve, two operations each; returns how many operations. A kind that the
 * processor has no vector instruction for is measured in fp32. */
EXPORT int64_t db_multiply(int64_t rounds, int32_t kind, float *result) {
    typedef float Register __attribute__((vector_size(4 * GEMM_LANES)));
    int64_t operations = 0;
    float total = 0;
#pragma omp parallel reduction(+ : operations, total)
    {
        const Register w = 1e-30f - (Register){0};
        Register chain[CHAINS];
        for (int c = 0; c < CHAINS; c++) chain[c] = w * (float)c; /* unequal, or the compiler would keep one */
#ifdef __AVX512BF16__
        if (kind == MULTIPLY_BF16) {
            EVERY_STEP((Register)_mm512_dpbf16_ps((__m512)chain[c], (__m512bh)w, (__m512bh)w), 4)
        } else
#endif
#if defined(__AVX512VNNI__)
        if (kind == MULTIPLY_INT8) {
            EVERY_STEP((Register)_mm512_dpbusd_epi32((__m512i)chain[c], (__m512i)w, (__m512i)w), 8)
        } else
#elif defined(__AVXVNNI__)
        if (kind == MULTIPLY_INT8) {
            EVERY_STEP((Register)_mm256_dpbusd_avx_epi32((__m256i)chain[c], (__m256i)w, (__m256i)w), 8)
        } else
#elif defined(__AVX2__) && GEMM_LANES == 8
        if (kind == MULTIPLY_INT8) { /* 16 bits, as int8.c does */
            __m256i sums[CHAINS] = {0}, x = (__m256i)w;
            for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
                for (int c = 0; c < CHAINS; c++) {
                    __asm__ volatile("" : "+x"(x)); /* else all would be one product */
                    sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(x, x));
                    __asm__ volatile("" : "+x"(sums[c])); /* one by one: twelve at once do not fit in registers */
                }
            }
#pragma GCC unroll 12
            for (int c = 0; c < CHAINS; c++) chain[c] += (Register)sums[c];
            operations += rounds * CHAINS * 8 * 4;
        } else
#endif
        {
            EVERY_STEP(chain[c] * w + w, 2)
        }
        for (int c = 1; c < CHAINS; c++) chain[0] += chain[c];
        for (int lane = 0; lane < GEMM_LANES; lane++) total += chain[0][lane];
    }
    *result = total;
    return operations;
}
