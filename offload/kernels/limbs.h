/* Products with GGUF blocks in integers: activations as fixed-point numbers, of one or two limbs of 16 bits.
 *
 * Always true:
 * - within 32 columns a product is exact, but for the last bits of the activations, see `prepare_limbs`: eight sums of
 *   four columns each are integers, which are rounded to float32 as a whole and then multiplied by the factors
 * - all instruction sets give the same bits: integers are exact, and sums of floats are in one order, of fused products
 * - an element of the result depends on its row of x and its packed row alone
 *
 * A chunk is 256 columns: a block, or eight. `codes_KIND(block, group)` gives 32 integers, those of even columns apart from
 * those of odd ones; `factors_KIND(blocks, count, f)` the factors of a chunk: a number is f.by * code + f.more.
 * Integers that are not negative are centred first, so that what is added stays small beside the number.
 */

#ifndef __clang__
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions alone */
#endif

#if defined(__x86_64__)
#define IN_MEMORY(place) __asm__("" : "+m"(*(float(*)[16])(place)))
#else
#define IN_MEMORY(place) (void)(place)
#endif

typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int16_t s16x16 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int32_t s32x8 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));

typedef struct {
  s16x16 even, odd;
} codes;

typedef struct {
  f32x8 by[2], more[2]; /* of 32 numbers each, or, in two vectors, of 16 */
} factors;

/* Vectors */

INLINE f32x8 load_8(const float *from) {
  f32x8 found;
  memcpy(&found, from, sizeof found);
  return found;
}

INLINE u8x32 load_bytes(const uint8_t *from) {
  u8x32 found;
  memcpy(&found, from, sizeof found);
  return found;
}

INLINE f32x8 set_8(float value) { return (f32x8){value, value, value, value, value, value, value, value}; }

#if defined(WITH_AVX512) || defined(WITH_AVX2)

INLINE f32x8 fma_8(f32x8 a, f32x8 b, f32x8 c) { return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE u8x32 twice(const uint8_t *from) {
  return (u8x32)_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)from));
}
INLINE u8x32 picked(const int8_t table[16], u8x32 index) {
  return (u8x32)_mm256_shuffle_epi8((__m256i)twice((const uint8_t *)table), (__m256i)index);
}
/* Each bit as a byte: 0 or 255. */
INLINE u8x32 bytes_of_bits(uint32_t bits) {
  const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
  __m256i found = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte), bit);
  return (u8x32)_mm256_cmpeq_epi8(found, bit);
}
INLINE f32x8 floats_of_unsigned(const uint8_t *from) {
  return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from)));
}
INLINE f32x8 floats_of_signed(const uint8_t *from) {
  return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)));
}
INLINE f32x8 floats_of_halves(const uint16_t from[8]) {
  return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
}

#else

INLINE f32x8 fma_8(f32x8 a, f32x8 b, f32x8 c) {
#if defined(WITH_NEON)
  float some[3][8], found[8];
  memcpy(some[0], &a, 32), memcpy(some[1], &b, 32), memcpy(some[2], &c, 32);
  for (int n = 0; n < 8; n += W)
    store_f32(found + n, f_fma(f_load(some[0] + n), f_load(some[1] + n), f_load(some[2] + n)));
  return load_8(found);
#else
  for (int n = 0; n < 8; n++) c[n] = fmaf(a[n], b[n], c[n]);
  return c;
#endif
}
INLINE u8x32 twice(const uint8_t *from) {
  u8x32 found;
  memcpy(&found, from, 16);
  memcpy((char *)&found + 16, from, 16);
  return found;
}
INLINE u8x32 picked(const int8_t table[16], u8x32 index) {
  for (int n = 0; n < 32; n++) index[n] = (uint8_t)table[index[n]];
  return index;
}
INLINE u8x32 bytes_of_bits(uint32_t bits) {
  u8x32 found;
  for (int n = 0; n < 32; n++) found[n] = (uint8_t) - (bits >> n & 1);
  return found;
}
INLINE f32x8 floats_of_unsigned(const uint8_t *from) {
  f32x8 found;
  for (int n = 0; n < 8; n++) found[n] = (float)from[n];
  return found;
}
INLINE f32x8 floats_of_signed(const uint8_t *from) {
  f32x8 found;
  for (int n = 0; n < 8; n++) found[n] = (float)(int8_t)from[n];
  return found;
}
INLINE f32x8 floats_of_halves(const uint16_t from[8]) {
  f32x8 found;
  for (int n = 0; n < 8; n++) found[n] = half_to_float(from[n]);
  return found;
}

