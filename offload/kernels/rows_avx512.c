/* Rows with avx512; products of pairs, in functions of their own, with avx512bf16. */

#if defined(__x86_64__)
#include <immintrin.h>
#ifdef __clang__ /* which knows no inner regions; nothing but what asks for it uses avx512bf16 */
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define WITH_AVX512
#define NAME(x) x##_avx512
#include "rows.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
