/* Products with GGUF blocks in integers: activations as fixed-point numbers, of one or two limbs of 16 bits.
 *
 * Always true:
 * - within 32 columns a product is exact, but for the last bits of the activations, see `prepare_limbs`: eight sums of
 *   four columns each are integers, which are rounded to float32 as a whole and then multiplied by the factors
 * - all instruction sets give the same bits: integers are exact, and sums of floats are in one order, of fused products
 * - an element of the result depends on its row of x and its packed row alone
 * - a code fills a byte from its highest bit on, and ZERO is the code of zero, whatever the kind
 *
 * A chunk is 256 columns: a block, or eight. `codes_KIND(block, next, group)` gives the codes of a group of 32, and those
 * of the next one where a vector holds both; `factors_KIND(blocks, count, f)` the factors of a chunk: a number is
 * f.by * (code - ZERO) + f.more. Codes are multiplied as words; or, with avx512vnni and one row of x, as bytes, by the
 * higher and by the lower byte of an activation. What ZERO adds to a sum is taken away from it as an integer.
 */

#ifndef __clang__
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions alone */
#endif

#if defined(__x86_64__)
#define IN_MEMORY(place) __asm__("" : "+m"(*(float(*)[16])(place)))
#else
#define IN_MEMORY(place) (void)(place)
#endif

typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int32_t s32x8 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));

/* Codes of GROUPS groups of 32 numbers, beside each other. */
#ifdef WITH_AVX512
#define GROUPS 2
#define EACH(...) {__VA_ARGS__, __VA_ARGS__}
#else
#define GROUPS 1
#define EACH(...) {__VA_ARGS__}
#endif
#ifdef WITH_VNNI
#define IN_BYTES 1 /* a row of x that is multiplied alone */
#else
#define IN_BYTES 0
#endif
typedef uint8_t u8v __attribute__((vector_size(32 * GROUPS)));
typedef uint16_t u16v __attribute__((vector_size(32 * GROUPS)));
typedef int16_t s16v __attribute__((vector_size(32 * GROUPS)));
typedef uint32_t u32v __attribute__((vector_size(32 * GROUPS)));
typedef uint64_t u64v __attribute__((vector_size(32 * GROUPS)));

#define ZERO 128 /* the code of zero */

typedef struct {
  s16v even, odd;
} words;

typedef struct {
  f32x8 by[2], more[2]; /* of 32 numbers each, or, in two vectors, of 16 */
} factors;

/* Vectors */

INLINE f32x8 load_8(const float *from) {
  f32x8 found;
  memcpy(&found, from, sizeof found);
  return found;
}

INLINE u8v load_bytes(const uint8_t *from) {
  u8v found;
  memcpy(&found, from, sizeof found);
  return found;
}

INLINE f32x8 set_8(float value) { return (f32x8){value, value, value, value, value, value, value, value}; }

#if defined(WITH_AVX512) || defined(WITH_AVX2)

INLINE f32x8 fma_8(f32x8 a, f32x8 b, f32x8 c) { return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE f32x8 floats_of_unsigned(uint64_t bytes) {
  return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)));
}
INLINE f32x8 floats_of_signed(uint64_t bytes) {
  return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)bytes)));
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
INLINE f32x8 floats_of_unsigned(uint64_t bytes) {
  f32x8 found;
  for (int n = 0; n < 8; n++) found[n] = (float)(uint8_t)(bytes >> 8 * n);
  return found;
}
INLINE f32x8 floats_of_signed(uint64_t bytes) {
  f32x8 found;
  for (int n = 0; n < 8; n++) found[n] = (float)(int8_t)(bytes >> 8 * n);
  return found;
}

#endif

#if defined(WITH_AVX512)