#endif

/* Lanes of one group of 32 numbers at a time, or of two. */

#if defined(WITH_AVX512)

#define GROUPS 2
typedef __m512i vl;
typedef __m512 vs;
INLINE vl l_load(const int16_t *from) { return _mm512_loadu_si512(from); }
INLINE vl l_join(s16x16 first, s16x16 second) {
  return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)first), (__m256i)second, 1);
}
/* Sums of four products, of even columns and odd ones. */
INLINE vs l_dot(vl even, vl odd, const int16_t *x) {
  __m512i sums = _mm512_add_epi32(_mm512_madd_epi16(even, l_load(x)), _mm512_madd_epi16(odd, l_load(x + 32)));
  return _mm512_cvtepi32_ps(sums);
}
INLINE vs s_fma(vs a, vs b, vs c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vs s_set(float value) { return _mm512_set1_ps(value); }
INLINE vs s_of_32(const float *factors) {
  return _mm512_mask_broadcastss_ps(_mm512_set1_ps(factors[0]), 0xff00, _mm_load_ss(factors + 1));
}
INLINE vs s_of_16(const float *factors) {
  const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(factors)), first);
}
INLINE f32x8 s_added(const vs sums[1]) {
  return (f32x8)_mm512_castps512_ps256(sums[0]) + (f32x8)_mm512_extractf32x8_ps(sums[0], 1);
}

#else

#define GROUPS 1
typedef s16x16 vl;
typedef f32x8 vs;
INLINE vl l_load(const int16_t *from) {
  vl found;
  memcpy(&found, from, sizeof found);
  return found;
}
#if defined(WITH_AVX2)
INLINE s32x8 l_pairs(vl a, vl b) { return (s32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE vs s_of_16(const float *factors) {
  double both;
  memcpy(&both, factors, 8);
  const __m256i first = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  return (vs)_mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(both)), first);
}
#else
#if defined(WITH_NEON)
INLINE s32x8 l_pairs(vl a, vl b) {
  int16_t some[2][16];
  int32_t found[8];
  s32x8 whole;
  memcpy(some[0], &a, 32), memcpy(some[1], &b, 32);
  for (int n = 0; n < 2; n++) {
    int16x8_t left = vld1q_s16(some[0] + 8 * n), right = vld1q_s16(some[1] + 8 * n);
    int32x4_t low = vmull_s16(vget_low_s16(left), vget_low_s16(right)), high = vmull_high_s16(left, right);
    vst1q_s32(found + 4 * n, vpaddq_s32(low, high));
  }
  memcpy(&whole, found, 32);
  return whole;
}
#else
INLINE s32x8 l_pairs(vl a, vl b) {
  s32x8 found;
  for (int n = 0; n < 8; n++) found[n] = a[2 * n] * b[2 * n] + a[2 * n + 1] * b[2 * n + 1];
  return found;
}
#endif
INLINE vs s_of_16(const float *factors) {
  float a = factors[0], b = factors[1];
  return (vs){a, a, a, a, b, b, b, b};
}
#endif
INLINE vs l_dot(vl even, vl odd, const int16_t *x) {
  return __builtin_convertvector(l_pairs(even, l_load(x)) + l_pairs(odd, l_load(x + 32)), vs);
}
INLINE vs s_fma(vs a, vs b, vs c) { return fma_8(a, b, c); }
INLINE vs s_set(float value) { return set_8(value); }
INLINE vs s_of_32(const float *factors) { return set_8(*factors); }
INLINE f32x8 s_added(const vs sums[2]) { return sums[0] + sums[1]; }

#endif

/* The sum of eight lanes. */
INLINE float added(f32x8 a) {
  float some[8];
  memcpy(some, &a, sizeof some);
  for (int n = 0; n < 4; n++) some[n] += some[n + 4];
  return (some[0] + some[2]) + (some[1] + some[3]);
}

/* Kinds */

