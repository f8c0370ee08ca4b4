/* What the sources share: the kinds of rows, and the functions that each instruction set has for them.
 *
 * Always true:
 * - the order of the kinds is that of the numbers by which Python names them: blocks, numbers, codes, words
 */

#ifndef OFFLOAD_KERNELS_H
#define OFFLOAD_KERNELS_H

#include <stdint.h>

#define INTERFACE 3 /* counted up with each change of what Python passes on: native.py has the same number */

enum { FLOAT32, FLOAT16, BFLOAT16, E8M0, E4M3, INT8, NIBBLES_OF_ROWS, NESTED };

/* Blocks that hold their own factors: name, numbers and bytes of a block. */
#define BLOCK_KINDS(DO) \
  DO(q4_0, 32, 18)      \
  DO(q4_1, 32, 20)      \
  DO(q5_0, 32, 22)      \
  DO(q5_1, 32, 24)      \
  DO(q8_0, 32, 34)      \
  DO(q2_k, 256, 84)     \
  DO(q3_k, 256, 110)    \
  DO(q4_k, 256, 144)    \
  DO(q5_k, 256, 176)    \
  DO(q6_k, 256, 210)    \
  DO(iq4_nl, 32, 18)    \
  DO(iq4_xs, 256, 136)  \
  DO(tq2_0, 256, 66)    \
  DO(mxfp4, 32, 17)

/* Numbers whose factors are stored elsewhere: name, and bytes of 32 numbers. */
#define NUMBER_KINDS(DO)  \
  DO(halves_low, 16)      \
  DO(halves_high, 16)     \
  DO(signed_bytes, 32)    \
  DO(centred_bytes, 32)   \
  DO(e4m3, 32)            \
  DO(e5m2, 32)            \
  DO(bfloat16, 64)        \
  DO(float16, 64)         \
  DO(float32, 128)

/* Blocks whose numbers are codes, with their own factors: name, numbers and bytes of a block. */
#define CODED_KINDS(DO)  \
  DO(iq2_xxs, 256, 66)   \
  DO(iq2_xs, 256, 74)    \
  DO(iq2_s, 256, 82)     \
  DO(iq3_xxs, 256, 98)   \
  DO(iq3_s, 256, 110)    \
  DO(iq1_s, 256, 50)     \
  DO(iq1_m, 256, 56)     \
  DO(tq1_0, 256, 54)     \
  DO(nvfp4, 64, 36)      \
  DO(quarter_0, 32, 32)  \
  DO(quarter_1, 32, 32)  \
  DO(quarter_2, 32, 32)  \
  DO(quarter_3, 32, 32)

#define NAME_BLOCKS(kind, numbers, nbytes) KIND_##kind,
#define NAME_NUMBERS(kind, nbytes) KIND_##kind,
enum { /* those after them are words */
  BLOCK_KINDS(NAME_BLOCKS) BLOCKS, LAST_BLOCK = BLOCKS - 1,
  NUMBER_KINDS(NAME_NUMBERS) FIRST_CODED, LAST_NUMBER = FIRST_CODED - 1,
  CODED_KINDS(NAME_BLOCKS) KINDS_OF_ROWS
};

#define SIZES_OF_BLOCKS(kind, numbers, nbytes) NUMBERS_##kind = numbers, BYTES_##kind = nbytes,
enum { BLOCK_KINDS(SIZES_OF_BLOCKS) };

/* Words of integers, outputs innermost: a word holds some inputs of an output (GPTQ), or eight outputs of an input (AWQ). */
#define WORD_KINDS(DO) DO(inputs_in_words) DO(outputs_in_words)

typedef struct {
  const uint8_t *rows;
  int64_t step;    /* bytes from a row to the next */
  int64_t columns; /* numbers of a row */
  int32_t kind;    /* of blocks or numbers */
  int32_t heads;   /* rows whose pairs are stored side by side and are wanted apart, first ones first; 0 for none */
  /* For numbers; the dtypes say how factors are stored, and negative ones that there are none. */
  int32_t scale_dtype, zero_dtype;
  int64_t group;          /* numbers that share a factor: 16, or a multiple of 32, or all */
  int64_t rows_per_scale; /* rows that share factors */
  const uint8_t *scales, *zeros;
  int64_t scale_step, zero_step; /* bytes from the factors of a row to those of the next; 0 if all rows have the same */
  float divisor, last;           /* of factors; of products */
  const float *nested_numbers, *nested_scales; /* of packed factors: their numbers, and a factor for each block */
  int64_t nested_block;
  float nested_offset;
  float table[16]; /* the numbers that halves of bytes stand for */
  /* For words of integers of several outputs or inputs: */
  const uint8_t *order; /* the group of each input, 32 bits each; null if groups follow each other */
  int32_t bits, less;   /* of an integer; what was subtracted from zero points */
  int64_t outputs; /* rows that there are, of any kind: checked in Python, and where the last vector of words ends */
  const int8_t *book; /* what codes stand for: 8 numbers each, or 4 */
} matrix;

/* Packed rows, whose products are columns `column` to `column + count - 1` of the result. */
typedef struct {
  const matrix *packed;
  int64_t count, column;
} part;

typedef void (*parallel_fn)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*number_fn)(void);