/* The same 32 bytes for each group; 16 or 32 bytes of each of two; a number for each. */
INLINE u8v same_bytes(const uint8_t *from) {
  return (u8v)_mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)from));
}
INLINE u8v twice(const uint8_t *one, const uint8_t *other) {
  __m512i first = _mm512_broadcast_i64x2(_mm_loadu_si128((const void *)one));
  return (u8v)_mm512_mask_broadcast_i64x2(first, 0xf0, _mm_loadu_si128((const void *)other));
}
INLINE u8v bytes_of(const uint8_t *one, const uint8_t *other) {
  __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)one));
  return (u8v)_mm512_inserti64x4(first, _mm256_loadu_si256((const void *)other), 1);
}
INLINE u16v in_each(int one, int other) {
  return (u16v)_mm512_mask_set1_epi16(_mm512_set1_epi16((short)one), 0xffff0000, (short)other);
}
INLINE u8v picked(const uint8_t table[16], u8v index) {
  __m128i all = _mm_loadu_si128((const void *)table);
  return (u8v)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), (__m512i)index);
}
/* Each bit as a byte: 0 or 255. */
INLINE u8v bytes_of_bits(uint32_t one, uint32_t other) {
  return (u8v)_mm512_movm_epi8((uint64_t)other << 32 | one);
}

typedef __m512 vs;
typedef __m512 line; /* of 16 factors */
INLINE void put_line(line *to, f32x8 some, int at) {
  *to = at ? _mm512_insertf32x8(*to, (__m256)some, 1) : _mm512_castps256_ps512((__m256)some);
}
INLINE __m512i l_load(const void *from) { return _mm512_loadu_si512(from); }
#if defined(WITH_VNNI)
INLINE vs l_dot(words all, const int16_t *even, const int16_t *odd, const int32_t *start, const int is_alone) {
  (void)is_alone, (void)start; /* a row that is alone is multiplied as bytes */
  __m512i sums = _mm512_madd_epi16((__m512i)all.even, l_load(even));
  return _mm512_cvtepi32_ps(_mm512_dpwssd_epi32(sums, (__m512i)all.odd, l_load(odd)));
}
#else
INLINE vs l_dot(words all, const int16_t *even, const int16_t *odd, const int32_t *start, const int is_alone) {
  __m512i sums = _mm512_add_epi32(_mm512_madd_epi16((__m512i)all.even, l_load(even)),
                                  _mm512_madd_epi16((__m512i)all.odd, l_load(odd)));
  return _mm512_cvtepi32_ps(is_alone ? _mm512_add_epi32(sums, l_load(start)) : sums);
}
#endif
INLINE vs s_fma(vs a, vs b, vs c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vs s_set(float value) { return _mm512_set1_ps(value); }
/* The factors of a pair of groups, of 32 numbers each, or of 16. */
INLINE vs s_of_32(const line *factors, int group) {
  const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  return _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(group)), *factors);
}
INLINE vs s_of_16(const line *factors, int group) {
  const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(2 * group)), *factors);
}
INLINE f32x8 s_added(const vs sums[1]) {
  return (f32x8)_mm512_castps512_ps256(sums[0]) + (f32x8)_mm512_extractf32x8_ps(sums[0], 1);
}

#else

INLINE u8v same_bytes(const uint8_t *from) { return load_bytes(from); }
INLINE u8v bytes_of(const uint8_t *one, const uint8_t *other) { return (void)other, load_bytes(one); }
INLINE u16v in_each(int one, int other) { return (void)other, (u16v){0} + (uint16_t)one; }

