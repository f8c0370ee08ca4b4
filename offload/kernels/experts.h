/* The experts of a layer in one call: products with `up`, activation, products with `down`, and their weighted sum.
 *
 * Always true:
 * - a row of an expert is computed as `offload_multiply` does it: alone or among others, by one thread or by many
 * - products stay float32 numbers up to the sum, which adds the picks of a token in their order
 * - threads take parts of the work as they become free
 */

#include <math.h>

/* An expert, and the rows that it is given: `begin` to `end - 1`; its results go to row `to` of `down`, and on. */
typedef struct {
  const part *up, *down;
  int64_t up_count, down_count, begin, end, to;
} expert;

typedef struct {
  const expert *experts;
  int64_t count;        /* of experts; 0: the sum alone */
  const void *x;        /* without `tokens` rows of `inner` numbers, for `down`; else of `hidden` */
  int64_t x_step;
  const int64_t *tokens; /* row of x for each row that experts are given; null: the same, and there is no `up` */
  int64_t rows;          /* that experts are given */
  int64_t hidden, inner, width; /* columns of x, of what `down` multiplies, of the results of `down` */
  int64_t wide;          /* columns of the results of `up`: twice `inner`, gates first, if that follows */
  float *up;             /* (rows, wide), if that is all that is wanted; else null */
  float *down;           /* (rows, width) */
  const int64_t *places; /* the row of `down` for each pick of each token, negative for none */
  const float *weights;  /* of the picks */
  void *out;             /* (all_tokens, width), or null: no sum */
  int64_t all_tokens, picks;
  int32_t x_dtype, out_dtype;
} layer;

typedef struct {
  const layer *what;
  const functions *functions;
  const team *threads;
  int is_up;
  const void *x[2];   /* as floats; as pairs */
  int64_t step, columns; /* of x, in numbers */
  chunk *chunks;         /* the same as integers, for blocks; null if none are wanted */
  int64_t chunks_step;
  uint8_t *as_floats; /* which rows integers do not hold */
  float *out;
  int64_t out_step;
  int64_t *ends;      /* of the pieces of work of each part */
  const part **parts;
  const expert **owners;
  int64_t count, next; /* parts, and the next piece of work */
  float *scratch;
  int64_t scratch_step;
} products;

#define PIECE (2 * OUTPUTS) /* rows of a matrix that a thread takes at a time */

