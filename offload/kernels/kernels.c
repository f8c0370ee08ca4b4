/* Packed matrices: decoding their rows, and multiplying by them.
 *
 * Always true:
 * - memory of the caller is read in the given rows only; sizes are checked in Python, in one place
 * - each row of a result is computed by one thread, in one order: it depends neither on the number of threads nor on
 *   the other rows
 * - threads are those of the team that the caller hands over, or the caller's own alone
 */

#include "kernels.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "simd.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
  const matrix *packed;
  const functions *functions;
  const team *threads;
  const int64_t *picked; /* rows of the matrix; null: those from `first` on */
  int64_t first, count;
  const void *x;        /* rows of floats, or of bfloat16 numbers if there are `pairs`; null: decode */
  int64_t x_step;
  const pairs_of_kind *pairs;
  const chunk *chunks; /* the rows of x as integers, for blocks; null if they are multiplied as floats */
  int64_t chunks_step;
  uint8_t as_floats[MOST_ROWS]; /* rows of x that integers do not hold */
  int64_t x_rows;
  const void *bias;
  void *out;
  int64_t out_step; /* elements from a row of the result to the next */
  int32_t bias_dtype, out_dtype, is_turned; /* is_turned: rows are decoded to columns */
  int64_t next, piece; /* rows that no thread has taken yet; how many a thread takes at a time */
  float *scratch; /* of each thread: factors of rows, and those that are turned; for words, all products */
  int64_t scratch_step;
} task;

extern const functions functions_plain;
#if defined(__x86_64__)
extern const functions functions_avx2, functions_avx512, functions_of_pairs_avx512;
#elif defined(__aarch64__)
extern const functions functions_neon;
#endif

#if defined(__x86_64__)
#include <cpuid.h>

