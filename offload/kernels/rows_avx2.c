/* Rows with avx2. */

#if defined(__x86_64__)
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define WITH_AVX2
#define NAME(x) x##_avx2
#include "rows.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
