/* Compares an instruction set with plain C: all kinds, decoded to each dtype bit for bit, and multiplied.
 *
 * For processors that the tests in Python do not run on: see `make kernels-arm`.
 */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../offload/kernels/kernels.h"

extern int offload_kernels_levels(void);
extern int offload_decode(const matrix *, const int64_t *, int64_t, int64_t, void *, int64_t, int, int, int,
                          const void *, unsigned);
extern int offload_multiply(const product *, const void *, int64_t, const void *, void *);

#define ROWS 24
#define MOST_COLUMNS 2048
#define X_ROWS 5

static uint8_t bytes[ROWS * MOST_COLUMNS * 4], words_of_zeros[ROWS * MOST_COLUMNS * 4];
static float scales[ROWS * MOST_COLUMNS], found[2][ROWS * MOST_COLUMNS], x[X_ROWS * MOST_COLUMNS];
static int8_t book[2048 * 8];
static int failed;

static uint32_t state = 1;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }

static int is_nan(const float *from, int at, int dtype) {
  uint16_t half;
  if (dtype == FLOAT32) return isnan(from[at]);
  memcpy(&half, (const uint16_t *)from + at, 2);
  half &= 0x7fff;
  return half > (dtype == FLOAT16 ? 0x7c00 : 0x7f80);
}

static void multiply(const matrix *packed, int rows, const float *from, int x_rows, float *to, int level) {
  part all = {packed, rows, 0};
  product given = {&all, 1, MOST_COLUMNS, rows, FLOAT32, 0, FLOAT32, level, NULL, 1};
  offload_multiply(&given, from, x_rows, NULL, to);
}

static void compare(const char *kind, const matrix *packed, int rows, int level) {
  int columns = (int)packed->columns;
  for (int dtype = FLOAT32; dtype <= BFLOAT16; dtype++) {
    int size = dtype == FLOAT32 ? 4 : 2;
    for (int n = 0; n < 2; n++) offload_decode(packed, NULL, 0, rows, found[n], columns, dtype, 0, n ? level : 0, NULL, 1);
    for (int at = 0; at < rows * columns; at++) {
      int is_same = !memcmp((char *)found[0] + at * size, (char *)found[1] + at * size, (size_t)size);
      if (is_same || (is_nan(found[0], at, dtype) && is_nan(found[1], at, dtype))) continue;
      printf("%s, %d columns: number %d differs in dtype %d\n", kind, columns, at, dtype);
      failed = 1;
      break;
    }
  }
  offload_decode(packed, NULL, 0, rows, found[0], columns, FLOAT32, 0, 0, NULL, 1);
  static float product[X_ROWS * ROWS], alone[ROWS], plain[X_ROWS * ROWS];
  multiply(packed, rows, x, X_ROWS, product, level);
  multiply(packed, rows, x + 3 * MOST_COLUMNS, 1, alone, level);
  multiply(packed, rows, x, X_ROWS, plain, 0);
  for (int n = 0; packed->kind < BLOCKS && n < X_ROWS * rows; n++) {
    if (!memcmp(&plain[n], &product[n], 4) || (isnan(plain[n]) && isnan(product[n]))) continue;
    printf("%s: product %d is %g, in plain C %g\n", kind, n, (double)product[n], (double)plain[n]);
    failed = 1;
    break;
  }
  for (int n = 0; n < rows; n++) {
    double exact = 0, total = 0;
    for (int c = 0; c < columns; c++) {
      double one = (double)found[0][n * columns + c] * (double)x[3 * MOST_COLUMNS + c];
      exact += one;
      total += fabs(one);
    }
    if (total > 1e30 || isnan(total)) continue;
    int is_near = fabs(exact - product[3 * rows + n]) <= 1e-6 * total + 1e-30;
    if (is_near && !memcmp(&product[3 * rows + n], &alone[n], 4)) continue;
    printf("%s, %d columns: product %d is %g, alone %g, in place of %g\n", kind, columns, n,
           (double)product[3 * rows + n], (double)alone[n], exact);
    failed = 1;
    break;
  }
}