/* What the processor has, and the system keeps between threads (XCR0): not every compiler's runtime tells it. */
static int has_level(int level) {
  unsigned a, b, c, d, kept, more, basic;
  if (!__get_cpuid(1, &a, &b, &basic, &d) || !(basic >> 27 & 1)) return 0;
  __asm__ volatile("xgetbv" : "=a"(kept), "=d"(more) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  int has_avx2 = (kept & 6) == 6 && basic >> 12 & 1 && basic >> 29 & 1 && b >> 5 & 1; /* and fma, and f16c */
  int has_avx512 = has_avx2 && (kept & 0xe6) == 0xe6 && b >> 16 & 1 && b >> 17 & 1 && b >> 30 & 1 && b >> 31 & 1;
  if (level < 3) return level == 1 ? has_avx2 : has_avx512; /* of which f, dq, bw and vl are used */
  int has_bytes = has_avx512 && c >> 11 & 1 && c >> 8 & 1; /* avx512vnni and gfni */
  return has_bytes && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1; /* and avx512bf16 */
}
#endif

/* 0 for plain C; then, in ascending order, what this processor has. */
static const functions *found_at(int level) {
  if (level == 0) return &functions_plain;
#if defined(__x86_64__)
  if (level > 0 && level < 4 && has_level(level))
    return level == 1 ? &functions_avx2 : level == 2 ? &functions_avx512 : &functions_of_pairs_avx512;
#elif defined(__aarch64__)
  if (level == 1) return &functions_neon;
#endif
  return NULL;
}

/* The same, asked once: a virtual machine may answer in 10 microseconds, which is as long as a small product. */
static const functions *at_level(int level) {
  static const functions *found[4];
  static int are_found;
  if (!__atomic_load_n(&are_found, __ATOMIC_ACQUIRE)) {
    for (int n = 0; n < 4; n++) __atomic_store_n(found + n, found_at(n), __ATOMIC_RELAXED);
    __atomic_store_n(&are_found, 1, __ATOMIC_RELEASE);
  }
  return 0 <= level && level < 4 ? __atomic_load_n(found + level, __ATOMIC_RELAXED) : NULL;
}

EXPORT int offload_kernels_interface(void) { return INTERFACE; }

EXPORT int offload_kernels_levels(void) {
  int level = 0;
  while (level < 3 && at_level(level + 1)) level++;
  return level;
}

static int64_t stored_row_of(const matrix *packed, int64_t row) {
  int64_t heads = packed->heads;
  if (!heads) return row;
  int64_t head = row / heads, inside = row % heads, half = heads / 2;
  return head * heads + 2 * (inside % half) + inside / half;
}

static size_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

static float number_at(const void *from, int64_t place, int dtype) {
  if (dtype == FLOAT32) return bits_to_float(u32_at((const float *)from + place));
  uint16_t bits = u16_at((const uint16_t *)from + place);
  return dtype == FLOAT16 ? half_to_float(bits) : bits_to_float((uint32_t)bits << 16);
}

static int64_t groups_of(const matrix *packed) {
  return packed->scale_dtype < 0 ? 0 : (packed->columns + packed->group - 1) / packed->group;
}

/* The factors and zero points of a row, with room for one more: the last vector may begin one. */
static int64_t factors_of(const matrix *packed) { return 2 * (groups_of(packed) + 1); }
static int64_t scratch_of(const matrix *packed) { return AT_ONCE * factors_of(packed); }
static int64_t width_of(const matrix *packed) { return padded(packed->columns) + ASIDE; }

static float factor_at(const matrix *packed, const uint8_t *from, int64_t place, int32_t dtype, int64_t row) {
  switch (dtype) {
    case E8M0:
      return bits_to_float(from[place] ? (uint32_t)from[place] << 23 : 0x00400000);
    case E4M3: {
      uint32_t magnitude = from[place] & 0x7f;
      float number = magnitude == 0x7f ? NAN : bits_to_float(magnitude << 20) * 0x1p120f;
      return from[place] & 0x80 ? -number : number;
    }
    case INT8:
      return (float)(int8_t)from[place];
    case NIBBLES_OF_ROWS: /* in 32-bit words, each with those of eight rows */
      return (float)(int)(u32_at(from + 4 * place) >> 4 * (row % 8) & 15) - 8;
    case NESTED: {
      int64_t number = row * groups_of(packed) + place;
      float scale = bits_to_float(u32_at(packed->nested_scales + number / packed->nested_block));
      return bits_to_float(u32_at(packed->nested_numbers + from[place])) * scale + packed->nested_offset;
    }
    default:
      return number_at(from, place, dtype);
  }
}

/* The factors and zero points of a stored row, in `scratch`. */
static void resolve(const matrix *packed, int64_t row, float *scratch, stored_row *found) {
  int64_t groups = groups_of(packed), of = row / packed->rows_per_scale;
  for (int64_t group = 0; group < groups; group++) {
    float factor = factor_at(packed, packed->scales + of * packed->scale_step, group, packed->scale_dtype, row);
    scratch[group] = packed->divisor == 1 ? factor : factor / packed->divisor;
  }
  scratch[groups] = 0;
  found->factors = groups ? scratch : NULL;
  found->zeros = NULL;
  if (packed->zero_dtype < 0) return;
  int64_t from = packed->zero_dtype == NIBBLES_OF_ROWS ? row / 8 : of;
  for (int64_t group = 0; group < groups; group++)
    scratch[groups + 1 + group] =
        factor_at(packed, packed->zeros + from * packed->zero_step, group, packed->zero_dtype, row);
  scratch[2 * groups + 1] = 0;
  found->zeros = scratch + groups + 1;
}

static int64_t row_of(const task *what, int64_t n) { return what->picked ? what->picked[n] : what->first + n; }

/* The stored row for row `n` of the task. `scratch` is for its factors; `resolved` is whose are there. */
static void find(const task *what, int64_t n, float *scratch, stored_row *row, int64_t *resolved) {
  const matrix *packed = what->packed;
  int64_t stored = stored_row_of(packed, row_of(what, n));
  row->bytes = packed->rows + stored * packed->step;
  if (packed->scale_dtype < 0 || (packed->rows_per_scale > 1 && stored / packed->rows_per_scale == *resolved)) return;
  *resolved = stored / packed->rows_per_scale;
  resolve(packed, stored, scratch, row);
}

static void finish(const task *what, int64_t n, const float *found) {
  float bias = what->bias ? number_at(what->bias, n, what->bias_dtype) : 0;
  for (int64_t r = 0; r < what->x_rows; r++)
    put_number(what->out, r * what->out_step + n, what->out_dtype, what->bias ? found[r] + bias : found[r]);
}

/* The products of rows of blocks with all rows of x. */
static void multiply_blocks(const task *what, const stored_row *rows, int64_t count, float (*found)[MOST_ROWS]) {
  int64_t columns = what->packed->columns;
  int kind = what->packed->kind;
  if (what->chunks)
    what->functions->limbs[kind](rows, count, columns, what->chunks, what->chunks_step, what->x_rows, found);
  for (int64_t r = 0; r < what->x_rows; r++)
    for (int64_t p = 0; p < count && what->as_floats[r]; p++)
      found[p][r] = what->functions->rows[kind].dot(rows + p, columns, (const float *)what->x + r * what->x_step);
}

/* The products of one row, or of some rows, with all rows of x. */
static void multiply_rows(const task *what, const stored_row *rows, int64_t count, float (*found)[MOST_ROWS]) {
  int64_t columns = what->packed->columns;
  const rows_of_kind *kind = what->functions->rows + what->packed->kind;
  if (what->packed->kind < BLOCKS)
    multiply_blocks(what, rows, count, found);
  else if (what->pairs && what->x_rows == 1)
    found[0][0] = what->pairs->dot(rows, columns, what->x);
  else if (what->pairs)
    what->functions->multiply_pairs(what->pairs, rows, count, columns, what->x, what->x_step, what->x_rows, found);
  else if (what->x_rows == 1)
    found[0][0] = kind->dot(rows, columns, what->x);
  else
    for (int64_t r = 0; r < what->x_rows; r += what->functions->together)
      kind->multiply(rows, columns, (const float *)what->x + r * what->x_step, what->x_step, found[0] + r, MOST_ROWS);
}

#define TURNED 16 /* rows that are decoded before they are turned: whole vectors */

static void turn_rows(const task *what, int64_t begin, int64_t end, float *scratch, stored_row *row) {
  const matrix *packed = what->packed;
  int64_t resolved = -1, wide = width_of(packed);
  float *decoded = scratch + scratch_of(packed);
  for (int64_t n = begin; n < end; n += TURNED) {
    int64_t count = n + TURNED < end ? TURNED : end - n;
    for (int64_t p = 0; p < count; p++) {
      find(what, n + p, scratch, row, &resolved);
      what->functions->rows[packed->kind].decode(row, packed->columns, decoded + p * wide, FLOAT32);
    }
    char *place = (char *)what->out + n * (int64_t)size_of(what->out_dtype);
    what->functions->turn(decoded, wide, count, packed->columns, place, what->out_step, what->out_dtype);
  }
}

/* The next rows for a thread: a late one, or one that is interrupted, keeps the others from few of them. */
static int takes(task *what, int64_t *begin, int64_t *end) {
  *begin = __atomic_fetch_add(&what->next, what->piece, __ATOMIC_RELAXED);
  *end = *begin + what->piece < what->count ? *begin + what->piece : what->count;
  return *begin < what->count;
}

static void work_on_rows(void *data) {
  task *what = data;
  const matrix *packed = what->packed;
  int64_t number = what->threads ? what->threads->number() : 0, begin, end;
  int64_t most = what->chunks ? AT_ONCE : !what->x || what->x_rows == 1 ? 1 : what->pairs ? AT_ONCE : 2;
  int64_t resolved[AT_ONCE];
  float found[AT_ONCE][MOST_ROWS], *scratch = what->scratch + number * what->scratch_step;
  stored_row rows[AT_ONCE];
  for (int64_t p = 0; p < most; p++) {
    rows[p] = (stored_row){.group = packed->group, .last = packed->last, .book = packed->book};
    if (packed->kind >= FIRST_CODED) rows[p].kind = CODED + (packed->kind - FIRST_CODED);
    memcpy(rows[p].table, packed->table, sizeof rows->table);
    resolved[p] = -1;
  }
  while (what->is_turned && takes(what, &begin, &end)) turn_rows(what, begin, end, scratch, rows);
  while (takes(what, &begin, &end))
    for (int64_t n = begin, count; n < end; n += count) {
      count = n + most <= end ? most : end - n;
      for (int64_t p = 0; p < most; p++) /* the last one more than once, where rows are multiplied two at a time */
        find(what, p < count ? n + p : end - 1, scratch + p * factors_of(packed), rows + p, resolved + p);
      if (what->x) {
        multiply_rows(what, rows, count, found);
        for (int64_t p = 0; p < count; p++) finish(what, n + p, found[p]);
      } else {
        char *place = (char *)what->out + n * what->out_step * (int64_t)size_of(what->out_dtype);
        what->functions->rows[packed->kind].decode(rows, packed->columns, place, what->out_dtype);
      }
    }
}

#define OUTPUTS 32 /* of words, that one thread takes at the least */

static void take_words(task *what, int64_t begin, int64_t end) {
  const matrix *packed = what->packed;
  const words_of_kind *functions = what->functions->words + (packed->kind - KINDS_OF_ROWS);
  if (!what->x) {
    for (int64_t n = begin, some = what->picked ? 1 : end - begin; n < end; n += some) {
      char *place = (char *)what->out + n * what->out_step * (int64_t)size_of(what->out_dtype);
      functions->decode(packed, row_of(what, n), row_of(what, n) + some, place, what->out_step, what->out_dtype);
    }
    return;
  }
  if (!what->scratch) { /* the products are wanted as they are */
    functions->multiply(packed, begin, end, what->x, what->x_step, what->x_rows, what->out, what->out_step);
    return;
  }
  functions->multiply(packed, begin, end, what->x, what->x_step, what->x_rows, what->scratch, what->count);
  for (int64_t r = 0; r < what->x_rows; r++)
    for (int64_t n = begin; n < end; n++) {
      float found = what->scratch[r * what->count + n];
      if (what->bias) found += number_at(what->bias, n, what->bias_dtype);
      put_number(what->out, r * what->out_step + n, what->out_dtype, found);
    }
}

static void work_on_words(void *data) {
  int64_t begin, end;
  while (takes(data, &begin, &end)) take_words(data, begin, end);
}

#define LATE 300000        /* nanoseconds that the team may be late, and a quarter of the work of this thread */
#define ALONE 10000000     /* nanoseconds without the team after it was late, at first */
#define MOST_ALONE 500000000

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * (int64_t)1000000000 + time.tv_nsec;
}