/* Of bytes with signs. */
INLINE codes split(u8x32 bytes) {
  s16x16 both = (s16x16)bytes;
  return (codes){(s16x16)((u16x16)both << 8) >> 8, both >> 8};
}

/* Of halves of bytes with signs, which are the higher ones. */
INLINE codes split_high(u8x32 bytes) {
  s16x16 both = (s16x16)bytes;
  return (codes){(s16x16)((u16x16)both << 8) >> 12, both >> 12};
}

/* 16 low halves of bytes, then 16 high ones. */
INLINE u8x32 halves_in_order(const uint8_t *bytes) {
  return (u8x32)((u32x8)twice(bytes) >> (u32x8){0, 0, 0, 0, 4, 4, 4, 4}) & 15;
}

/* The same, less 8: a half whose highest bit is turned is that number with its sign. */
INLINE codes centred_halves(const uint8_t *bytes) {
  return split_high((u8x32)((u32x8)(twice(bytes) ^ 0x88) << (u32x8){4, 4, 4, 4, 0, 0, 0, 0}));
}

/* Bits `first` and above of 32 bytes, those that `mask` leaves. */
INLINE u8x32 bits_of(const uint8_t *bytes, int first, uint8_t mask) {
  return (u8x32)((u16x16)load_bytes(bytes) >> first) & mask;
}

INLINE u8x32 quarters_of(const uint8_t *bytes, int group) {
  return bits_of(bytes + 32 * (group / 4), 2 * (group % 4), 3);
}

/* Bit `group` of 32 bytes, as bit `place`. */
INLINE u8x32 bit_of(const uint8_t *bytes, int group, int place) {
  u16x16 both = (u16x16)load_bytes(bytes);
  return (u8x32)(group > place ? both >> (group - place) : both << (place - group)) & (uint8_t)(1 << place);
}

static const int8_t NONLINEAR_CODES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t E2M1_TWICE_CODES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

INLINE codes codes_q4_0(const uint8_t *block, int group) { return (void)group, centred_halves(block + 2); }
INLINE codes codes_q4_1(const uint8_t *block, int group) { return (void)group, centred_halves(block + 4); }
INLINE codes codes_q5_0(const uint8_t *block, int group) {
  (void)group;
  return split((halves_in_order(block + 6) | (bytes_of_bits(u32_at(block + 2)) & 16)) - 16);
}
INLINE codes codes_q5_1(const uint8_t *block, int group) {
  (void)group;
  return split((halves_in_order(block + 8) | (bytes_of_bits(u32_at(block + 4)) & 16)) - 16);
}
INLINE codes codes_q8_0(const uint8_t *block, int group) { return (void)group, split(load_bytes(block + 2)); }
INLINE codes codes_q2_k(const uint8_t *block, int group) { return split(quarters_of(block + 16, group) - 2); }
INLINE codes codes_q3_k(const uint8_t *block, int group) {
  return split((quarters_of(block + 32, group) | bit_of(block, group, 2)) - 4);
}
INLINE codes codes_q4_k(const uint8_t *block, int group) {
  u16x16 both = (u16x16)(load_bytes(block + 16 + 32 * (group / 2)) ^ 0x88);
  return group % 2 ? split_high((u8x32)both) : (codes){(s16x16)(both << 12) >> 12, (s16x16)(both << 4) >> 12};
}
INLINE codes codes_q5_k(const uint8_t *block, int group) {
  return split((bits_of(block + 48 + 32 * (group / 2), 4 * (group % 2), 15) | bit_of(block + 16, group, 4)) - 16);
}
INLINE codes codes_q6_k(const uint8_t *block, int group) {
  u8x32 low = bits_of(block + 64 * (group / 4) + 32 * (group % 2), 4 * (group / 2 % 2), 15);
  return split((low | (u8x32)((u16x16)quarters_of(block + 128, group) << 4)) - 32);
}
INLINE codes codes_iq4_nl(const uint8_t *block, int group) {
  (void)group;
  return split(picked(NONLINEAR_CODES, halves_in_order(block + 2)));
}
INLINE codes codes_iq4_xs(const uint8_t *block, int group) {
  return split(picked(NONLINEAR_CODES, halves_in_order(block + 8 + 16 * group)));
}
INLINE codes codes_tq2_0(const uint8_t *block, int group) { return split(quarters_of(block, group) - 1); }
INLINE codes codes_mxfp4(const uint8_t *block, int group) {
  (void)group;
  return split(picked(E2M1_TWICE_CODES, halves_in_order(block + 1)));
}

