/* Vectors of 32-bit lanes, under one set of names for each instruction set.
 *
 * Always true:
 * - a lane holds what scalar code computes: nothing is reassociated, and a product is fused with a sum only by `f_fma`
 * - loads and stores need no alignment
 *
 * The including file defines one of WITH_AVX512, WITH_AVX2, WITH_NEON, or none for plain C. W is the number of lanes.
 */

#include "kernels.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(WITH_AVX512) || defined(WITH_AVX2)
#include <immintrin.h>
#elif defined(WITH_NEON)
#include <arm_neon.h>
#endif

/* A vector that is used several times is read once, and not as an operand of each instruction. */
#if defined(__x86_64__)
#define KEEP(vector) __asm__("" : "+v"(vector))
#else
#define KEEP(vector) (void)(vector)
#endif

#define INLINE static inline __attribute__((always_inline))

typedef struct {
  float numbers[16];
} table16;

/* Scalars */

INLINE float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

INLINE uint16_t u16_at(const void *place) {
  uint16_t bits;
  memcpy(&bits, place, 2);
  return bits;
}

INLINE uint32_t u32_at(const void *place) {
  uint32_t bits;
  memcpy(&bits, place, 4);
  return bits;
}

/* IEEE 754 binary16, in integer arithmetic: exact, whatever the processor's modes for subnormal numbers are. */
INLINE float half_to_float(uint16_t half) {
#if defined(WITH_AVX512) || defined(WITH_AVX2)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#else
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x0400) return bits_to_float(sign | ((magnitude << 13) + 0x38000000));
  float value = (float)magnitude * 0x1p-24f;
  return sign ? -value : value;
#endif
}

INLINE float half_at(const void *place) { return half_to_float(u16_at(place)); }