typedef struct {
  void (*work)(void *);
  void *data;
  const team *threads;
  int64_t own; /* time that this thread has worked */
} watched;

static void work_and_note(void *given) {
  watched *what = given;
  int is_own = !what->threads->number();
  int64_t begun = is_own ? now() : 0;
  what->work(what->data);
  if (is_own) what->own = now() - begun;
}

/* Calls `work` in all threads, or in this one alone: where other programs compute, a thread of the team may have lost
 * its processor for milliseconds, and all others would wait for it. That was so lately if the team was late. */
static void in_team(void (*work)(void *), void *data, const team *threads, unsigned most_threads) {
  static int64_t alone_until, alone_for = ALONE;
  int64_t begun;
  if (!threads || (begun = now()) < __atomic_load_n(&alone_until, __ATOMIC_RELAXED)) {
    work(data);
    return;
  }
  watched what = {work, data, threads, 0};
  threads->parallel(work_and_note, &what, most_threads, 0);
  int64_t ended = now(), lasts = __atomic_load_n(&alone_for, __ATOMIC_RELAXED);
  if (ended - begun - what.own > LATE + what.own / 4) {
    __atomic_store_n(&alone_until, ended + lasts, __ATOMIC_RELAXED);
    lasts = 2 * lasts < MOST_ALONE ? 2 * lasts : MOST_ALONE;
  } else if (lasts > ALONE) {
    lasts -= lasts / 256;
  }
  __atomic_store_n(&alone_for, lasts, __ATOMIC_RELAXED);
}

