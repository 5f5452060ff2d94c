/* Row-wise operators: norms, silu-mul, rotary embedding. A row never depends on its neighbours.
 *
 * Intermediate results are rounded to the element type where the plain operators of ops.py round.
 */

#include "small.h"

#define PARALLEL_MIN_ELEMENTS 32768 /* about 5 us of one core: below, waking a second thread costs more */

#define T float
#define NAME(x) x##_f32
#define LOAD load_g
#define STORE store_g
#define VROUND round_g_f32
#define ROUND scalar_round_f32
#define GET scalar_get_f32
#define PUT scalar_put_f32
#include "small_impl.h"

#define T bf16
#define NAME(x) x##_bf16
#define LOAD load_g_bf16
#define STORE store_g_bf16
#define VROUND round_g_bf16
#define ROUND scalar_round_bf16
#define GET scalar_get_bf16
#define PUT scalar_put_bf16
#include "small_impl.h"