int main(void) {
  int level = offload_kernels_levels();
  for (size_t n = 0; n < sizeof bytes; n++) bytes[n] = (uint8_t)(next() >> 24);
  for (size_t n = 0; n < sizeof words_of_zeros; n++) words_of_zeros[n] = (uint8_t)(next() >> 24);
  for (int n = 0; n < ROWS * MOST_COLUMNS; n++) scales[n] = (float)(next() >> 8) / 1e7f;
  for (int n = 0; n < X_ROWS * MOST_COLUMNS; n++) x[n] = (float)(next() >> 8) / (1 << 23) - 1;
  int kind = 0;
#define TRY_BLOCKS(name, numbers, nbytes)                                                                   \
  {                                                                                                         \
    matrix packed = {.rows = bytes, .step = 512 / numbers * nbytes, .columns = 512, .kind = kind++,         \
                     .scale_dtype = -1, .zero_dtype = -1, .group = 512, .rows_per_scale = 1, .divisor = 1,  \
                     .last = 1};                                                                            \
    compare(#name, &packed, ROWS, level);                                                                   \
  }
  BLOCK_KINDS(TRY_BLOCKS)
#define TRY_NUMBERS(name, nbytes)                                                                               \
  for (int columns = 16; columns <= 1056; columns += 130)                                                       \
    for (int group = 16; group <= 128; group *= 2) {                                                            \
      int groups = (columns + group - 1) / group;                                                               \
      matrix packed = {.rows = bytes, .step = (columns * nbytes + 31) / 32 + 3, .columns = columns, .kind = kind, \
                       .scale_dtype = FLOAT32, .zero_dtype = -1, .group = group, .rows_per_scale = 1,           \
                       .scales = (const uint8_t *)scales, .scale_step = groups * 4, .divisor = 1, .last = 1};   \
      for (int n = 0; n < 16; n++) packed.table[n] = (float)n - 7.5f;                                           \
      compare(#name, &packed, ROWS, level);                                                                     \
    }                                                                                                           \
  kind++;
  NUMBER_KINDS(TRY_NUMBERS)
  for (size_t n = 0; n < sizeof book; n++) book[n] = (int8_t)(1 + (next() >> 26));
#define TRY_CODED(name, numbers, nbytes)                                                                    \
  {                                                                                                         \
    matrix packed = {.rows = bytes, .step = 512 / numbers * nbytes, .columns = 512, .kind = kind++,         \
                     .scale_dtype = -1, .zero_dtype = -1, .group = 512, .rows_per_scale = 1, .divisor = 1,  \
                     .last = 1, .book = book};                                                              \
    compare(#name, &packed, ROWS, level);                                                                   \
  }
  CODED_KINDS(TRY_CODED)
  for (int is_turned = 0; is_turned < 2; is_turned++, kind++)
    for (int bits = is_turned ? 4 : 2; bits <= (is_turned ? 4 : 8); bits *= 2) {
      int wide = is_turned ? ROWS / 8 : ROWS;
      matrix packed = {.rows = bytes, .step = wide * 4, .columns = 256, .kind = kind, .scale_dtype = FLOAT32,
                       .zero_dtype = -1, .group = 64, .rows_per_scale = 1, .scales = (const uint8_t *)scales,
                       .scale_step = ROWS * 4, .zeros = words_of_zeros, .zero_step = ROWS * bits / 8, .divisor = 1,
                       .last = 1, .bits = bits, .less = !is_turned, .outputs = ROWS};
      compare(is_turned ? "outputs in words" : "inputs in words", &packed, ROWS, level);
    }
  printf("level %d: %s\n", level, failed ? "differs" : "as plain C");
  return failed || level == 0;
}