typedef struct {
  task *tasks;
  int64_t count;
} tasks;

/* No thread waits between two tasks: one that finds all rows of a task taken goes on to the next. */
static void work_on_tasks(void *data) {
  const tasks *all = data;
  for (task *what = all->tasks; what < all->tasks + all->count; what++)
    (what->packed->kind >= KINDS_OF_ROWS ? work_on_words : work_on_rows)(what);
}

#define PIECES 8 /* that each thread takes, if all are as fast */

static void run(task *some, int64_t count, const team *threads, unsigned most_threads) {
  if (!threads || !threads->parallel || most_threads < 2) threads = NULL;
  for (task *what = some; what < some + count; what++) {
    int64_t least = what->packed->kind >= KINDS_OF_ROWS ? OUTPUTS : AT_ONCE;
    what->threads = threads;
    what->piece = threads ? (what->count / (PIECES * (int64_t)most_threads) / least + 1) * least : what->count;
  }
  in_team(work_on_tasks, &(tasks){some, count}, threads, most_threads);
}

/* The picked rows, or those from `first` on, each to `out_step` elements after the one before; 1 if there is no
 * memory. If they are turned, the numbers of a row are `out_step` elements apart: not of words. */
EXPORT int offload_decode(const matrix *packed, const int64_t *picked, int64_t first, int64_t count, void *out,
                          int64_t out_step, int out_dtype, int is_turned, int level, const team *threads,
                          unsigned most_threads) {
  int64_t scratch_step = scratch_of(packed) + (is_turned ? TURNED * width_of(packed) : 0);
  float *scratch = malloc(sizeof(float) * (size_t)scratch_step * most_threads);
  if (!scratch) return 1;
  task what = {.packed = packed,
               .functions = at_level(level),
               .picked = picked,
               .first = first,
               .count = count,
               .out = out,
               .out_step = out_step,
               .out_dtype = out_dtype,
               .is_turned = is_turned,
               .scratch = scratch,
               .scratch_step = scratch_step};
  run(&what, 1, threads, most_threads);
  free(scratch);
  return 0;
}