static void work_on_products(void *data) {
  products *all = data;
  int64_t pieces = all->count ? all->ends[all->count - 1] : 0, taken;
  float *scratch = all->scratch + (all->threads ? all->threads->number() : 0) * all->scratch_step;
  while ((taken = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < pieces) {
    int64_t low = 0, high = all->count - 1;
    while (low < high) {
      int64_t middle = (low + high) / 2;
      if (all->ends[middle] > taken)
        high = middle;
      else
        low = middle + 1;
    }
    const part *some = all->parts[low];
    const expert *owner = all->owners[low];
    int in_pairs = is_in_pairs(all->functions, some->packed, all->what->x_dtype), kind = some->packed->kind;
    int64_t begin = (taken - (low ? all->ends[low - 1] : 0)) * PIECE;
    int64_t end = begin + PIECE < some->count ? begin + PIECE : some->count;
    task what = {.packed = some->packed,
                 .functions = all->functions,
                 .next = begin,
                 .piece = end - begin,
                 .count = end,
                 .x = (const char *)all->x[in_pairs] + owner->begin * all->step * (in_pairs ? 2 : 4),
                 .x_step = all->step,
                 .x_rows = owner->end - owner->begin,
                 .pairs = in_pairs ? all->functions->pairs + (kind - BLOCKS) : NULL,
                 .chunks_step = all->chunks_step,
                 .out = all->out + (all->is_up ? owner->begin : owner->to) * all->out_step + some->column,
                 .out_step = all->out_step,
                 .out_dtype = FLOAT32,
                 .scratch = kind < KINDS_OF_ROWS ? scratch : NULL};
    int has_limbs = kind < BLOCKS && all->functions->limbs[kind];
    if (has_limbs) what.chunks = all->chunks + owner->begin * all->chunks_step;
    for (int64_t r = 0; r < what.x_rows; r++) what.as_floats[r] = has_limbs ? all->as_floats[owner->begin + r] : 1;
    if (kind < KINDS_OF_ROWS)
      work_on_rows(&what);
    else
      take_words(&what, begin, end);
  }
}

/* The thread's share of `count` parts. */
static void share_of(const team *threads, int64_t count, int64_t *begin, int64_t *end) {
  int64_t all = threads ? threads->count() : 1, number = threads ? threads->number() : 0;
  *begin = count * number / all;
  *end = count * (number + 1) / all;
}

static int multiply_all(products *all, unsigned most_threads) {
  const layer *what = all->what;
  int64_t parts = 0, scratch = 0, pieces = 0;
  for (int64_t n = 0; n < what->count; n++)
    parts += all->is_up ? what->experts[n].up_count : what->experts[n].down_count;
  char *memory = malloc((size_t)parts * (sizeof *all->ends + sizeof *all->parts + sizeof *all->owners) + 1);
  if (!memory) return 1;
  all->ends = (int64_t *)(void *)memory;
  all->parts = (const part **)(void *)(all->ends + parts);
  all->owners = (const expert **)(void *)(all->parts + parts);
  all->count = all->next = 0;
  for (int64_t n = 0; n < what->count; n++) {
    const expert *owner = what->experts + n;
    const part *some = all->is_up ? owner->up : owner->down;
    for (int64_t p = 0; p < (all->is_up ? owner->up_count : owner->down_count); p++, all->count++) {
      int64_t needed = some[p].packed->kind < KINDS_OF_ROWS ? scratch_of(some[p].packed) : 0;
      if (needed > scratch) scratch = needed;
      all->parts[all->count] = some + p;
      all->owners[all->count] = owner;
      all->ends[all->count] = pieces += (some[p].count + PIECE - 1) / PIECE;
    }
  }
  all->scratch_step = scratch + ASIDE;
  all->scratch = malloc(sizeof(float) * (size_t)(all->scratch_step * most_threads));
  int failed = !all->scratch;
  if (!failed) in_team(work_on_products, all, all->threads, most_threads);
  free(all->scratch);
  free(memory);
  return failed;
}

/* Which forms of x the parts take: floats, pairs, and integers, which are made of floats. */
static void forms_of(const layer *what, const functions *functions, int is_up, int wanted[3]) {
  wanted[0] = wanted[1] = wanted[2] = 0;
  for (int64_t n = 0; n < what->count; n++) {
    const expert *owner = what->experts + n;
    for (int64_t p = 0; p < (is_up ? owner->up_count : owner->down_count); p++) {
      const matrix *packed = (is_up ? owner->up : owner->down)[p].packed;
      wanted[is_in_pairs(functions, packed, what->x_dtype)] = 1;
      if (packed->kind < BLOCKS && functions->limbs[packed->kind]) wanted[2] = 1;
    }
  }
}

/* Rows in one form, each filled up with zeros to `step`; `extra` rows behind may be read, but are not used. They begin at
 * lines of the cache. */
static void *rows_in_form(int64_t rows, int64_t extra, int64_t step, int in_pairs) {
  size_t nbytes = (size_t)((rows + extra) * step) * (in_pairs ? 2 : 4);
  void *form = aligned_alloc(64, nbytes);
  return form ? memset(form, 0, nbytes) : NULL;
}

/* The given rows of x, side by side for each expert. */
static void *gathered(const layer *what, const functions *functions, int64_t columns, int64_t step, int64_t extra,
                      int in_pairs) {
  char *form = rows_in_form(what->rows, extra, step, in_pairs);
  int64_t nbytes = (int64_t)size_of(what->x_dtype);
  if (!form) return NULL;
  for (int64_t n = 0, before = -1; n < what->rows; n++) {
    int64_t token = what->tokens ? what->tokens[n] : n, wide = step * (in_pairs ? 2 : 4);
    if (token == before) /* one token, and many experts */
      memcpy(form + n * wide, form + (n - 1) * wide, (size_t)wide);
    else
      put_row(form + n * wide, (const char *)what->x + token * what->x_step * nbytes, columns, what->x_dtype, functions,
              in_pairs);
    before = token;
  }
  return form;
}

/* Makes `chunks` of the floats if they are wanted; 1 if there is no memory. */
static int integers(products *all, int are_wanted) {
  int64_t rows = all->what->rows;
  all->chunks = NULL;
  all->chunks_step = (all->columns + CHUNK - 1) / CHUNK;
  if (!are_wanted) return 0;
  all->chunks = aligned_alloc(64, sizeof(chunk) * (size_t)(rows * all->chunks_step) + ((size_t)rows + 64) / 64 * 64);
  if (!all->chunks) return 1;
  all->as_floats = (uint8_t *)(all->chunks + rows * all->chunks_step);
  for (int64_t n = 0; n < all->what->count; n++)
    for (int64_t begin = all->what->experts[n].begin, end = all->what->experts[n].end, r = begin; r < end; r++)
      all->as_floats[r] = all->functions->prepare_limbs((const float *)all->x[0] + r * all->step, all->columns,
                                                        all->what->x_dtype == BFLOAT16, end - begin == 1,
                                                        all->chunks + r * all->chunks_step) != 0;
  return 0;
}

typedef struct {
  const layer *what;
  const team *threads;
  const float *up;
  void **forms; /* of what `down` multiplies */
  int64_t step;
} activation;

/* gate / (1 + exp(-gate)) * up */
static void work_on_activation(void *data) {
  const activation *all = data;
  const layer *what = all->what;
  int64_t begin, end;
  share_of(all->threads, what->rows, &begin, &end);
  for (int64_t r = begin; r < end; r++)
    for (int64_t c = 0; c < what->inner; c++) {
      float gate = all->up[r * what->wide + c], found = gate / (1 + expf(-gate)) * all->up[r * what->wide + what->inner + c];
      if (all->forms[0]) ((float *)all->forms[0])[r * all->step + c] = found;
      if (all->forms[1]) put_number(all->forms[1], r * all->step + c, BFLOAT16, found);
    }
}

typedef struct {
  const layer *what;
  const team *threads;
  float *sums; /* a row for each thread */
} summing;

static void work_on_sums(void *data) {
  const summing *all = data;
  const layer *what = all->what;
  int64_t begin, end;
  float *sum = all->sums + (all->threads ? all->threads->number() : 0) * what->width;
  share_of(all->threads, what->all_tokens, &begin, &end);
  for (int64_t token = begin; token < end; token++) {
    memset(sum, 0, sizeof(float) * (size_t)what->width);
    for (int64_t pick = token * what->picks; pick < (token + 1) * what->picks; pick++) {
      if (what->places[pick] < 0) continue;
      const float *row = what->down + what->places[pick] * what->width;
      for (int64_t c = 0; c < what->width; c++) sum[c] += what->weights[pick] * row[c];
    }
    for (int64_t c = 0; c < what->width; c++) put_number(what->out, token * what->width + c, what->out_dtype, sum[c]);
  }
}

#define LEAST 8192 /* numbers that are worth another thread */

static int sum_up(const layer *what, const team *threads, unsigned most_threads) {
  int is_little = what->all_tokens < 2 || what->all_tokens * what->picks * what->width < LEAST;
  summing all = {what, is_little ? NULL : threads, malloc(sizeof(float) * (size_t)what->width * most_threads + 1)};
  if (!all.sums) return 1;
  in_team(work_on_sums, &all, all.threads, most_threads);
  free(all.sums);
  return 0;
}

/* What `layer` says; 1 if there is no memory. */
EXPORT int offload_experts(const layer *what, int level, const team *threads, unsigned most_threads) {
  const functions *functions = at_level(level);
  if (!threads || !threads->parallel || most_threads < 2) threads = NULL;
  int64_t extra = functions->together, steps[2] = {padded(what->hidden) + ASIDE, padded(what->inner) + ASIDE};
  void *forms[2][2] = {{NULL, NULL}, {NULL, NULL}}; /* for `up`, and for `down` */
  float *up = what->up;
  int failed = 0, wanted[3];
  products all = {.what = what, .functions = functions, .threads = threads};
  if (what->count && what->tokens) {
    forms_of(what, functions, 1, wanted);
    for (int form = 0; form < 2; form++)
      if (wanted[form]) failed |= !(forms[0][form] = gathered(what, functions, what->hidden, steps[0], extra, form));
    if (!up) failed |= !(up = malloc(sizeof(float) * (size_t)(what->rows * what->wide) + 1));
    all.is_up = 1;
    all.columns = what->hidden;
    all.x[0] = forms[0][0];
    all.x[1] = forms[0][1];
    all.step = steps[0];
    all.out = up;
    all.out_step = what->wide;
    failed = failed || integers(&all, wanted[2]) || multiply_all(&all, most_threads);
    free(all.chunks);
  }
  if (what->count && !what->up && !failed) {
    forms_of(what, functions, 0, wanted);
    for (int form = 0; form < 2; form++)
      if (wanted[form])
        failed |= !(forms[1][form] = what->tokens ? rows_in_form(what->rows, extra, steps[1], form)
                                                  : gathered(what, functions, what->inner, steps[1], extra, form));
    if (what->tokens && !failed) {
      activation some = {what, what->rows * what->inner < LEAST || what->rows < 2 ? NULL : threads, up, forms[1], steps[1]};
      in_team(work_on_activation, &some, some.threads, most_threads);
    }
    all.is_up = 0;
    all.columns = what->inner;
    all.x[0] = forms[1][0];
    all.x[1] = forms[1][1];
    all.step = steps[1];
    all.out = what->down;
    all.out_step = what->width;
    failed = failed || integers(&all, wanted[2]) || multiply_all(&all, most_threads);
    free(all.chunks);
  }
  if (what->out && !failed) failed = sum_up(what, threads, most_threads);
  if (up != what->up) free(up);
  for (int n = 0; n < 4; n++) free(forms[n / 2][n % 2]);
  return failed;
}
