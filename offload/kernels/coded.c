/* Blocks whose numbers are codes, of a codebook or of few bits: 32 of them at a time, as bytes and factors.
 *
 * Always true:
 * - each number is rounded as in the `gguf` package's `dequantize`: first the factor of its group, then the product
 * - a codebook is the caller's, and has as many entries as the codes of its kind can name
 *
 * Source of the layouts: llama.cpp, ggml/src/ggml-common.h and ggml-quants.c; of quarters: transformers'
 * integrations/bitnet.py.
 */

#include "kernels.h"

#include <string.h>

#include "simd.h"

static void set_factors(coded *to, float first, float second) {
  to->factors[0] = first;
  to->factors[1] = second;
  to->unit = 1;
}

/* Puts eight numbers of a codebook, or two times four, negated where a bit of `signs` is set. */
static void put_eight(coded *to, int place, uint64_t numbers, unsigned signs) {
  const uint64_t ones = 0x0101010101010101u;
  uint64_t bits = signs * ones & 0x8040201008040201u;          /* one bit of each byte */
  uint64_t negated = (bits + 0x7f * ones) >> 7 & ones;         /* 1 for each byte that has it */
  numbers = (numbers ^ negated * 0xff) + negated;              /* none is 0, so that no byte overflows */
  memcpy(to->numbers + 8 * place, &numbers, 8);
}

static uint64_t eight_at(const int8_t *book, unsigned code) {
  uint64_t numbers;
  memcpy(&numbers, book + 8 * code, 8);
  return numbers;
}

static uint64_t twice_four_at(const int8_t *book, unsigned first, unsigned second) {
  return (uint64_t)u32_at(book + 4 * first) | (uint64_t)u32_at(book + 4 * second) << 32;
}

/* Seven signs, and an eighth that makes their number even. */
static unsigned eight_signs(unsigned seven) {
  unsigned parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  return seven | ((parity ^ parity >> 1) & 1) << 7;
}

static void unpack_iq2_xxs(const uint8_t *block, int group, const int8_t *book, coded *to) {
  const uint8_t *codes = block + 2 + 8 * group;
  uint32_t rest = u32_at(codes + 4);
  float factor = half_at(block) * (0.5f + (float)(rest >> 28)) * 0.25f;
  set_factors(to, factor, factor);
  for (int n = 0; n < 4; n++) put_eight(to, n, eight_at(book, codes[n]), eight_signs(rest >> 7 * n & 127));
}

/* The factors of both halves of a group, from the halves of a byte. */
static void set_quarters(coded *to, float factor, unsigned scales) {
  set_factors(to, factor * (0.5f + (float)(scales & 15)) * 0.25f, factor * (0.5f + (float)(scales >> 4)) * 0.25f);
}

static void unpack_iq2_xs(const uint8_t *block, int group, const int8_t *book, coded *to) {
  set_quarters(to, half_at(block), block[66 + group]);
  for (int n = 0; n < 4; n++) {
    unsigned code = u16_at(block + 2 + 2 * (4 * group + n));
    put_eight(to, n, eight_at(book, code & 511), eight_signs(code >> 9));
  }
}

static void unpack_iq2_s(const uint8_t *block, int group, const int8_t *book, coded *to) {
  set_quarters(to, half_at(block), block[74 + group]);
  for (int n = 0; n < 4; n++) {
    unsigned code = block[2 + 4 * group + n] | (block[66 + group] >> 2 * n & 3u) << 8;
    put_eight(to, n, eight_at(book, code), block[34 + 4 * group + n]);
  }
}

static void unpack_iq3_xxs(const uint8_t *block, int group, const int8_t *book, coded *to) {
  const uint8_t *codes = block + 2 + 8 * group;
  uint32_t rest = u32_at(block + 66 + 4 * group);
  float factor = half_at(block) * (0.5f + (float)(rest >> 28)) * 0.5f;
  set_factors(to, factor, factor);
  for (int n = 0; n < 4; n++)
    put_eight(to, n, twice_four_at(book, codes[2 * n], codes[2 * n + 1]), eight_signs(rest >> 7 * n & 127));
}

static void unpack_iq3_s(const uint8_t *block, int group, const int8_t *book, coded *to) {
  const uint8_t *codes = block + 2 + 8 * group;
  unsigned high = block[66 + group], scale = block[106 + group / 2] >> 4 * (group % 2) & 15;
  float factor = half_at(block) * (float)(1 + 2 * scale);
  set_factors(to, factor, factor);
  for (int n = 0; n < 4; n++) {
    unsigned first = codes[2 * n] | (high >> 2 * n & 1) << 8, second = codes[2 * n + 1] | (high >> (2 * n + 1) & 1) << 8;
    put_eight(to, n, twice_four_at(book, first, second), block[74 + 4 * group + n]);
  }
}