/* Halves, each in a block of its own. */
INLINE f32x8 halves_of(const uint8_t *first, int nbytes, int count) {
  uint16_t found[8] = {0};
#if defined(WITH_AVX512) || defined(WITH_AVX2)
  if (count == 8) { /* as they are put into a register, and not into one of integers before */
    __m128i all = _mm_setzero_si128();
#define PUT(n) all = _mm_insert_epi16(all, u16_at(first + (n)*nbytes), n)
    PUT(0), PUT(1), PUT(2), PUT(3), PUT(4), PUT(5), PUT(6), PUT(7);
    return (f32x8)_mm256_cvtph_ps(all);
  }
#endif
  for (int n = 0; n < count; n++) found[n] = u16_at(first + n * nbytes);
  return floats_of_halves(found);
}

INLINE void factors_q4_0(const uint8_t *blocks, int count, factors *f) { f->by[0] = halves_of(blocks, 18, count); }
INLINE void factors_q4_1(const uint8_t *blocks, int count, factors *f) {
  f->by[0] = halves_of(blocks, 20, count);
  f->more[0] = f->by[0] * 8 + halves_of(blocks + 2, 20, count);
}
INLINE void factors_q5_0(const uint8_t *blocks, int count, factors *f) { f->by[0] = halves_of(blocks, 22, count); }
INLINE void factors_q5_1(const uint8_t *blocks, int count, factors *f) {
  f->by[0] = halves_of(blocks, 24, count);
  f->more[0] = f->by[0] * 16 + halves_of(blocks + 2, 24, count);
}
INLINE void factors_q8_0(const uint8_t *blocks, int count, factors *f) { f->by[0] = halves_of(blocks, 34, count); }
INLINE void factors_q2_k(const uint8_t *block, int count, factors *f) {
  (void)count;
  for (int n = 0; n < 2; n++) {
    uint32_t both[2], scales[2], least[2];
    memcpy(both, block + 8 * n, 8);
    for (int word = 0; word < 2; word++) {
      scales[word] = both[word] & 0x0f0f0f0f;
      least[word] = both[word] >> 4 & 0x0f0f0f0f;
    }
    f->by[n] = half_at(block + 80) * floats_of_unsigned((const uint8_t *)scales);
    f->more[n] = f->by[n] * 2 - half_at(block + 82) * floats_of_unsigned((const uint8_t *)least);
  }
}
INLINE void factors_q3_k(const uint8_t *block, int count, factors *f) {
  (void)count;
  uint32_t packed[3], scales[4];
  memcpy(packed, block + 96, 12);
  for (int n = 0; n < 4; n++)
    scales[n] = (packed[n % 2] >> 4 * (n / 2) & 0x0f0f0f0f) | (packed[2] >> 2 * n & 0x03030303) << 4;
  for (int n = 0; n < 2; n++)
    f->by[n] = half_at(block + 108) * (floats_of_unsigned((const uint8_t *)(scales + 2 * n)) - 32);
}
/* Of Q4_K and Q5_K, whose integers are less by `centre`. */
INLINE void factors_and_offsets(const uint8_t *block, int centre, factors *f) {
  uint32_t packed[3], scales[2], least[2];
  memcpy(packed, block + 4, 12);
  scales[0] = packed[0] & 0x3f3f3f3f;
  scales[1] = (packed[2] & 0x0f0f0f0f) | (packed[0] >> 6 & 0x03030303) << 4;
  least[0] = packed[1] & 0x3f3f3f3f;
  least[1] = (packed[2] >> 4 & 0x0f0f0f0f) | (packed[1] >> 6 & 0x03030303) << 4;
  f->by[0] = half_at(block) * floats_of_unsigned((const uint8_t *)scales);
  f->more[0] = f->by[0] * (float)centre - half_at(block + 2) * floats_of_unsigned((const uint8_t *)least);
}
INLINE void factors_q4_k(const uint8_t *block, int count, factors *f) {
  (void)count;
  factors_and_offsets(block, 8, f);
}
INLINE void factors_q5_k(const uint8_t *block, int count, factors *f) {
  (void)count;
  factors_and_offsets(block, 16, f);
}
INLINE void factors_q6_k(const uint8_t *block, int count, factors *f) {
  (void)count;
  for (int n = 0; n < 2; n++) f->by[n] = half_at(block + 208) * floats_of_signed(block + 192 + 8 * n);
}
INLINE void factors_iq4_nl(const uint8_t *blocks, int count, factors *f) { f->by[0] = halves_of(blocks, 18, count); }
INLINE void factors_iq4_xs(const uint8_t *block, int count, factors *f) {
  (void)count;
  uint8_t scales[8];
  for (int n = 0; n < 8; n++)
    scales[n] = (uint8_t)((block[4 + n / 2] >> 4 * (n % 2) & 15) | (u16_at(block + 2) >> 2 * n & 3) << 4);
  f->by[0] = half_at(block) * (floats_of_unsigned(scales) - 32);
}
INLINE void factors_tq2_0(const uint8_t *block, int count, factors *f) {
  (void)count;
  f->by[0] = set_8(half_at(block + 64));
}
INLINE void factors_mxfp4(const uint8_t *blocks, int count, factors *f) {
  uint32_t found[8] = {0};
  for (int n = 0; n < count; n++) found[n] = blocks[17 * n];
  u32x8 exponents, is_least;
  memcpy(&exponents, found, sizeof found);
  is_least = (u32x8)(exponents == 0); /* whose factor, a half of 2 to the power of -127, is subnormal */
  exponents = (exponents << 23) - 0x00800000;
  f->by[0] = (f32x8)((exponents & ~is_least) | (is_least & 0x00200000));
}