static int is_in_pairs(const functions *functions, const matrix *packed, int dtype) {
  return functions->pairs && dtype == BFLOAT16 && packed->kind >= BLOCKS && packed->kind < KINDS_OF_ROWS;
}

/* What parts take: which forms of x, and how many floats of scratch. */
typedef struct {
  int64_t scratch;
  int has_floats, has_pairs, has_chunks;
} needs;

static needs needs_of(const part *parts, int64_t count, const functions *functions, int64_t x_rows, int x_dtype,
                      unsigned most_threads) {
  needs all = {0};
  for (const part *some = parts; some < parts + count; some++) {
    const matrix *packed = some->packed;
    int in_pairs = is_in_pairs(functions, packed, x_dtype), is_words = packed->kind >= KINDS_OF_ROWS;
    all.has_pairs |= in_pairs;
    all.has_floats |= !in_pairs;
    all.has_chunks |= packed->kind < BLOCKS && functions->limbs[packed->kind];
    all.scratch += is_words ? some->count * x_rows : scratch_of(packed) * most_threads;
  }
  return all;
}

/* A row of x in one form. */
static void put_row(void *to, const char *row, int64_t columns, int dtype, const functions *functions, int in_pairs) {
  static const int KINDS[] = {KIND_float32, KIND_float16, KIND_bfloat16};
  stored_row given = {.bytes = (const uint8_t *)row, .group = padded(columns), .last = 1};
  if (in_pairs)
    memcpy(to, row, (size_t)columns * 2);
  else
    functions->rows[KINDS[dtype]].decode(&given, columns, to, FLOAT32);
}

/* The rows of x in one form, each filled up with zeros to `wide`, and their number to what fills `nbytes`. */
static void put_rows(char *to, size_t nbytes, int64_t wide, const product *given, const void *x, int64_t x_rows,
                     int64_t columns, const functions *functions, int in_pairs) {
  size_t number = in_pairs ? 2 : 4, row_nbytes = number * (size_t)wide, used = number * (size_t)columns;
  for (int64_t r = 0; r < x_rows; r++, to += row_nbytes, nbytes -= row_nbytes) {
    const char *row = (const char *)x + r * given->x_step * (int64_t)size_of(given->x_dtype);
    put_row(to, row, columns, given->x_dtype, functions, in_pairs);
    memset(to + used, 0, row_nbytes - used);
  }
  memset(to, 0, nbytes);
}

#define ON_STACK (24 << 10) /* bytes of activations, and of scratch, that a call takes without asking for memory */

