/* What the machine can do at most, which kernels are measured against: bytes read and multiply-adds of a type, by all threads. */
#include "vec.h"

/* Reads `bytes` (a multiple of 4096); the result only keeps the compiler from leaving it out. */
EXPORT int64_t db_read(const char *from, int64_t bytes) {
    int64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (int64_t page = 0; page < bytes / 4096; page++) {
        const char *at = from + page * 4096;
        vi a = {0}, b = {0};
        for (int i = 0; i < 4096; i += 128) {
            vi x, y;
            memcpy(&x, at + i, 64);
            memcpy(&y, at + i + 64, 64);
            a ^= x;
            b ^= y;
        }
        sum += (a ^ b)[0];
    }
    return sum;
}

#define ALL_ROUNDS \
    for (int64_t i = 0; i < rounds; i++) { STEP(a0) STEP(a1) STEP(a2) STEP(a3) STEP(a4) STEP(a5) STEP(a6) STEP(a7) }

enum { MULTIPLY_FP32 = 0, MULTIPLY_BF16 = 1, MULTIPLY_INT8 = 2 };

/* Multiply-adds in registers, `rounds` on each of eight vectors, two operations each; returns how many operations. A kind
 * that the processor has no vector instruction for is measured in fp32. */
EXPORT int64_t db_multiply(int64_t rounds, int32_t kind, float *result) {
    int64_t operations = 0;
    float total = 0;
#pragma omp parallel reduction(+ : operations, total)
    {
        /* unequal, or the compiler would keep one */
        vf a0 = splat(1), a1 = a0 * 2, a2 = a0 * 3, a3 = a0 * 4, a4 = a0 * 5, a5 = a0 * 6, a6 = a0 * 7, a7 = a0 * 8;
        const vf w = splat(1e-30f);
#ifdef __AVX512BF16__
        if (kind == MULTIPLY_BF16) {
#define STEP(a) a = (vf)_mm512_dpbf16_ps((__m512)a, (__m512bh)w, (__m512bh)w); __asm__ volatile("" : "+v"(a));
            ALL_ROUNDS
#undef STEP
            operations += rounds * 8 * 64;
        } else
#endif
#ifdef __AVX512VNNI__
        if (kind == MULTIPLY_INT8) {
#define STEP(a) a = (vf)_mm512_dpbusd_epi32((__m512i)a, (__m512i)w, (__m512i)w); __asm__ volatile("" : "+v"(a));
            ALL_ROUNDS
#undef STEP
            operations += rounds * 8 * 128;
        } else
#endif
        {
#define STEP(a) a = a * w + w;
            ALL_ROUNDS
#undef STEP
            operations += rounds * 8 * 32;
        }
        total += hsum(a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7);
    }
    *result = total;
    return operations;
}
