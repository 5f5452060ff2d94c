/* What threads of one parallel region share.
 *
 * The barrier spins for a moment and then sleeps. OpenMP's own spins for milliseconds, which is harmless on idle cores,
 * but when another process holds the core of a late thread it burns the very time that thread waits for: a step took
 * 30 times as long. Spinning not at all costs a wake-up of some microseconds at each of the 7 barriers of a layer.
 */
#ifndef DEPTHBATCH_TEAM_H
#define DEPTHBATCH_TEAM_H

#include <sched.h>
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define BARRIER_SPINS 2000 /* some 20 us on Zen 4, 80 us on recent Intel cores */

/* Zeroed before the region starts. */
typedef struct {
    int32_t arrived, phase, sleepers;
} Barrier;

/* Threads of the parallel region we are in. */
static inline int team_size(void) {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

/* Neighbouring work items a thread takes at a time: a few times per thread, so that one that is held up does not hold
 * up the others. */
static inline int64_t task_share(int64_t items) {
    const int64_t share = items / (4 * team_size());
    return share < 1 ? 1 : share > 8 ? 8 : share;
}

static inline void wait_for_phase(Barrier *barrier, int32_t phase) {
    for (int i = 0; i < BARRIER_SPINS; i++) {
        if (__atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE) != phase) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    __atomic_fetch_add(&barrier->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&barrier->phase, __ATOMIC_SEQ_CST) == phase) {
#ifdef __linux__
        syscall(SYS_futex, &barrier->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0); /* returns if phase has moved */
#else
        sched_yield();
#endif
    }
    __atomic_fetch_sub(&barrier->sleepers, 1, __ATOMIC_SEQ_CST);
}

/* Returns when every thread of the team has called it. */
static inline void team_barrier(Barrier *barrier) {
    const int threads = team_size();
    if (threads == 1) return;
    const int32_t phase = __atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) < threads) {
        wait_for_phase(barrier, phase);
        return;
    }
    __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&barrier->phase, phase + 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(&barrier->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &barrier->phase, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
}

#endif
