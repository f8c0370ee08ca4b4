/* The k largest log-probabilities of a row, packed: `logps.py` has the layout, and the same in torch.
 *
 * Always true:
 * - a row is read and written within its bytes; what is asked for was checked in Python
 * - numbers are computed in float32, in one order: the bytes are those of torch's chain
 */

#include "kernels.h"

#include <math.h>
#include <string.h>

#include "simd.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
  uint8_t *to;
  uint64_t bits;
  int count;
} stream;

INLINE void put(stream *out, uint64_t number, int width) {
  out->bits |= number << out->count;
  out->count += width;
  if (out->count < 32) return;
  uint32_t word = (uint32_t)out->bits;
  memcpy(out->to, &word, 4);
  out->to += 4;
  out->bits >>= 32;
  out->count -= 32;
}

INLINE void put_rest(stream *out) {
  for (; out->count > 0; out->count -= 8, out->bits >>= 8) *out->to++ = (uint8_t)out->bits;
}

/* The number of so many bits at a bit, 57 at most, of memory that goes on for 8 bytes. */
INLINE uint64_t number_at(const uint8_t *from, int64_t bit, int width) {
  uint64_t word;
  memcpy(&word, from + (bit >> 3), 8);
  return word >> (bit & 7) & ((1ull << width) - 1);
}

EXPORT void offload_pack_logps(const int64_t *ids, const float *logps, int64_t rows, int64_t k, int id_bits, int bits,
                               uint8_t *to) {
  int64_t step = 4 + (k * (id_bits + bits) + 7) / 8;
  float most = (float)((1 << bits) - 2);
  for (int64_t row = 0; row < rows; row++, ids += k, logps += k, to += step) {
    int64_t finite = k; /* those after are -inf: they are sorted */
    while (finite && logps[finite - 1] == -INFINITY) finite--;
    float high = finite ? logps[0] : -INFINITY, low = finite ? logps[finite - 1] : -INFINITY;
    uint16_t ends[2] = {float_to_half(high), float_to_half(low)};
    float first = half_to_float(ends[0]), last = half_to_float(ends[1]);
    float scale = first > last ? most / (first - last) : 0;
    memcpy(to, ends, 4);
    stream out = {to + 4, 0, 0};
    for (int64_t n = 0; n < k; n++) put(&out, (uint64_t)ids[n], id_bits);
    for (int64_t n = 0; n < finite; n++) {
      float code = (first - logps[n]) * scale + 0.5f;
      code = code < 0 ? 0 : code > most ? most : code;
      if (logps[n] == low) code = most;
      if (logps[n] == high) code = 0;
      put(&out, (uint64_t)(int32_t)code, bits);
    }
    for (int64_t n = finite; n < k; n++) put(&out, (1u << bits) - 1, bits);
    put_rest(&out);
  }
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Where the bytes of eight numbers of so many bits, 25 at most, are: four in each half of a vector. */
typedef struct {
  __m256i bytes, shifts;
  int64_t halves[2];
} places;

__attribute__((target("avx2"))) static places places_of(int64_t bit, int width) {
  int32_t bytes[8], shifts[8];
  places found;
  for (int n = 0; n < 8; n++) {
    int64_t at = bit + n * width;
    if (n % 4 == 0) found.halves[n / 4] = at >> 3;
    bytes[n] = 0x03020100 + 0x01010101 * (int32_t)((at >> 3) - found.halves[n / 4]);
    shifts[n] = at & 7;
  }
  found.bytes = _mm256_loadu_si256((const __m256i *)bytes);
  found.shifts = _mm256_loadu_si256((const __m256i *)shifts);
  return found;
}

__attribute__((target("avx2"))) INLINE __m256i eight_at(const uint8_t *from, const places *at, int width) {
  __m256i words = _mm256_loadu2_m128i((const __m128i *)(from + at->halves[1]), (const __m128i *)(from + at->halves[0]));
  words = _mm256_srlv_epi32(_mm256_shuffle_epi8(words, at->bytes), at->shifts);
  return _mm256_and_si256(words, _mm256_set1_epi32((1 << width) - 1));
}

/* As many of a row's numbers as are whole eights; returns how many. */
__attribute__((target("avx2"))) static int64_t unpack_eights(const uint8_t *from, int64_t k, int id_bits, int bits,
                                                             float first, float last, float width, int64_t *ids,
                                                             float *logps) {
  places of_ids = places_of(0, id_bits), of_codes = places_of(k * id_bits, bits);
  __m256i most = _mm256_set1_epi32((1 << bits) - 2);
  int64_t n = 0;
  for (; n + 8 <= k; n += 8) {
    __m256i eight = eight_at(from + n / 8 * id_bits, &of_ids, id_bits);
    _mm256_storeu_si256((__m256i *)(ids + n), _mm256_cvtepi32_epi64(_mm256_castsi256_si128(eight)));
    _mm256_storeu_si256((__m256i *)(ids + n + 4), _mm256_cvtepi32_epi64(_mm256_extracti128_si256(eight, 1)));
    __m256i codes = eight_at(from + n / 8 * bits, &of_codes, bits);
    __m256 numbers = _mm256_mul_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(width));
    numbers = _mm256_add_ps(_mm256_set1_ps(first), numbers);
    __m256 is_last = _mm256_castsi256_ps(_mm256_cmpeq_epi32(codes, most));
    __m256 is_absent = _mm256_castsi256_ps(_mm256_cmpgt_epi32(codes, most));
    numbers = _mm256_blendv_ps(numbers, _mm256_set1_ps(last), is_last);
    _mm256_storeu_ps(logps + n, _mm256_blendv_ps(numbers, _mm256_set1_ps(-INFINITY), is_absent));
  }
  return n;
}
#endif

static void unpack_row(const uint8_t *from, int64_t k, int id_bits, int bits, int64_t *ids, float *logps, int level) {
  int32_t most = (1 << bits) - 2;
  float first = half_at(from), last = half_at(from + 2), width = (last - first) / (float)most;
  int64_t n = 0;
  from += 4;
#if defined(__x86_64__)
  if (level && id_bits <= 25) n = unpack_eights(from, k, id_bits, bits, first, last, width, ids, logps);
#endif
  for (; n < k; n++) {
    int32_t code = (int32_t)number_at(from, k * id_bits + n * bits, bits);
    float number = code == most ? last : first + (float)code * width;
    ids[n] = (int64_t)number_at(from, n * id_bits, id_bits);
    logps[n] = code > most ? -INFINITY : number;
  }
}

/* `scratch` has room for a row and 32 bytes; `level` as elsewhere: 0 is plain C. */
EXPORT void offload_unpack_logps(const uint8_t *from, int64_t rows, int64_t k, int id_bits, int bits, int64_t *ids,
                                 float *logps, uint8_t *scratch, int level) {
  int64_t step = 4 + (k * (id_bits + bits) + 7) / 8;
  for (int64_t row = 0; row < rows; row++, ids += k, logps += k, from += step) {
    int is_last = (rows - row - 1) * step < 32;
    unpack_row(is_last ? memcpy(scratch, from, (size_t)step) : from, k, id_bits, bits, ids, logps, level);
  }
}