/* Whether factors are those of 16 numbers, in place of 32, and whether something is added to numbers. */
#define LIMB_KINDS(DO) \
  DO(q4_0, 0, 0)       \
  DO(q4_1, 0, 1)       \
  DO(q5_0, 0, 0)       \
  DO(q5_1, 0, 1)       \
  DO(q8_0, 0, 0)       \
  DO(q2_k, 1, 1)       \
  DO(q3_k, 1, 0)       \
  DO(q4_k, 0, 1)       \
  DO(q5_k, 0, 1)       \
  DO(q6_k, 1, 0)       \
  DO(iq4_nl, 0, 0)     \
  DO(iq4_xs, 0, 0)     \
  DO(tq2_0, 0, 0)      \
  DO(mxfp4, 0, 0)

/* Products */

#if W > 1
#define BESIDE_EACH_OTHER 4 /* rows of x for which integers are taken apart once */
#define UNROLLED _Pragma("GCC unroll 8")
#else
#define BESIDE_EACH_OTHER 1
#define UNROLLED
#endif

/* The factors of a chunk for a row of x, in `by`; what is added to the numbers is multiplied by the sums of x. */
INLINE void factors_for(const chunk *x, const factors *f, float by[16], f32x8 *more, const int of_16,
                        const int has_more) {
  for (int n = 0; n <= of_16; n++) {
    f32x8 product = f->by[n] * load_8(of_16 ? x->scales_of_16 + 8 * n : x->scales);
    memcpy(by + 8 * n, &product, sizeof product);
    if (has_more) *more = fma_8(f->more[n], load_8(of_16 ? x->sums_of_16 + 8 * n : x->sums), *more);
  }
  IN_MEMORY(by); /* from where one number fills a vector at once */
}

INLINE vs added_group(vs sum, vl even, vl odd, const int16_t *x, vs by, const int has_second) {
  vs found = l_dot(even, odd, x);
  if (has_second) found = s_fma(l_dot(even, odd, x + 64), s_set(0x1p-15f), found);
  return s_fma(found, by, sum);
}

#if GROUPS == 2
#define L_OF(one, other, which) l_join((one).which, (other).which)
#else
#define L_OF(one, other, which) (one).which
#endif

#define AT_A_TIME 4096 /* columns of all rows of x beside each other, whose integers stay in the first cache */

typedef struct {
  vs sums[2 / GROUPS];
  f32x8 more;
} limb_sums;