INLINE uint16_t float_to_bfloat16(float value) {
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Rounds to the nearest, ties to even. */
INLINE uint16_t float_to_half(float value) {
  uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) {
    float shifted = bits_to_float(bits) + 0.5f; /* the unit of its last place is that of subnormal halves */
    return (uint16_t)(sign | (float_to_bits(shifted) - 0x3f000000));
  }
  return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

/* One number, in a dtype. */
INLINE void put_number(void *to, int64_t place, int dtype, float value) {
  uint16_t bits = dtype == FLOAT16 ? float_to_half(value) : float_to_bfloat16(value);
  if (dtype == FLOAT32)
    memcpy((float *)to + place, &value, 4);
  else
    memcpy((uint16_t *)to + place, &bits, 2);
}

/* Vectors */

#if defined(WITH_AVX512)

#define W 16
typedef __m512 vf;
typedef __m512i vi;
typedef __m512 vt;
INLINE vf f_zero(void) { return _mm512_setzero_ps(); }
INLINE vf f_set(float value) { return _mm512_set1_ps(value); }
INLINE vf f_load(const float *from) { return _mm512_loadu_ps(from); }
INLINE vf f_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf f_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf f_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf f_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf f_of(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vf f_bits(vi a) { return _mm512_castsi512_ps(a); }
INLINE vi i_bits(vf a) { return _mm512_castps_si512(a); }
INLINE vi i_u8(const void *from) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(from)); }
INLINE vi i_s8(const void *from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(from)); }
INLINE vi i_u16(const void *from) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(from)); }
INLINE vi i_set(int value) { return _mm512_set1_epi32(value); }
INLINE vi i_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi i_or(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi i_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi i_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE vi i_shl(vi a, int by) { return _mm512_slli_epi32(a, by); }
INLINE vi i_shr(vi a, int by) { return _mm512_srli_epi32(a, by); }
INLINE vi i_shrv(vi a, vi by) { return _mm512_srlv_epi32(a, by); }
INLINE vi i_words(const void *from) { return _mm512_loadu_si512(from); }
/* Each of W / 8 words, in eight lanes. */
INLINE vi i_in_eights(const uint8_t *from) {
  const vi first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  return _mm512_permutexvar_epi32(first, _mm512_castsi128_si512(_mm_loadl_epi64((const void *)from)));
}
INLINE vi i_gt(vi a, int limit) {
  return _mm512_maskz_set1_epi32(_mm512_cmpgt_epi32_mask(a, _mm512_set1_epi32(limit)), -1);
}
/* Lane n is bit `first` + n. */
INLINE vi i_bit(uint32_t bits, int first) { return _mm512_maskz_set1_epi32((__mmask16)(bits >> first), 1); }
INLINE vf f_from_halves(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(from)); }
/* Small floats, whose bits are moved to those of a half: e4m3, divided by 256 and without NaN; and e5m2. */
INLINE vf f_of_e4m3(const uint8_t *from) {
  __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from)), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16((short)0xbfff))); /* the sign is there twice */
}
INLINE vf f_of_e5m2(const uint8_t *from) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)from)), 8));
}
/* 32 numbers in turn from two vectors. */
INLINE void f_zip(vf even, vf odd, vf out[2]) {
  const vi first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  out[0] = _mm512_permutex2var_ps(even, first, odd);
  out[1] = _mm512_permutex2var_ps(even, i_add(first, i_set(8)), odd);
}
INLINE vt t_load(const float *from) { return _mm512_loadu_ps(from); }
INLINE vt t_times(vt table, float factor) { return _mm512_mul_ps(table, _mm512_set1_ps(factor)); }
INLINE vt t_plus(vt table, float more) { return _mm512_add_ps(table, _mm512_set1_ps(more)); }
/* Lane by lane, the number whose index is in the four lowest bits. */
INLINE vf t_pick(vt table, vi index) { return _mm512_permutexvar_ps(index, table); }
INLINE float f_sum(vf a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
INLINE void store_f32(void *to, vf a) { _mm512_storeu_ps(to, a); }
INLINE void store_f16(void *to, vf a) { _mm256_storeu_si256(to, _mm512_cvtps_ph(a, 0)); }
INLINE void store_bf16(void *to, vf a) {
  vi bits = i_bits(a), odd = i_and(i_shr(bits, 16), i_set(1));
  vi rounded = i_shr(i_add(bits, i_add(odd, i_set(0x7fff))), 16);
  rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), rounded, i_set(0x7fc0));
  _mm256_storeu_si256(to, _mm512_cvtepi32_epi16(rounded));
}

#elif defined(WITH_AVX2)

