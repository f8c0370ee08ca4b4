/* Decoding rows, and multiplying by rows, for one instruction set: NAME(x) is x with its suffix.
 *
 * Always true:
 * - a product is summed in one order, whatever the number of rows that are multiplied together or of threads; one with
 *   GGUF blocks is in limbs.h, and here for rows of x that integers do not hold
 * - nothing outside of the given rows is read
 */

#include "kernels.h"
#include "simd.h"

#include "gguf.h"
#include "numbers.h"

#define SUMS (W == 16 || W == 8 ? 2 : W == 4 ? 4 : 8) /* of each product, kept apart until the end */
#define TOGETHER (W == 16 ? 4 : 2) /* rows of x that are multiplied by two rows at a time */

INLINE void store(void *out, int64_t place, int dtype, vf value) {
  if (dtype == FLOAT32)
    store_f32((float *)out + place, value);
  else if (dtype == FLOAT16)
    store_f16((uint16_t *)out + place, value);
  else
    store_bf16((uint16_t *)out + place, value);
}

INLINE float total(vf sums[SUMS]) {
  vf sum = sums[0];
  for (int n = 1; n < SUMS; n++) sum = f_add(sum, sums[n]);
  return f_sum(sum);
}

/* Adds the products of 32 numbers to the sums. */
INLINE void add_products(vf sums[SUMS], const vf w[NV], const float *x) {
  for (int n = 0; n < NV; n++) sums[n % SUMS] = f_fma(w[n], f_load(x + n * W), sums[n % SUMS]);
}

#define NO_SUMS(sums) \
  for (int n = 0; n < SUMS; n++) sums[n] = f_zero();

/* Of two rows and all rows of x: as with one of each. */
INLINE void add_all_products(vf sums[2][TOGETHER][SUMS], const vf w[2][NV], const float *x, int64_t step) {
  for (int r = 0; r < TOGETHER; r++)
    for (int n = 0; n < NV; n++) {
      vf some = f_load(x + r * step + n * W);
      KEEP(some);
      for (int p = 0; p < 2; p++) sums[p][r][n % SUMS] = f_fma(w[p][n], some, sums[p][r][n % SUMS]);
    }
}

INLINE void all_totals(vf sums[2][TOGETHER][SUMS], float *out, int64_t out_step) {
  for (int p = 0; p < 2; p++)
    for (int r = 0; r < TOGETHER; r++) out[p * out_step + r] = total(sums[p][r]);
}

#define DEFINE_BLOCKS(kind, numbers, nbytes)                                                                           \
  static void decode_##kind(const stored_row *row, int64_t columns, void *out, int dtype) {                            \
    vf w[NV];                                                                                                          \
    const uint8_t *bytes = row->bytes;                                                                                 \
    for (int64_t at = 0; at < columns; at += numbers, bytes += nbytes)                                                 \
      _Pragma("GCC unroll 8") for (int group = 0; group < numbers / 32; group++) {                                     \
        unpack_##kind(bytes, group, w);                                                                                \
        for (int n = 0; n < NV; n++) store(out, at + 32 * group + n * W, dtype, w[n]);                                 \
      }                                                                                                                \
  }                                                                                                                    \
  static float dot_##kind(const stored_row *row, int64_t columns, const float *x) {                                    \
    vf w[NV], sums[SUMS];                                                                                              \
    const uint8_t *bytes = row->bytes;                                                                                 \
    NO_SUMS(sums)                                                                                                      \
    for (int64_t at = 0; at < columns; at += numbers, bytes += nbytes)                                                 \
      _Pragma("GCC unroll 8") for (int group = 0; group < numbers / 32; group++) {                                     \
        unpack_##kind(bytes, group, w);                                                                                \
        add_products(sums, w, x + at + 32 * group);                                                                    \
      }                                                                                                                \
    return total(sums);                                                                                                \
  }