#define DEFINE_LIMBS(kind, of_16, has_more)                                                                            \
  INLINE void chunk_##kind(const uint8_t *bytes, int count, const chunk *x, int64_t step, const float (*by)[16],       \
                           limb_sums *all, const int rows, const int has_second) {                                     \
    const int numbers = NUMBERS_##kind, nbytes = BYTES_##kind;                                                         \
    UNROLLED for (int group = 0; group < (numbers == 32 ? count : CHUNK / 32); group += GROUPS) {                      \
      int next = numbers == 32 && group + 1 == count ? group : group + 1; /* the last one may have none beside it */   \
      codes one = codes_##kind(bytes + (numbers == 32 ? group * nbytes : 0), group);                                   \
      codes other = GROUPS == 2 ? codes_##kind(bytes + (numbers == 32 ? next * nbytes : 0), next) : one;               \
      vl even = L_OF(one, other, even), odd = L_OF(one, other, odd);                                                   \
      (void)other;                                                                                                     \
      for (int r = 0; r < rows; r++) {                                                                                 \
        vs factor = of_16 ? s_of_16(by[r] + 2 * group) : s_of_32(by[r] + group), *sum = &all[r].sums[group % 2];       \
        *sum = added_group(*sum, even, odd, x[r * step].limbs[group / 2][0][0][group % 2], factor, has_second);        \
      }                                                                                                                \
    }                                                                                                                  \
  }                                                                                                                    \
  INLINE void some_limbs_##kind(const uint8_t *bytes, int64_t columns, const chunk *x, int64_t step, limb_sums *to,    \
                                int64_t ahead, const int rows) {                                                       \
    const int numbers = NUMBERS_##kind, nbytes = BYTES_##kind;                                                         \
    limb_sums all[BESIDE_EACH_OTHER];                                                                                  \
    float by[BESIDE_EACH_OTHER][16];                                                                                   \
    factors f;                                                                                                         \
    for (int r = 0; r < rows; r++) all[r] = to[r];                                                                     \
    for (int64_t at = 0; at < columns; at += CHUNK, x++, bytes += CHUNK / numbers * nbytes) {                          \
      int count = columns - at < CHUNK ? (int)(columns - at) / 32 : CHUNK / 32, has_second = 0;                        \
      for (int line = 0; line < CHUNK / numbers * nbytes; line += 64) __builtin_prefetch(bytes + ahead + line);        \
      factors_##kind(bytes, count, &f);                                                                                \
      for (int r = 0; r < rows; r++) {                                                                                 \
        factors_for(x + r * step, &f, by[r], &all[r].more, of_16, has_more);                                           \
        has_second |= x[r * step].has_second;                                                                          \
      }                                                                                                                \
      if (has_second) /* where it is zero, it adds nothing */                                                          \
        chunk_##kind(bytes, count, x, step, by, all, rows, 1);                                                         \
      else                                                                                                             \
        chunk_##kind(bytes, count, x, step, by, all, rows, 0);                                                         \
    }                                                                                                                  \
    for (int r = 0; r < rows; r++) to[r] = all[r];                                                                     \
  }                                                                                                                    \
  static void limbs_##kind(const stored_row *stored, int64_t count, int64_t columns, const chunk *x, int64_t step,     \
                           int64_t x_rows, float (*out)[MOST_ROWS]) {                                                  \
    limb_sums sums[AT_ONCE][BESIDE_EACH_OTHER];                                                                        \
    int64_t ahead = count > 2 ? stored[2].bytes - stored[0].bytes : 0;                                                 \
    for (int64_t r = 0, rows; r < x_rows; r += rows, x += rows * step) {                                               \
      rows = x_rows - r < BESIDE_EACH_OTHER ? 1 : BESIDE_EACH_OTHER;                                                   \
      int64_t most = AT_A_TIME / rows;                                                                                 \
      memset(sums, 0, sizeof sums);                                                                                    \
      for (int64_t at = 0; at < columns; at += most) {                                                                 \
        int64_t some = columns - at < most ? columns - at : most;                                                      \
        for (int64_t p = 0; p < count; p++) {                                                                          \
          const uint8_t *bytes = stored[p].bytes + at / NUMBERS_##kind * BYTES_##kind;                                 \
          if (rows == 1)                                                                                               \
            some_limbs_##kind(bytes, some, x + at / CHUNK, step, sums[p], ahead, 1);                                          \
          else                                                                                                         \
            some_limbs_##kind(bytes, some, x + at / CHUNK, step, sums[p], ahead, BESIDE_EACH_OTHER);                          \
        }                                                                                                              \
      }                                                                                                                \
      for (int64_t p = 0; p < count; p++)                                                                              \
        for (int64_t n = 0; n < rows; n++) {                                                                           \
          f32x8 found = s_added(sums[p][n].sums);                                                                      \
          out[p][r + n] = added(has_more ? found + sums[p][n].more : found);                                           \
        }                                                                                                              \
    }                                                                                                                  \
  }