/* out[r, n] = x[r] . row n + bias[n], of the rows of all parts, which have as many columns; 1 if there is no memory. */
EXPORT int offload_multiply(const product *given, const void *x, int64_t x_rows, const void *bias, void *out) {
  const functions *functions = at_level(given->level);
  const part *parts = given->parts;
  unsigned threads = (unsigned)given->most_threads;
  needs all = needs_of(parts, given->count, functions, x_rows, given->x_dtype, threads);
  int64_t columns = parts->packed->columns, wide = width_of(parts->packed);
  int64_t together = x_rows == 1 ? 1 : functions->together;
  int64_t of_form = (wide * ((x_rows + together - 1) / together * together) + 15) / 16 * 16; /* lines of the cache */
  int64_t chunks_step = all.has_chunks ? (columns + CHUNK - 1) / CHUNK : 0, scratch = (all.scratch + 15) / 16 * 16;
  size_t form = sizeof(float) * (size_t)of_form, forms = form * (size_t)(all.has_floats + all.has_pairs);
  size_t nbytes = forms + sizeof(float) * (size_t)scratch + sizeof(chunk) * (size_t)(chunks_step * x_rows);
  size_t total = nbytes + sizeof(task) * (size_t)given->count;
  _Alignas(64) char stack[ON_STACK];
  char *memory = total <= ON_STACK ? stack : aligned_alloc(64, (total + 63) / 64 * 64);
  if (!memory) return 1;
  char *pairs = memory + form * (size_t)all.has_floats;
  float *floats = (float *)(void *)memory, *aside = (float *)(void *)(memory + forms);
  chunk *chunks = (chunk *)(void *)(aside + scratch);
  task *what = (task *)(void *)(memory + nbytes);
  uint8_t as_floats[MOST_ROWS];
  if (all.has_floats) put_rows(memory, form, wide, given, x, x_rows, columns, functions, 0);
  if (all.has_pairs) put_rows(pairs, form, wide, given, x, x_rows, columns, functions, 1);
  for (int64_t r = 0; r < x_rows && chunks_step; r++)
    as_floats[r] = functions->prepare_limbs(floats + r * wide, columns, given->out_dtype == BFLOAT16, x_rows == 1,
                                            chunks + r * chunks_step) != 0;
  for (int64_t n = 0; n < given->count; n++) {
    const part *rows = parts + n;
    const matrix *packed = rows->packed;
    int in_pairs = is_in_pairs(functions, packed, given->x_dtype), is_words = packed->kind >= KINDS_OF_ROWS;
    int has_limbs = packed->kind < BLOCKS && functions->limbs[packed->kind];
    what[n] = (task){.packed = packed,
                     .functions = functions,
                     .count = rows->count,
                     .x = in_pairs ? (void *)pairs : floats,
                     .x_step = wide,
                     .x_rows = x_rows,
                     .pairs = in_pairs ? functions->pairs + (packed->kind - BLOCKS) : NULL,
                     .chunks = has_limbs ? chunks : NULL,
                     .chunks_step = chunks_step,
                     .bias = bias ? (const char *)bias + rows->column * (int64_t)size_of(given->bias_dtype) : NULL,
                     .bias_dtype = given->bias_dtype,
                     .out = (char *)out + rows->column * (int64_t)size_of(given->out_dtype),
                     .out_step = given->out_step,
                     .out_dtype = given->out_dtype,
                     .scratch = aside,
                     .scratch_step = scratch_of(packed)};
    for (int64_t r = 0; r < x_rows && packed->kind < BLOCKS; r++) what[n].as_floats[r] = has_limbs ? as_floats[r] : 1;
    aside += is_words ? rows->count * x_rows : what[n].scratch_step * threads;
  }
  run(what, given->count, given->threads, threads);
  if (memory != stack) free(memory);
  return 0;
}

#define OF_BYTES (1 << 20) /* that a thread takes at a time */

typedef struct {
  const char *const *from;
  const int64_t *sizes, *begins;
  int64_t count, next;
  char *out;
} pieces;

static void work_on_pieces(void *data) {
  pieces *all = data;
  for (int64_t at, n; at = __atomic_fetch_add(&all->next, OF_BYTES, __ATOMIC_RELAXED), n = 0, 1;) {
    for (int64_t whole; n < all->count && at >= (whole = (all->sizes[n] + OF_BYTES - 1) / OF_BYTES * OF_BYTES); n++)
      at -= whole;
    if (n == all->count) return;
    int64_t left = all->sizes[n] - at;
    memcpy(all->out + all->begins[n] + at, all->from[n] + at, (size_t)(left < OF_BYTES ? left : OF_BYTES));
  }
}

/* Puts so many bytes of each piece where it begins in `out`. */
EXPORT int offload_gather(const char *const *from, const int64_t *sizes, const int64_t *begins, int64_t count,
                          void *out, int level, const team *threads, unsigned most_threads) {
  (void)level;
  in_team(work_on_pieces, &(pieces){from, sizes, begins, count, 0, out}, threads, most_threads);
  return 0;
}

#include "experts.h"