#define W 8
typedef __m256 vf;
typedef __m256i vi;
typedef struct {
  __m256 low, high;
} vt;
INLINE vf f_zero(void) { return _mm256_setzero_ps(); }
INLINE vf f_set(float value) { return _mm256_set1_ps(value); }
INLINE vf f_load(const float *from) { return _mm256_loadu_ps(from); }
INLINE vf f_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf f_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf f_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf f_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf f_of(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vf f_bits(vi a) { return _mm256_castsi256_ps(a); }
INLINE vi i_bits(vf a) { return _mm256_castps_si256(a); }
INLINE vi i_u8(const void *from) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(from)); }
INLINE vi i_s8(const void *from) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(from)); }
INLINE vi i_u16(const void *from) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(from)); }
INLINE vi i_set(int value) { return _mm256_set1_epi32(value); }
INLINE vi i_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi i_or(vi a, vi b) { return _mm256_or_si256(a, b); }
INLINE vi i_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi i_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
INLINE vi i_shl(vi a, int by) { return _mm256_slli_epi32(a, by); }
INLINE vi i_shr(vi a, int by) { return _mm256_srli_epi32(a, by); }
INLINE vi i_shrv(vi a, vi by) { return _mm256_srlv_epi32(a, by); }
INLINE vi i_words(const void *from) { return _mm256_loadu_si256(from); }
INLINE vi i_in_eights(const uint8_t *from) { return _mm256_set1_epi32((int)u32_at(from)); }
INLINE vi i_gt(vi a, int limit) { return _mm256_cmpgt_epi32(a, _mm256_set1_epi32(limit)); }
INLINE vi i_bit(uint32_t bits, int first) {
  const vi lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return i_and(_mm256_srlv_epi32(i_set((int)(bits >> first)), lanes), i_set(1));
}
INLINE vf f_from_halves(const void *from) { return _mm256_cvtph_ps(_mm_loadu_si128(from)); }
INLINE vf f_of_e4m3(const uint8_t *from) {
  __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)from)), 7);
  return _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16((short)0xbfff)));
}
INLINE vf f_of_e5m2(const uint8_t *from) {
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)from)), 8));
}
INLINE void f_zip(vf even, vf odd, vf out[2]) {
  vf low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  out[0] = _mm256_permute2f128_ps(low, high, 0x20);
  out[1] = _mm256_permute2f128_ps(low, high, 0x31);
}
INLINE vt t_load(const float *from) { return (vt){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE vt t_times(vt table, float factor) {
  __m256 by = _mm256_set1_ps(factor);
  return (vt){_mm256_mul_ps(table.low, by), _mm256_mul_ps(table.high, by)};
}
INLINE vt t_plus(vt table, float more) {
  __m256 by = _mm256_set1_ps(more);
  return (vt){_mm256_add_ps(table.low, by), _mm256_add_ps(table.high, by)};
}
INLINE vf t_pick(vt table, vi index) {
  vf low = _mm256_permutevar8x32_ps(table.low, index), high = _mm256_permutevar8x32_ps(table.high, index);
  return _mm256_blendv_ps(low, high, f_bits(i_shl(index, 28)));
}
INLINE float f_sum(vf b) {
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
INLINE void store_f32(void *to, vf a) { _mm256_storeu_ps(to, a); }
INLINE void store_f16(void *to, vf a) { _mm_storeu_si128(to, _mm256_cvtps_ph(a, 0)); }
INLINE void store_bf16(void *to, vf a) {
  vi bits = i_bits(a), odd = i_and(i_shr(bits, 16), i_set(1));
  vi rounded = i_shr(i_add(bits, i_add(odd, i_set(0x7fff))), 16);
  vf unordered = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  rounded = i_bits(_mm256_blendv_ps(f_bits(rounded), f_bits(i_set(0x7fc0)), unordered));
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(to, _mm256_castsi256_si128(packed));
}

#elif defined(WITH_NEON)

#define W 4
typedef float32x4_t vf;
typedef int32x4_t vi;
typedef struct {
  uint8x16x4_t bytes;
} vt;
INLINE vf f_zero(void) { return vdupq_n_f32(0); }
INLINE vf f_set(float value) { return vdupq_n_f32(value); }
INLINE vf f_load(const float *from) { return vld1q_f32(from); }
INLINE vf f_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf f_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf f_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf f_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE vf f_of(vi a) { return vcvtq_f32_s32(a); }
INLINE vf f_bits(vi a) { return vreinterpretq_f32_s32(a); }
INLINE vi i_bits(vf a) { return vreinterpretq_s32_f32(a); }
INLINE vi i_u8(const void *from) {
  uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(u32_at(from))));
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
}
INLINE vi i_s8(const void *from) {
  int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(u32_at(from))));
  return vmovl_s16(vget_low_s16(wide));
}
INLINE vi i_u16(const void *from) {
  uint16x4_t halves;
  memcpy(&halves, from, 8);
  return vreinterpretq_s32_u32(vmovl_u16(halves));
}
INLINE vi i_set(int value) { return vdupq_n_s32(value); }
INLINE vi i_and(vi a, vi b) { return vandq_s32(a, b); }
INLINE vi i_or(vi a, vi b) { return vorrq_s32(a, b); }
INLINE vi i_add(vi a, vi b) { return vaddq_s32(a, b); }
INLINE vi i_sub(vi a, vi b) { return vsubq_s32(a, b); }
INLINE vi i_shl(vi a, int by) { return vshlq_s32(a, vdupq_n_s32(by)); }
INLINE vi i_shr(vi a, int by) {
  return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-by)));
}
INLINE vi i_shrv(vi a, vi by) {
  return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vnegq_s32(by)));
}
INLINE vi i_words(const void *from) { return vld1q_s32(from); }
INLINE vi i_in_eights(const uint8_t *from) { return vdupq_n_s32((int)u32_at(from)); }
INLINE vi i_gt(vi a, int limit) { return vreinterpretq_s32_u32(vcgtq_s32(a, vdupq_n_s32(limit))); }
INLINE vi i_bit(uint32_t bits, int first) {
  const int32x4_t lanes = {0, -1, -2, -3};
  return i_and(vreinterpretq_s32_u32(vshlq_u32(vdupq_n_u32(bits >> first), lanes)), i_set(1));
}
INLINE vf f_from_halves(const void *from) {
  float16x4_t halves;
  memcpy(&halves, from, 8);
  return vcvt_f32_f16(halves);
}
INLINE vf f_of_e4m3(const uint8_t *from) {
  vi byte = i_u8(from), moved = i_shl(i_and(byte, i_set(0x7f)), 7);
  uint16x4_t half = vmovn_u32(vreinterpretq_u32_s32(i_or(i_shl(i_and(byte, i_set(0x80)), 8), moved)));
  return vcvt_f32_f16(vreinterpret_f16_u16(half));
}
INLINE vf f_of_e5m2(const uint8_t *from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(vreinterpretq_u32_s32(i_shl(i_u8(from), 8)))));
}
INLINE void f_zip(vf even, vf odd, vf out[2]) {
  out[0] = vzip1q_f32(even, odd);
  out[1] = vzip2q_f32(even, odd);
}
INLINE vt t_load(const float *from) {
  vt table;
  for (int number = 0; number < 4; number++) table.bytes.val[number] = vreinterpretq_u8_f32(vld1q_f32(from + 4 * number));
  return table;
}
INLINE vt t_times(vt table, float factor) {
  for (int number = 0; number < 4; number++)
    table.bytes.val[number] = vreinterpretq_u8_f32(vmulq_n_f32(vreinterpretq_f32_u8(table.bytes.val[number]), factor));
  return table;
}
INLINE vt t_plus(vt table, float more) {
  for (int number = 0; number < 4; number++)
    table.bytes.val[number] =
        vreinterpretq_u8_f32(vaddq_f32(vreinterpretq_f32_u8(table.bytes.val[number]), vdupq_n_f32(more)));
  return table;
}
INLINE vf t_pick(vt table, vi index) {
  uint32x4_t first = vshlq_n_u32(vandq_u32(vreinterpretq_u32_s32(index), vdupq_n_u32(15)), 2);
  uint32x4_t places = vaddq_u32(vmulq_n_u32(first, 0x01010101), vdupq_n_u32(0x03020100));
  return vreinterpretq_f32_u8(vqtbl4q_u8(table.bytes, vreinterpretq_u8_u32(places)));
}
INLINE float f_sum(vf a) { return vaddvq_f32(a); }
INLINE void store_f32(void *to, vf a) { vst1q_f32(to, a); }
INLINE void store_f16(void *to, vf a) {
  float16x4_t halves = vcvt_f16_f32(a);
  memcpy(to, &halves, 8);
}
INLINE void store_bf16(void *to, vf a) {
  vi bits = i_bits(a), odd = i_and(i_shr(bits, 16), i_set(1));
  vi rounded = i_shr(i_add(bits, i_add(odd, i_set(0x7fff))), 16);
  rounded = vbslq_s32(vceqq_f32(a, a), rounded, i_set(0x7fc0));
  uint16x4_t narrow = vmovn_u32(vreinterpretq_u32_s32(rounded));
  memcpy(to, &narrow, 8);
}