#define DEFINE_NUMBERS(kind, nbytes)                                                                                   \
  INLINE void last_##kind(const stored_row *row, int64_t columns, float numbers[32]) {                                 \
    uint8_t bytes[nbytes] = {0}; /* so that none behind the row are read */                                            \
    int64_t whole = columns / 32 * 32;                                                                                 \
    vf w[NV];                                                                                                          \
    memcpy(bytes, row->bytes + whole / 32 * nbytes, (size_t)((columns - whole) * nbytes + 31) / 32);                   \
    scale by = scale_of(row, group_at(row, whole));                                                                    \
    unpack_##kind(bytes, &by, w);                                                                                      \
    for (int n = 0; n < NV; n++) store_f32(numbers + n * W, w[n]);                                                     \
    for (int64_t n = columns - whole; n < 32; n++) numbers[n] = 0; /* zero bytes may stand for others, and NaN */      \
  }                                                                                                                    \
  static void decode_##kind(const stored_row *row, int64_t columns, void *out, int dtype) {                            \
    vf w[NV];                                                                                                          \
    int64_t span = row->group < 32 ? 32 : row->group, at = 0, whole = columns / 32 * 32;                               \
    while (at < whole) {                                                                                               \
      scale by = scale_of(row, group_at(row, at));                                                                     \
      for (int64_t end = at + span < whole ? at + span : whole; at < end; at += 32) {                                  \
        unpack_##kind(row->bytes + at / 32 * nbytes, &by, w);                                                          \
        for (int n = 0; n < NV; n++) store(out, at + n * W, dtype, w[n]);                                              \
      }                                                                                                                \
    }                                                                                                                  \
    if (whole < columns) {                                                                                             \
      float numbers[32];                                                                                               \
      last_##kind(row, columns, numbers);                                                                              \
      for (; at < columns; at++) put_number(out, at, dtype, numbers[at - whole]);                                      \
    }                                                                                                                  \
  }                                                                                                                    \
  static float dot_##kind(const stored_row *row, int64_t columns, const float *x) {                                    \
    vf w[NV], sums[SUMS];                                                                                              \
    int64_t span = row->group < 32 ? 32 : row->group, at = 0, whole = columns / 32 * 32;                               \
    NO_SUMS(sums)                                                                                                      \
    while (at < whole) {                                                                                               \
      scale by = scale_of(row, group_at(row, at));                                                                     \
      for (int64_t end = at + span < whole ? at + span : whole; at < end; at += 32) {                                  \
        unpack_##kind(row->bytes + at / 32 * nbytes, &by, w);                                                          \
        add_products(sums, w, x + at);                                                                                 \
      }                                                                                                                \
    }                                                                                                                  \
    if (whole < columns) {                                                                                             \
      float numbers[32];                                                                                               \
      last_##kind(row, columns, numbers);                                                                              \
      for (int n = 0; n < NV; n++) w[n] = f_load(numbers + n * W);                                                     \
      add_products(sums, w, x + at);                                                                                   \
    }                                                                                                                  \
    return total(sums);                                                                                                \
  }                                                                                                                    \
  static void multiply_##kind(const stored_row rows[2], int64_t columns, const float *x, int64_t step, float *out,     \
                              int64_t out_step) {                                                                      \
    vf w[2][NV], sums[2][TOGETHER][SUMS];                                                                              \
    int64_t span = rows->group < 32 ? 32 : rows->group, at = 0, whole = columns / 32 * 32;                             \
    for (int p = 0; p < 2; p++)                                                                                        \
      for (int r = 0; r < TOGETHER; r++) NO_SUMS(sums[p][r])                                                           \
    while (at < whole) {                                                                                               \
      scale by[2] = {scale_of(rows, group_at(rows, at)), scale_of(rows + 1, group_at(rows, at))};                      \
      for (int64_t end = at + span < whole ? at + span : whole; at < end; at += 32) {                                  \
        for (int p = 0; p < 2; p++) unpack_##kind(rows[p].bytes + at / 32 * nbytes, by + p, w[p]);                     \
        add_all_products(sums, w, x + at, step);                                                                       \
      }                                                                                                                \
    }                                                                                                                  \
    if (whole < columns) {                                                                                             \
      float numbers[32];                                                                                               \
      for (int p = 0; p < 2; p++) {                                                                                    \
        last_##kind(rows + p, columns, numbers);                                                                       \
        for (int n = 0; n < NV; n++) w[p][n] = f_load(numbers + n * W);                                                \
      }                                                                                                                \
      add_all_products(sums, w, x + at, step);                                                                         \
    }                                                                                                                  \
    all_totals(sums, out, out_step);                                                                                   \
  }

BLOCK_KINDS(DEFINE_BLOCKS)
NUMBER_KINDS(DEFINE_NUMBERS)

#include "coded.h"
#include "limbs.h"
#include "words.h"

static void turn_floats(const float *from, int64_t step, int64_t rows, int64_t columns, char *out, int64_t out_step,
                        int dtype) {
  int64_t size = dtype == FLOAT32 ? 4 : 2;
  for (int64_t r = 0; r < rows; r += W)
    for (int64_t c = 0; c < columns; c += W) {
      vf lines[W];
      if (r + W > rows || c + W > columns) {
        for (int64_t row = r; row < r + W && row < rows; row++)
          for (int64_t at = c; at < c + W && at < columns; at++)
            put_number(out, at * out_step + row, dtype, from[row * step + at]);
        continue;
      }
      for (int n = 0; n < W; n++) lines[n] = f_load(from + (r + n) * step + c);
      turn(lines);
      for (int n = 0; n < W; n++) store(out + ((c + n) * out_step + r) * size, 0, dtype, lines[n]);
    }
}

#define CODED_ENTRY(kind, numbers, nbytes) {decode_coded, dot_coded, multiply_coded},
#define BLOCK_ENTRY(kind, numbers, nbytes) {decode_##kind, dot_##kind, NULL},
#define NUMBER_ENTRY(kind, nbytes) {decode_##kind, dot_##kind, multiply_##kind},
#define WORD_ENTRY(kind) {decode_##kind, multiply_##kind},
static const rows_of_kind ROWS_OF_KINDS[] = {BLOCK_KINDS(BLOCK_ENTRY) NUMBER_KINDS(NUMBER_ENTRY)
                                                 CODED_KINDS(CODED_ENTRY)};
static const words_of_kind WORDS[] = {WORD_KINDS(WORD_ENTRY)};
const functions NAME(functions) = {ROWS_OF_KINDS, NULL, NULL, WORDS, NAME(limbs), NAME(prepare_limbs), TOGETHER, turn_floats};

#ifdef WITH_AVX512
#include "pairs.h"
#endif