typedef f32x8 vs;
typedef struct {
  float factors[16];
} line;
INLINE void put_line(line *to, f32x8 some, int at) {
  memcpy(to->factors + 8 * at, &some, sizeof some);
  IN_MEMORY(to->factors); /* from where one number fills a vector at once */
}
INLINE s16v l_load(const int16_t *from) {
  s16v found;
  memcpy(&found, from, sizeof found);
  return found;
}
#if defined(WITH_AVX2)
INLINE u8v twice(const uint8_t *one, const uint8_t *other) {
  return (void)other, (u8v)_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)one));
}
INLINE u8v picked(const uint8_t table[16], u8v index) {
  return (u8v)_mm256_shuffle_epi8((__m256i)twice(table, NULL), (__m256i)index);
}
INLINE u8v bytes_of_bits(uint32_t one, uint32_t other) {
  const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
  (void)other;
  return (u8v)_mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)one), byte), bit), bit);
}
INLINE s32x8 l_pairs(s16v a, s16v b) { return (s32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE vs s_of_16(const line *all, int group) {
  double both;
  memcpy(&both, all->factors + 2 * group, 8);
  const __m256i first = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  return (vs)_mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(both)), first);
}
#else
INLINE u8v twice(const uint8_t *one, const uint8_t *other) {
  u8v found;
  memcpy(&found, one, 16);
  memcpy((char *)&found + 16, one, 16);
  return (void)other, found;
}
INLINE u8v picked(const uint8_t table[16], u8v index) {
  for (int n = 0; n < 32; n++) index[n] = table[index[n]];
  return index;
}
INLINE u8v bytes_of_bits(uint32_t one, uint32_t other) {
  u8v found;
  for (int n = 0; n < 32; n++) found[n] = (uint8_t) - (one >> n & 1);
  return (void)other, found;
}
#if defined(WITH_NEON)
INLINE s32x8 l_pairs(s16v a, s16v b) {
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
INLINE s32x8 l_pairs(s16v a, s16v b) {
  s32x8 found;
  for (int n = 0; n < 8; n++) found[n] = a[2 * n] * b[2 * n] + a[2 * n + 1] * b[2 * n + 1];
  return found;
}
#endif
INLINE vs s_of_16(const line *all, int group) {
  float a = all->factors[2 * group], b = all->factors[2 * group + 1];
  return (vs){a, a, a, a, b, b, b, b};
}
#endif
INLINE vs l_dot(words all, const int16_t *even, const int16_t *odd, const int32_t *start, const int is_alone) {
  s32x8 sums = l_pairs(all.even, l_load(even)) + l_pairs(all.odd, l_load(odd)), more;
  memcpy(&more, start, sizeof more);
  return __builtin_convertvector(is_alone ? sums + more : sums, vs);
}
INLINE vs s_fma(vs a, vs b, vs c) { return fma_8(a, b, c); }
INLINE vs s_set(float value) { return set_8(value); }
INLINE vs s_of_32(const line *all, int group) { return set_8(all->factors[group]); }
INLINE f32x8 s_added(const vs sums[2]) { return sums[0] + sums[1]; }

#endif

/* The sum of eight lanes. */
INLINE float added(f32x8 a) {
#if defined(WITH_AVX512) || defined(WITH_AVX2)
  __m128 c = _mm_add_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
#else
  float some[8];
  memcpy(some, &a, sizeof some);
  for (int n = 0; n < 4; n++) some[n] += some[n + 4];
  return (some[0] + some[2]) + (some[1] + some[3]);
#endif
}

/* Kinds */

#if defined(WITH_VNNI)

/* As a matrix of bits for each 8 bytes: bits `from` and on of a byte are moved to bit `to` and on; the others are zero. */
INLINE uint64_t mover(int from, int to, int bits) {
  uint64_t made = 0;
  for (int n = 0; n < bits; n++) made |= (uint64_t)1 << (from + n + 8 * (7 - to - n));
  return made;
}
INLINE u8v moved(u8v bytes, int from, int more, int to, int bits) {
  u64v how = (u64v)_mm512_mask_set1_epi64(_mm512_set1_epi64((long long)mover(from, to, bits)), 0xf0,
                                          (long long)mover(from + more, to, bits));
  return (u8v)_mm512_gf2p8affine_epi64_epi8((__m512i)bytes, (__m512i)how, 0);
}
INLINE u8v halves(const uint8_t *one, const uint8_t *other, int to) {
  u64v how = (u64v)_mm512_mask_set1_epi64(_mm512_set1_epi64((long long)mover(0, to, 4)), 0xcc, (long long)mover(4, to, 4));
  return (u8v)_mm512_gf2p8affine_epi64_epi8((__m512i)twice(one, other), (__m512i)how, 0);
}

#else

/* Bits `from` and on of each byte, moved to bit `to` and on; of the next group those `more` above. */
INLINE u8v moved(u8v bytes, int from, int more, int to, int bits) {
  u16v both = (u16v)bytes;
  uint8_t mask = (uint8_t)(((1 << bits) - 1) << to);
  int last = from + more * (GROUPS - 1);
  if (last <= to) return (u8v)(both << in_each(to - from, to - last)) & mask;
  if (from < to) both <<= in_each(last - from, 0), from = last;
  return (u8v)(both >> in_each(from - to, last - to)) & mask;
}
/* 16 low halves of bytes, then 16 high ones, moved to bit `to` and on. */
INLINE u8v halves(const uint8_t *one, const uint8_t *other, int to) {
  u32v both = (u32v)twice(one, other), first = EACH(0, 0, 0, 0, 4, 4, 4, 4);
  return (u8v)(to ? both << (4 - first) >> (4 - to) : both >> first) & (uint8_t)(15 << to);
}

#endif

INLINE u8v quarters_of(const uint8_t *bytes, int group, int to) {
  return moved(same_bytes(bytes + 32 * (group / 4)), 2 * (group % 4), 2, to, 2);
}
INLINE u8v halves_of_group(const uint8_t *bytes, int group, int to) {
  return moved(same_bytes(bytes + 32 * (group / 2)), 4 * (group % 2), 4, to, 4);
}
INLINE u8v bits_of_group(const uint8_t *bytes, int group) { return moved(same_bytes(bytes), group, 1, 7, 1); }

static const uint8_t NONLINEAR_CODES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t E2M1_CODES[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

#define CODES(kind) INLINE u8v codes_##kind(const uint8_t *block, const uint8_t *next, int group)
CODES(q4_0) { return (void)group, halves(block + 2, next + 2, 4); }
CODES(q4_1) { return (void)group, halves(block + 4, next + 4, 4); }
INLINE u8v fifths_of(const uint8_t *block, const uint8_t *next) {
  return halves(block + 4, next + 4, 3) | (bytes_of_bits(u32_at(block), u32_at(next)) & 0x80);
}
CODES(q5_0) { return (void)group, fifths_of(block + 2, next + 2); }
CODES(q5_1) { return (void)group, fifths_of(block + 4, next + 4); }
CODES(q8_0) { return (void)group, bytes_of(block + 2, next + 2) ^ ZERO; }
CODES(q2_k) { return (void)next, quarters_of(block + 16, group, 6); }
CODES(q3_k) { return (void)next, bits_of_group(block, group) | quarters_of(block + 32, group, 5); }
CODES(q4_k) { return (void)next, halves_of_group(block + 16, group, 4); }
CODES(q5_k) { return (void)next, bits_of_group(block + 16, group) | halves_of_group(block + 48, group, 3); }
CODES(q6_k) {
  u8v low = load_bytes(block + 64 * (group / 4) + 32 * (group % 2));
  return (void)next, quarters_of(block + 128, group, 6) | moved(low, 4 * (group / 2 % 2), 0, 2, 4);
}
CODES(iq4_nl) { return (void)group, picked(NONLINEAR_CODES, halves(block + 2, next + 2, 0)); }
CODES(iq4_xs) {
  return (void)next, picked(NONLINEAR_CODES, halves(block + 8 + 16 * group, block + 24 + 16 * group, 0));
}
CODES(tq2_0) { return (void)next, quarters_of(block, group, 0) + (ZERO - 1); }
CODES(mxfp4) { return (void)group, picked(E2M1_CODES, halves(block + 1, next + 1, 0)); }

/* Halves, each in a block of its own; and those beside them. */
INLINE void halves_of(const uint8_t *first, int nbytes, int count, f32x8 found[2]) {
#if defined(WITH_AVX512)
#define PLACE(n) (short)((n) % 8 * nbytes / 2 + (n) / 8)
#define EIGHT(n) PLACE(n), PLACE(n + 1), PLACE(n + 2), PLACE(n + 3), PLACE(n + 4), PLACE(n + 5), PLACE(n + 6), PLACE(n + 7)
  const __m512i places = (__m512i)(s16v){EIGHT(0), EIGHT(8)};
  __m512i lines[4];
  for (int n = 0; n < 4; n++) {
    int words = count * nbytes / 2 - 32 * n;
    uint32_t inside = words < 1 ? 0 : words > 31 ? 0xffffffff : (1u << words) - 1;
    lines[n] = _mm512_maskz_loadu_epi16(inside, first + 64 * n);
  }
  __m512i all = _mm512_permutex2var_epi16(lines[0], places, lines[1]);
  if (PLACE(15) > 63) {
    __mmask32 behind = _mm512_cmpgt_epi16_mask(places, _mm512_set1_epi16(63));
    all = _mm512_mask_blend_epi16(behind, all, _mm512_permutex2var_epi16(lines[2], places, lines[3]));
  }
  __m512 floats = _mm512_cvtph_ps(_mm512_castsi512_si256(all));
  found[0] = (f32x8)_mm512_castps512_ps256(floats);
  found[1] = (f32x8)_mm512_extractf32x8_ps(floats, 1);
#elif defined(WITH_AVX2)
  for (int n = 0; n < 2; n++) {
    __m128i all = _mm_setzero_si128(); /* where they are put, and not into a register of integers before */
#define PUT(at) if (at < count) all = _mm_insert_epi16(all, u16_at(first + at * nbytes + 2 * n), at);
    PUT(0) PUT(1) PUT(2) PUT(3) PUT(4) PUT(5) PUT(6) PUT(7)
    found[n] = (f32x8)_mm256_cvtph_ps(all);
  }
#else
  for (int n = 0; n < 8; n++) {
    found[0][n] = n < count ? half_at(first + n * nbytes) : 0;
    found[1][n] = n < count ? half_at(first + n * nbytes + 2) : 0;
  }
#endif
}

INLINE f32x8 less(f32x8 by, f32x8 offset) { return fma_8(by, set_8(ZERO), -offset); }

/* Of blocks that begin with a factor, and of those where an offset follows. */
INLINE void factors_apart(const uint8_t *blocks, int nbytes, int count, float unit, factors *f) {
  f32x8 found[2];
  halves_of(blocks, nbytes, count, found);
  f->by[0] = found[0] * unit;
}
INLINE void factors_and_more(const uint8_t *blocks, int nbytes, int count, float unit, factors *f) {
  f32x8 found[2];
  halves_of(blocks, nbytes, count, found);
  f->by[0] = found[0] * unit;
  f->more[0] = fma_8(f->by[0], set_8(ZERO), found[1]);
}

INLINE uint64_t u64_at(const void *place) {
  uint64_t bits;
  memcpy(&bits, place, 8);
  return bits;
}

#define FACTORS(kind) INLINE void factors_##kind(const uint8_t *block, int count, factors *f)
FACTORS(q4_0) { factors_apart(block, 18, count, 0x1p-4f, f); }
FACTORS(q4_1) { factors_and_more(block, 20, count, 0x1p-4f, f); }
FACTORS(q5_0) { factors_apart(block, 22, count, 0x1p-3f, f); }
FACTORS(q5_1) { factors_and_more(block, 24, count, 0x1p-3f, f); }
FACTORS(q8_0) { factors_apart(block, 34, count, 1, f); }
FACTORS(q2_k) {
  (void)count;
  for (int n = 0; n < 2; n++) {
    uint64_t both = u64_at(block + 8 * n);
    f->by[n] = half_at(block + 80) * 0x1p-6f * floats_of_unsigned(both & 0x0f0f0f0f0f0f0f0f);
    f->more[n] = less(f->by[n], half_at(block + 82) * floats_of_unsigned(both >> 4 & 0x0f0f0f0f0f0f0f0f));
  }
}
FACTORS(q3_k) {
  (void)count;
  for (int n = 0; n < 2; n++) {
    uint64_t low = u64_at(block + 96) >> 4 * n & 0x0f0f0f0f0f0f0f0f, high = u32_at(block + 104) >> 4 * n;
    uint64_t scales = low | ((high | high << 30) & 0x0303030303030303) << 4;
    f->by[n] = half_at(block + 108) * 0x1p-5f * (floats_of_unsigned(scales) - 32);
  }
}
/* Of Q4_K and Q5_K. */
INLINE void factors_and_offsets(const uint8_t *block, float unit, factors *f) {
  uint32_t first = u32_at(block + 4), second = u32_at(block + 8), third = u32_at(block + 12);
  uint64_t scales = (third & 0x0f0f0f0f) | (first >> 6 & 0x03030303) << 4;
  uint64_t least = (third >> 4 & 0x0f0f0f0f) | (second >> 6 & 0x03030303) << 4;
  scales = scales << 32 | (first & 0x3f3f3f3f), least = least << 32 | (second & 0x3f3f3f3f);
  f->by[0] = half_at(block) * unit * floats_of_unsigned(scales);
  f->more[0] = less(f->by[0], half_at(block + 2) * floats_of_unsigned(least));
}
FACTORS(q4_k) { (void)count, factors_and_offsets(block, 0x1p-4f, f); }
FACTORS(q5_k) { (void)count, factors_and_offsets(block, 0x1p-3f, f); }
FACTORS(q6_k) {
  (void)count;
  for (int n = 0; n < 2; n++) f->by[n] = half_at(block + 208) * 0x1p-2f * floats_of_signed(u64_at(block + 192 + 8 * n));
}
FACTORS(iq4_nl) { factors_apart(block, 18, count, 1, f); }
FACTORS(iq4_xs) {
  uint64_t low = u32_at(block + 4), high = u16_at(block + 2); /* halves and quarters of bytes, to be in bytes */
  (void)count;
  low = (low | low << 16) & 0x0000ffff0000ffff;
  low = (low | low << 8) & 0x00ff00ff00ff00ff;
  low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
  high = (high | high << 24) & 0x000000ff000000ff;
  high = (high | high << 12) & 0x000f000f000f000f;
  high = (high | high << 6) & 0x0303030303030303;
  f->by[0] = half_at(block) * (floats_of_unsigned(low | high << 4) - 32);
}
FACTORS(tq2_0) { (void)count, f->by[0] = set_8(half_at(block + 64)); }
FACTORS(mxfp4) {
  u32x8 exponents = {0}, is_least;
  for (int n = 0; n < count; n++) exponents[n] = block[17 * n];
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

/* Words of codes, of even columns and odd ones; and the same less ZERO, for several rows of x. */
INLINE words split(u8v some) {
  u16v both = (u16v)some;
  return (words){(s16v)(both & 0xff), (s16v)(both >> 8)};
}
INLINE words split_centred(u8v some) {
  u16v both = (u16v)(some ^ ZERO);
  return (words){(s16v)(both << 8) >> 8, (s16v)both >> 8};
}

#if W > 1
#define BESIDE_EACH_OTHER 4 /* rows of x for which codes are taken apart once; and of the last ones */
#define TWO 2
#define UNROLLED _Pragma("GCC unroll 8")
#else
#define BESIDE_EACH_OTHER 1
#define TWO 1
#define UNROLLED
#endif

/* The factors of a chunk for a row of x, in `by`; what is added to the numbers is multiplied by the sums of x. */
INLINE void factors_for(const chunk *x, const factors *f, line *by, f32x8 *more, const int of_16, const int has_more) {
  for (int n = 0; n <= of_16; n++) {
    put_line(by, f->by[n] * load_8(of_16 ? x->scales_of_16 + 8 * n : x->scales), n);
    if (has_more) *more = fma_8(f->more[n], load_8(of_16 ? x->sums_of_16 + 8 * n : x->sums), *more);
  }
}

/* The columns of a row of x that is multiplied alone are not taken apart, where there are products of bytes. */
INLINE vs dot(u8v some, const chunk *x, int group, int limb, const int is_alone) {
  const int16_t *even = x->limbs[group / 2][limb][0] + group % 2 * 16, *odd = x->limbs[group / 2][limb][1] + group % 2 * 16;
  const int32_t *start = x->starts[group / 2][limb] + group % 2 * 8;
#if defined(WITH_VNNI)
  if (is_alone) {
    __m512i high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), (__m512i)some, l_load(even));
    high = _mm512_add_epi32(_mm512_slli_epi32(high, 8), l_load(start));
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(high, (__m512i)some, l_load(odd)));
  }
#endif
  return l_dot(is_alone ? split(some) : split_centred(some), even, odd, start, is_alone);
}

