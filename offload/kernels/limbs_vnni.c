/* Products of blocks with avx512vnni: beside the rows of avx512, for processors that also multiply pairs. */

#if defined(__x86_64__)
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni,avx2,fma,f16c")
#endif
#define WITH_AVX512
#define WITH_VNNI
#define NAME(x) x##_vnni
#include "simd.h"
#include "limbs.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