/* Numbers -1, 0 and 1, and an eighth more or less, in eighths. */
static void put_eighths(coded *to, int place, uint64_t numbers, int less) {
  const uint64_t ones = 0x0101010101010101u, signs = 0x80 * ones;
  uint64_t eighths = (numbers & 0x1f * ones) << 3, more = less ? 0xff * ones : ones;
  eighths = ((eighths & ~signs) + (more & ~signs)) ^ ((eighths ^ more) & signs); /* byte by byte */
  memcpy(to->numbers + 8 * place, &eighths, 8);
  to->unit = 0.125f;
}

static void unpack_iq1_s(const uint8_t *block, int group, const int8_t *book, coded *to) {
  unsigned high = u16_at(block + 34 + 2 * group);
  float factor = half_at(block) * (float)(2 * (high >> 12 & 7) + 1);
  set_factors(to, factor, factor);
  for (int n = 0; n < 4; n++)
    put_eighths(to, n, eight_at(book, block[2 + 4 * group + n] | (high >> 3 * n & 7) << 8), high >> 15);
}

static void unpack_iq1_m(const uint8_t *block, int group, const int8_t *book, coded *to) {
  unsigned half = 0, scales = u16_at(block + 48 + 2 * (group / 2)) >> 6 * (group % 2);
  for (int n = 0; n < 4; n++) half |= (u16_at(block + 48 + 2 * n) & 0xf000u) >> (12 - 4 * n);
  float factor = half_to_float((uint16_t)half);
  set_factors(to, factor * (float)(2 * (scales & 7) + 1), factor * (float)(2 * (scales >> 3 & 7) + 1));
  for (int n = 0; n < 4; n++) {
    unsigned high = block[32 + 2 * group + n / 2] >> 4 * (n % 2);
    put_eighths(to, n, eight_at(book, block[4 * group + n] | (high & 7) << 8), high >> 3 & 1);
  }
}

static void put_threes(int8_t *to, const uint8_t *bytes, int count, int power) {
  for (int n = 0; n < count; n++) to[n] = (int8_t)(((uint8_t)(bytes[n] * power) * 3 >> 8) - 1);
}

/* Five numbers of three in a byte, and four in the last ones: multiplied, what overflows is the next. */
static void unpack_tq1_0(const uint8_t *block, int group, const int8_t *book, coded *to) {
  static const uint8_t POWERS[5] = {1, 3, 9, 27, 81};
  (void)book;
  set_factors(to, half_at(block + 52), half_at(block + 52));
  if (group < 5)
    put_threes(to->numbers, block, 32, POWERS[group]);
  else
    put_threes(to->numbers, block + 32, 16, POWERS[2 * group - 10]);
  if (group == 5 || group == 6) put_threes(to->numbers + 16, block + 32, 16, POWERS[2 * group - 9]);
  for (int n = 0; group == 7 && n < 4; n++) put_threes(to->numbers + 16 + 4 * n, block + 48, 4, POWERS[n]);
}

/* Half of an e4m3 number without a sign. */
static float half_of_e4m3(uint8_t byte) {
  unsigned bits = byte & 0x7f;
  if (byte == 0x7f) return 0;
  return bits < 8 ? (float)bits * 0x1p-10f : bits_to_float((bits << 20) + (119u << 23));
}

static void unpack_nvfp4(const uint8_t *block, int group, const int8_t *book, coded *to) {
  static const int8_t E2M1_TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  (void)book;
  set_factors(to, half_of_e4m3(block[2 * group]), half_of_e4m3(block[2 * group + 1]));
  for (int half = 0; half < 2; half++)
    for (int n = 0; n < 8; n++) {
      uint8_t codes = block[4 + 16 * group + 8 * half + n];
      to->numbers[16 * half + n] = E2M1_TWICE[codes & 15];
      to->numbers[16 * half + 8 + n] = E2M1_TWICE[codes >> 4];
    }
}

/* Two of the bits of each byte, minus 1. */
#define DEFINE_QUARTER(which)                                                                                 \
  static void unpack_quarter_##which(const uint8_t *block, int group, const int8_t *book, coded *to) {        \
    (void)group, (void)book;                                                                                  \
    set_factors(to, 1, 1);                                                                                    \
    for (int n = 0; n < 32; n++) to->numbers[n] = (int8_t)((block[n] >> 2 * which & 3) - 1);                  \
  }

DEFINE_QUARTER(0)
DEFINE_QUARTER(1)
DEFINE_QUARTER(2)
DEFINE_QUARTER(3)

#define CODED_ENTRY(kind, numbers, nbytes) {unpack_##kind, numbers, nbytes},
const coded_kind CODED[] = {CODED_KINDS(CODED_ENTRY)};