INLINE vs added_group(vs sum, u8v some, const chunk *x, int group, vs by, const int has_second, const int is_alone) {
  vs found = dot(some, x, group, 0, is_alone);
  if (has_second) found = s_fma(dot(some, x, group, 1, is_alone), s_set(0x1p-15f), found);
  return s_fma(found, by, sum);
}

#define AT_A_TIME 4096 /* columns of all rows of x beside each other, whose integers stay in the first cache */

typedef struct {
  vs sums[2 / GROUPS];
  f32x8 more;
} limb_sums;

/* Vector by vector: a copy of the whole would read what was just written in parts. */
INLINE void put_sums(limb_sums *to, const limb_sums *from) {
  for (int n = 0; n < 2 / GROUPS; n++) to->sums[n] = from->sums[n];
  to->more = from->more;
}

/* Whether a row of x has second limbs in these columns. */
INLINE int has_seconds(const chunk *x, int64_t step, int64_t rows, int64_t columns) {
  int found = 0;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t at = 0; at < columns; at += CHUNK) found |= x[r * step + at / CHUNK].has_second;
  return found;
}

#define SOME_LIMBS(kind, rows, is_alone)                                                                               \
  if (has_second) /* where it is zero, it adds nothing */                                                              \
    some_limbs_##kind(bytes, some, from, step, sums[p], ahead, rows, 1, is_alone);                                     \
  else                                                                                                                 \
    some_limbs_##kind(bytes, some, from, step, sums[p], ahead, rows, 0, is_alone);

