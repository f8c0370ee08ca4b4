/* Rows with avx2. */

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define WITH_AVX2
#define NAME(x) x##_avx2
#include "rows.h"
#endif