/* The functions of GNU OpenMP's runtime that a team takes; all null for none. */
typedef struct {
  parallel_fn parallel;
  number_fn number;
  number_fn count;
} team;

/* Products with rows: what does not depend on the activations. Steps are elements from a row to the next. */
typedef struct {
  const part *parts;
  int64_t count, x_step, out_step;
  int32_t x_dtype, bias_dtype, out_dtype, level;
  const team *threads;
  int64_t most_threads;
} product;

/* 32 numbers of a block: each is multiplied by the unit, and then by the factor of its half. */
typedef struct {
  int8_t numbers[32];
  float factors[2], unit;
} coded;

typedef struct {
  void (*unpack)(const uint8_t *block, int group, const int8_t *book, coded *to);
  int numbers, nbytes; /* of a block */
} coded_kind;

extern const coded_kind CODED[];

typedef struct {
  const uint8_t *bytes;
  const float *factors, *zeros; /* of the groups of the row; zeros may be null */
  int64_t group;                /* numbers that share a factor: 16, or a multiple of 32 */
  float last;                   /* by which products are multiplied at last */
  float table[16];              /* the numbers that halves of bytes stand for */
  const coded_kind *kind;       /* of codes, and what these stand for */
  const int8_t *book;
} stored_row;

typedef struct {
  /* All numbers of a row, in a dtype. */
  void (*decode)(const stored_row *row, int64_t columns, void *out, int dtype);
  /* The product with a row of floats, filled up with zeros to a multiple of 32. */
  float (*dot)(const stored_row *row, int64_t columns, const float *x);
  /* The products of two rows with `together` rows of floats, `step` apart, each as `dot` gives it; null for blocks. */
  void (*multiply)(const stored_row rows[2], int64_t columns, const float *x, int64_t step, float *out,
                   int64_t out_step);
} rows_of_kind;

#define CHUNK 256

/* CHUNK activations as integers, in groups of 32 that have a factor each: see limbs.h. */
typedef struct {
  _Alignas(64) int16_t limbs[4][2][2][32]; /* [pair of groups][limb][even, odd columns, or higher, lower bytes] */
  int32_t starts[4][2][16];                /* [pair of groups][limb]: what codes of zero add to sums of four, taken away */
  float scales[8], sums[8];                /* factors of groups; the sums of their numbers */
  float scales_of_16[16], sums_of_16[16];  /* the same for 16 columns each */
  int32_t has_second;                      /* whether a second limb of them is not zero */
} chunk;

#define MOST_ROWS 64 /* of x, in one call */
#define AT_ONCE 8    /* rows that are decoded, or multiplied, together */

/* The products of at most AT_ONCE rows of blocks with rows of x, `step` chunks apart. */
typedef void (*multiply_limbs)(const stored_row *rows, int64_t count, int64_t columns, const chunk *x, int64_t step,
                               int64_t x_rows, float (*out)[MOST_ROWS]);

/* The same with a row of bfloat16 numbers. */
typedef struct {
  /* Numbers `begin` to `end - 1`, filled up with zeros; `begin` is a multiple of 256. */
  void (*round)(const stored_row *row, int64_t begin, int64_t end, uint16_t *out);
  float (*dot)(const stored_row *row, int64_t columns, const uint16_t *x);
} pairs_of_kind;

typedef struct {
  /* Outputs `begin` to `end - 1`, each a row of `columns` numbers, `out_step` elements after the one before. */
  void (*decode)(const matrix *words, int64_t begin, int64_t end, void *out, int64_t out_step, int dtype);
  /* `count` products with rows of floats, `step` apart: out[r * out_step + n], for outputs `begin` to `end - 1`. */
  void (*multiply)(const matrix *words, int64_t begin, int64_t end, const float *x, int64_t step, int64_t count,
                   float *out, int64_t out_step);
} words_of_kind;

typedef struct {
  const rows_of_kind *rows;
  const pairs_of_kind *pairs; /* null if the processor has no products of bfloat16 numbers */
  /* The products of at most AT_ONCE rows with rows of x, `step` apart, each as `dot` gives it. */
  void (*multiply_pairs)(const pairs_of_kind *kind, const stored_row *rows, int64_t count, int64_t columns,
                         const uint16_t *x, int64_t step, int64_t x_rows, float (*out)[MOST_ROWS]);
  const words_of_kind *words;
  const multiply_limbs *limbs; /* of blocks; null for a kind that is multiplied as floats alone */
  /* Makes chunks of a row of floats, for products in bfloat16 if `is_short`, and for a call with this row of x alone if
   * `is_alone`; 1 if it has to be multiplied as floats. */
  int (*prepare_limbs)(const float *x, int64_t columns, int is_short, int is_alone, chunk *to);
  int together; /* rows of x that `multiply` takes */
  /* Number `c` of row `r`, `step` floats from a row to the next: element c * out_step + r, in a dtype. */
  void (*turn)(const float *from, int64_t step, int64_t rows, int64_t columns, char *out, int64_t out_step, int dtype);
} functions;

#define ASIDE 32 /* numbers between rows, so that they do not begin in the same sets of the cache */

/* Rows of floats are filled up with zeros to whole vectors, and their number to `together`. */
static inline int64_t padded(int64_t columns) { return (columns + 31) / 32 * 32; }

#endif