#define DEFINE_LIMBS(kind, of_16, has_more)                                                                            \
  INLINE void chunk_##kind(const uint8_t *bytes, int count, const chunk *x, int64_t step, limb_sums *all,              \
                           const int rows, const int has_second, const int is_alone) {                                 \
    const int is_one = NUMBERS_##kind == 32, nbytes = BYTES_##kind; /* a group of a block of its own */                \
    line by[BESIDE_EACH_OTHER];                                                                                        \
    factors f;                                                                                                         \
    factors_##kind(bytes, count, &f);                                                                                  \
    for (int r = 0; r < rows; r++) factors_for(x + r * step, &f, by + r, &all[r].more, of_16, has_more);               \
    UNROLLED for (int group = 0; group < count; group += GROUPS) {                                                     \
      const uint8_t *block = bytes + is_one * group * nbytes;                                                          \
      u8v some = codes_##kind(block, block + (is_one && group + 1 < count) * nbytes, group);                           \
      for (int r = 0; r < rows; r++) {                                                                                 \
        vs factor = of_16 ? s_of_16(by + r, group) : s_of_32(by + r, group), *sum = &all[r].sums[group % 2];           \
        *sum = added_group(*sum, some, x + r * step, group, factor, has_second, is_alone);                             \
      }                                                                                                                \
    }                                                                                                                  \
  }                                                                                                                    \
  INLINE void some_limbs_##kind(const uint8_t *bytes, int64_t columns, const chunk *x, int64_t step, limb_sums *to,    \
                                int64_t ahead, const int rows, const int has_second, const int is_alone) {             \
    const int nbytes = CHUNK / NUMBERS_##kind * BYTES_##kind;                                                          \
    limb_sums all[BESIDE_EACH_OTHER];                                                                                  \
    for (int r = 0; r < rows; r++) put_sums(all + r, to + r);                                                          \
    for (; columns >= CHUNK; columns -= CHUNK, x++, bytes += nbytes) {                                                 \
      for (int at = 0; at < nbytes; at += 64) __builtin_prefetch(bytes + ahead + at);                                  \
      chunk_##kind(bytes, CHUNK / 32, x, step, all, rows, has_second, is_alone);                                       \
    }                                                                                                                  \
    if (NUMBERS_##kind == 32 && columns) chunk_##kind(bytes, (int)columns / 32, x, step, all, rows, has_second, is_alone);\
    for (int r = 0; r < rows; r++) put_sums(to + r, all + r);                                                          \
  }                                                                                                                    \
  static void limbs_##kind(const stored_row *stored, int64_t count, int64_t columns, const chunk *x, int64_t step,     \
                           int64_t x_rows, float (*out)[MOST_ROWS]) {                                                  \
    limb_sums sums[AT_ONCE][BESIDE_EACH_OTHER], none = {0};                                                            \
    int64_t ahead = count > 2 ? stored[2].bytes - stored[0].bytes : 0;                                                 \
    for (int64_t r = 0, rows; r < x_rows; r += rows, x += rows * step) {                                               \
      rows = x_rows - r < TWO ? 1 : x_rows - r < BESIDE_EACH_OTHER ? TWO : BESIDE_EACH_OTHER;                          \
      int64_t most = AT_A_TIME / rows;                                                                                 \
      for (int64_t p = 0; p < count; p++)                                                                              \
        for (int64_t n = 0; n < rows; n++) put_sums(sums[p] + n, &none);                                               \
      for (int64_t at = 0; at < columns; at += most) {                                                                 \
        int64_t some = columns - at < most ? columns - at : most;                                                      \
        const chunk *from = x + at / CHUNK;                                                                            \
        int has_second = has_seconds(from, step, rows, some);                                                          \
        for (int64_t p = 0; p < count; p++) {                                                                          \
          const uint8_t *bytes = stored[p].bytes + at / NUMBERS_##kind * BYTES_##kind;                                 \
          if (x_rows == 1) {                                                                                           \
            SOME_LIMBS(kind, 1, 1)                                                                                     \
          } else if (rows == 1) {                                                                                      \
            SOME_LIMBS(kind, 1, 0)                                                                                     \
          } else if (rows == TWO) {                                                                                    \
            SOME_LIMBS(kind, TWO, 0)                                                                                   \
          } else {                                                                                                     \
            SOME_LIMBS(kind, BESIDE_EACH_OTHER, 0)                                                                     \
          }                                                                                                            \
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

/* The numbers of a group: as words, those of even columns apart from those of odd ones, or as bytes, higher and lower.
 * Gives the sums of four. */
INLINE void put_limb(chunk *to, int group, int limb, const int16_t from[32], const int is_alone, int32_t sums[8]) {
  int16_t *even = to->limbs[group / 2][limb][0] + group % 2 * 16, *odd = to->limbs[group / 2][limb][1] + group % 2 * 16;
  int32_t *start = to->starts[group / 2][limb] + group % 2 * 8, pairs[16], two[16];
  int8_t *high = (int8_t *)even, *low = (int8_t *)odd;
  int64_t four[8];
  memcpy(pairs, from, sizeof pairs);
  for (int n = 0; n < 32 && IN_BYTES && is_alone; n++) low[n] = (int8_t)from[n];
  for (int n = 0; n < 32 && IN_BYTES && is_alone; n++) high[n] = (int8_t)((from[n] + ZERO) >> 8);
  for (int n = 0; n < 16 && !(IN_BYTES && is_alone); n++) even[n] = (int16_t)pairs[n];
  for (int n = 0; n < 16 && !(IN_BYTES && is_alone); n++) odd[n] = (int16_t)(pairs[n] >> 16);
  for (int n = 0; n < 16; n++) two[n] = (int16_t)pairs[n] + (pairs[n] >> 16);
  memcpy(four, two, sizeof four);
  for (int n = 0; n < 8; n++) sums[n] = (int32_t)four[n] + (int32_t)(four[n] >> 32);
  for (int n = 0; n < 8; n++) start[n] = -ZERO * sums[n];
}

#define LEAST_BESIDE (3 << 18)

/* A row of x, filled up with zeros to 32 columns, as chunks; 1 if some of its numbers are not finite, or too large or
 * small for integers. The largest of 32 numbers has 14 bits in the first limb; the second one holds 15 more.
 *
 * For products in bfloat16, which are rounded to 8 bits, it is left out where the first one is within 2^-11 of the
 * numbers beside the largest one, all in all: it then loses less than the rounding of a dense weight would. */
int NAME(prepare_limbs)(const float *x, int64_t columns, int is_short, int is_alone, chunk *to) {
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
    float scaled[32];
    int16_t limbs[32];
    int32_t beside = 0, largest = 0, fours[2][8] = {{0}}; /* sums of squares of quarters, which 32 bits hold */
    for (int n = 0; n < 32; n++) scaled[n] = x[at + n] * up;
    for (int n = 0; n < 32; n++) limbs[n] = (int16_t)(int)nearest(scaled[n]);
    for (int n = 0; n < 32; n++) {
      int32_t quarter = limbs[n] / 4;
      beside += quarter * quarter;
      largest = quarter * quarter > largest ? quarter * quarter : largest;
    }
    put_limb(here, group, 0, limbs, is_alone, fours[0]);
    if (!is_short || beside - largest < LEAST_BESIDE) {
      int16_t any = 0;
      for (int n = 0; n < 32; n++) limbs[n] = (int16_t)(int)nearest((scaled[n] - (float)limbs[n]) * 0x1p15f);
      for (int n = 0; n < 32; n++) any |= limbs[n];
      here->has_second |= any != 0;
      put_limb(here, group, 1, limbs, is_alone, fours[1]);
    }
    double sums[2];
    for (int half = 0; half < 2; half++) {
      const int32_t *high = fours[0] + 4 * half, *low = fours[1] + 4 * half;
      sums[half] = ((double)(high[0] + high[1] + high[2] + high[3]) +
                    (double)(low[0] + low[1] + low[2] + low[3]) * 0x1p-15) * (double)scale;
      here->scales_of_16[2 * group + half] = scale;
      here->sums_of_16[2 * group + half] = (float)sums[half];
    }
    here->scales[group] = scale;
    here->sums[group] = (float)(sums[0] + sums[1]);
  }
  return 0;
}

#define LIMB_ENTRY(kind, of_16, has_more) [KIND_##kind] = limbs_##kind,
const multiply_limbs NAME(limbs)[BLOCKS] = {LIMB_KINDS(LIMB_ENTRY)};