#else

#define W 1
typedef float vf;
typedef int32_t vi;
typedef table16 vt;
INLINE vf f_zero(void) { return 0; }
INLINE vf f_set(float value) { return value; }
INLINE vf f_load(const float *from) { return bits_to_float(u32_at(from)); }
INLINE vf f_add(vf a, vf b) { return a + b; }
INLINE vf f_sub(vf a, vf b) { return a - b; }
INLINE vf f_mul(vf a, vf b) { return a * b; }
INLINE vf f_fma(vf a, vf b, vf c) { return fmaf(a, b, c); }
INLINE vf f_of(vi a) { return (float)a; }
INLINE vf f_bits(vi a) { return bits_to_float((uint32_t)a); }
INLINE vi i_bits(vf a) { return (int32_t)float_to_bits(a); }
INLINE vi i_u8(const void *from) { return *(const uint8_t *)from; }
INLINE vi i_s8(const void *from) { return *(const int8_t *)from; }
INLINE vi i_u16(const void *from) { return u16_at(from); }
INLINE vi i_set(int value) { return value; }
INLINE vi i_and(vi a, vi b) { return a & b; }
INLINE vi i_or(vi a, vi b) { return a | b; }
INLINE vi i_add(vi a, vi b) { return a + b; }
INLINE vi i_sub(vi a, vi b) { return a - b; }
INLINE vi i_shl(vi a, int by) { return (vi)((uint32_t)a << by); }
INLINE vi i_shr(vi a, int by) { return (vi)((uint32_t)a >> by); }
INLINE vi i_shrv(vi a, vi by) { return i_shr(a, by); }
INLINE vi i_words(const void *from) { return (vi)u32_at(from); }
INLINE vi i_in_eights(const uint8_t *from) { return (vi)u32_at(from); }
INLINE vi i_gt(vi a, int limit) { return -(a > limit); }
INLINE vi i_bit(uint32_t bits, int first) { return bits >> first & 1; }
INLINE vf f_from_halves(const void *from) { return half_at(from); }
INLINE vf f_of_e4m3(const uint8_t *from) {
  return half_to_float((uint16_t)((*from & 0x80) << 8 | (*from & 0x7f) << 7));
}
INLINE vf f_of_e5m2(const uint8_t *from) { return half_to_float((uint16_t)(*from << 8)); }
INLINE void f_zip(vf even, vf odd, vf out[2]) {
  out[0] = even;
  out[1] = odd;
}
INLINE vt t_load(const float *from) {
  vt table;
  memcpy(&table, from, sizeof table);
  return table;
}
INLINE vt t_times(vt table, float factor) {
  for (int number = 0; number < 16; number++) table.numbers[number] *= factor;
  return table;
}
INLINE vt t_plus(vt table, float more) {
  for (int number = 0; number < 16; number++) table.numbers[number] += more;
  return table;
}
INLINE vf t_pick(vt table, vi index) { return table.numbers[index & 15]; }
INLINE float f_sum(vf a) { return a; }
INLINE void store_f32(void *to, vf a) { memcpy(to, &a, 4); }
INLINE void store_f16(void *to, vf a) {
  uint16_t bits = float_to_half(a);
  memcpy(to, &bits, 2);
}
INLINE void store_bf16(void *to, vf a) {
  uint16_t bits = float_to_bfloat16(a);
  memcpy(to, &bits, 2);
}

#endif

/* Whether one of 32 small floats, e4m3, is NaN. */
INLINE int has_nan_e4m3(const uint8_t *bytes) {
#if defined(WITH_AVX512) || defined(WITH_AVX2)
  __m256i magnitudes = _mm256_and_si256(_mm256_loadu_si256((const void *)bytes), _mm256_set1_epi8(0x7f));
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(magnitudes, _mm256_set1_epi8(0x7f))) != 0;
#else
  int found = 0;
  for (int n = 0; n < 32; n++) found |= (bytes[n] & 0x7f) == 0x7f;
  return found;
#endif
}

/* Vectors of a group of 32 numbers. */
#define NV (32 / W)
