/* Rows with avx512. */

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define WITH_AVX512
#define NAME(x) x##_avx512
#include "rows.h"
#endif