LIMB_KINDS(DEFINE_LIMBS)

/* Activations */

/* The nearest integer, of less than 2^22. */
INLINE float nearest(float value) { return (value + 0x1.8p23f) - 0x1.8p23f; }

#define LEAST_BESIDE (3 << 18)

/* A row of x, filled up with zeros to 32 columns, as chunks; 1 if some of its numbers are not finite, or too large or
 * small for integers. The largest of 32 numbers has 14 bits in the first limb; the second one holds 15 more.
 *
 * For products in bfloat16, which are rounded to 8 bits, it is left out where the first one is within 2^-11 of the
 * numbers beside the largest one, all in all: it then loses less than the rounding of a dense weight would. */
static int prepare_limbs(const float *x, int64_t columns, int is_short, chunk *to) {
  memset(to, 0, (size_t)((columns + CHUNK - 1) / CHUNK) * sizeof *to);
  for (int64_t at = 0; at < columns; at += 32) {
    chunk *here = to + at / CHUNK;
    int group = (int)(at % CHUNK / 32);
    uint32_t most = 0;
    for (int n = 0; n < 32; n++) {
      uint32_t magnitude = float_to_bits(x[at + n]) & 0x7fffffff;
      most = magnitude > most ? magnitude : most;
    }
    if (!most) continue;
    int exponent = (int)(most >> 23) - 127;
    if (exponent < -80 || exponent > 80) return 1;
    float up = bits_to_float((uint32_t)(127 + 13 - exponent) << 23), scale = 1 / up;
    int16_t limbs[2][32];
    int32_t beside = 0, largest = 0; /* sums of squares of quarters, which 32 bits hold */
    for (int n = 0; n < 32; n++) {
      int32_t high = (int)nearest(x[at + n] * up), quarter = high / 4;
      limbs[0][n] = (int16_t)high;
      beside += quarter * quarter;
      largest = quarter * quarter > largest ? quarter * quarter : largest;
    }
    int has_second = !is_short || beside - largest < LEAST_BESIDE;
    if (has_second) {
      int16_t any = 0;
      for (int n = 0; n < 32; n++) {
        limbs[1][n] = (int16_t)(int)nearest((x[at + n] * up - (float)limbs[0][n]) * 0x1p15f);
        any |= limbs[1][n];
      }
      here->has_second |= any != 0;
    } else {
      memset(limbs[1], 0, sizeof limbs[1]);
    }
    for (int limb = 0; limb < 2; limb++) {
      int16_t *even = here->limbs[group / 2][limb][0][group % 2], *odd = here->limbs[group / 2][limb][1][group % 2];
      for (int n = 0; n < 16; n++) {
        even[n] = limbs[limb][2 * n];
        odd[n] = limbs[limb][2 * n + 1];
      }
    }
    double sums[2];
    for (int half = 0; half < 2; half++) {
      int high = 0, low = 0;
      for (int n = 16 * half; n < 16 * half + 16; n++) {
        high += limbs[0][n];
        low += limbs[1][n];
      }
      sums[half] = ((double)high + (double)low * 0x1p-15) * (double)scale;
      here->scales_of_16[2 * group + half] = scale;
      here->sums_of_16[2 * group + half] = (float)sums[half];
    }
    here->scales[group] = scale;
    here->sums[group] = (float)(sums[0] + sums[1]);
  }
  return 0;
}

#define LIMB_ENTRY(kind, of_16, has_more) [KIND_##kind] = limbs_##kind,
static const multiply_limbs LIMBS_OF_KINDS[BLOCKS] = {LIMB_KINDS(LIMB_ENTRY)};
