/* Integers in 32-bit words, outputs innermost, with a factor and a zero point for each group of inputs.
 *
 * Always true:
 * - a weight is (integer - zero point) * factor, rounded to float32 once
 * - the products of an output are summed in the order of the inputs, each in a lane of its own
 *
 * Source: Frantar et al. 2022, https://arxiv.org/abs/2210.17323, as AutoGPTQ and GPTQModel store it;
 * Lin et al. 2023, https://arxiv.org/abs/2306.00978, as AutoAWQ stores it.
 */

#define WIDE (W == 16 ? 8 : 4) /* vectors of outputs that are read side by side: whole cache lines */

/* By how much a word is shifted for each of eight outputs. */
static const int32_t EIGHT_OUTPUTS[16] = {0, 16, 4, 20, 8, 24, 12, 28, 0, 16, 4, 20, 8, 24, 12, 28};

/* The integers in the four lowest bits. */
INLINE vf f_of_four_bits(vi a) {
#if W == 16
  static const float NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return t_pick(t_load(NUMBERS), a);
#else
  return f_of(i_and(a, i_set(15)));
#endif
}

INLINE vf factors_at(const matrix *words, int64_t group, int64_t output) {
  const uint8_t *row = words->scales + group * words->scale_step;
  if (words->scale_dtype == FLOAT32) return f_load((const float *)(const void *)(row + 4 * output));
  if (words->scale_dtype == FLOAT16) return f_from_halves(row + 2 * output);
  return f_bits(i_shl(i_u16(row + 2 * output), 16));
}

/* Of several outputs in a word, those from `output` on, in the lowest bits. */
INLINE vi of_eight_outputs(const uint8_t *row, int64_t output) {
  return i_shrv(i_in_eights(row + 4 * (output / 8)), i_words(EIGHT_OUTPUTS + output % 8));
}

INLINE vi of_outputs(const uint8_t *row, int64_t output, int bits, const int is_turned) {
  if (is_turned) return i_and(of_eight_outputs(row, output), i_set(15));
  int32_t numbers[W], shifts[W];
  for (int lane = 0; lane < W; lane++) {
    int64_t bit = (output + lane) * bits;
    shifts[lane] = (int32_t)(bit % 32);
    numbers[lane] = (int32_t)u32_at(row + 4 * (bit / 32));
  }
  return i_and(i_shrv(i_words(numbers), i_words(shifts)), i_set((1 << bits) - 1));
}

INLINE vf zeros_at(const matrix *words, int64_t group, int64_t output, const int is_turned) {
  vi stored = of_outputs(words->zeros + group * words->zero_step, output, words->bits, is_turned);
  return f_of(i_and(i_add(stored, i_set(words->less)), i_set((1 << words->bits) - 1)));
}

/* The group of the next input, after one in group `known`; where groups follow each other, that one is until `until`. */
INLINE int64_t group_of_input(const matrix *words, int64_t input, int64_t known, int64_t *until) {
  if (words->order) return (int64_t)(int32_t)u32_at(words->order + 4 * input);
  if (input < *until) return known;
  int64_t group = input / words->group;
  *until = (group + 1) * words->group;
  return group;
}

/* Input `input` of W outputs, without zero point and factor. */
INLINE vf integers_at(const matrix *words, int64_t input, int64_t output, const int is_turned) {
  if (is_turned) return f_of_four_bits(of_eight_outputs(words->rows + input * words->step, output));
  int log = words->bits == 2 ? 4 : words->bits == 4 ? 3 : 2; /* of how many are in a word */
  vi word = i_words(words->rows + (input >> log) * words->step + 4 * output);
  vi moved = i_shrv(word, i_set((int)(input & ((1 << log) - 1)) * words->bits));
  return words->bits == 4 ? f_of_four_bits(moved) : f_of(i_and(moved, i_set((1 << words->bits) - 1)));
}

INLINE void products_of(const matrix *words, int64_t output, const float *x, int64_t step, float *out, int64_t out_step,
                        const int wide, const int together, const int is_turned) {
  vf sums[TOGETHER][WIDE], factors[WIDE], zeros[WIDE];
  for (int n = 0; n < wide; n++) {
    factors[n] = zeros[n] = f_zero();
    for (int r = 0; r < together; r++) sums[r][n] = f_zero();
  }
  for (int64_t input = 0, known = -1, until = 0; input < words->columns; input++) {
    int64_t group = group_of_input(words, input, known, &until);
    if (group != known) {
      known = group;
      for (int n = 0; n < wide; n++) {
        factors[n] = factors_at(words, group, output + n * W);
        zeros[n] = zeros_at(words, group, output + n * W, is_turned);
      }
    }
    for (int n = 0; n < wide; n++) {
      vf weight = f_mul(f_sub(integers_at(words, input, output + n * W, is_turned), zeros[n]), factors[n]);
      for (int r = 0; r < together; r++) sums[r][n] = f_fma(weight, f_set(x[r * step + input]), sums[r][n]);
    }
  }
  for (int r = 0; r < together; r++)
    for (int n = 0; n < wide; n++) store_f32(out + r * out_step + n * W, sums[r][n]);
}

INLINE void multiply_words(const matrix *words, int64_t begin, int64_t end, const float *x, int64_t step, int64_t count,
                           float *out, int64_t out_step, const int is_turned) {
  for (; count > 0; x += TOGETHER * step, out += TOGETHER * out_step, count -= TOGETHER) {
    int64_t output = begin;
    float some[TOGETHER * W];
    int together = count < TOGETHER ? (int)count : TOGETHER;
    for (; output + WIDE * W <= end && together == TOGETHER; output += WIDE * W / 2) /* as many sums as registers */
      products_of(words, output, x, step, out + output, out_step, WIDE / 2, TOGETHER, is_turned);
    for (; output + WIDE * W <= end; output += WIDE * W)
      for (int r = 0; r < together; r++)
        products_of(words, output, x + r * step, step, out + r * out_step + output, out_step, WIDE, 1, is_turned);
    for (; output < end; output += W) {
      int64_t from = output + W <= words->outputs ? output : words->outputs - W; /* the last ones once more */
      for (int r = 0; r < together; r++) {
        products_of(words, from, x + r * step, step, some, W, 1, 1, is_turned);
        int64_t last = output + W < end ? output + W : end;
        for (int64_t n = output; n < last; n++) out[r * out_step + n] = some[n - from];
      }
    }
  }
}

/* Rows become columns: vectors of two halves of them are zipped, as often as it takes to move each lane to its row. */
INLINE void turn(vf rows[W]) {
#if W > 1
  _Pragma("GCC unroll 4") for (int times = 1; times < W; times *= 2) {
    vf zipped[W];
    for (int n = 0; n < W / 2; n++) f_zip(rows[n], rows[n + W / 2], zipped + 2 * n);
    for (int n = 0; n < W; n++) rows[n] = zipped[n];
  }
#else
  (void)rows;
#endif
}

#define NEAR 64    /* inputs that are decoded before the next outputs */
#define BESIDE 256 /* outputs whose words are read before those of the next inputs: they lie side by side */

/* Inputs `first` to `last - 1` of W outputs, from `from` on; of these, `begin` to `end - 1` go to `out`. */
INLINE void decode_some(const matrix *words, int64_t from, int64_t first, int64_t last, int64_t begin, int64_t end,
                        char *out, int64_t out_step, int dtype, const int is_turned) {
  int size = dtype == FLOAT32 ? 4 : 2;
  vf factors = f_zero(), zeros = f_zero(), numbers[W];
  for (int64_t known = -1, until = 0; first < last; first += W) {
    int64_t inputs = last - first < W ? last - first : W;
    for (int64_t n = 0; n < W; n++) {
      int64_t input = first + (n < inputs ? n : inputs - 1);
      int64_t group = group_of_input(words, input, known, &until);
      if (group != known) {
        known = group;
        factors = factors_at(words, group, from);
        zeros = zeros_at(words, group, from, is_turned);
      }
      numbers[n] = f_mul(f_sub(integers_at(words, input, from, is_turned), zeros), factors);
    }
    turn(numbers);
    for (int64_t n = begin; n < end; n++) {
      char *row = out + ((n - begin) * out_step + first) * size;
      float some[W];
      if (inputs == W) {
        store(row, 0, dtype, numbers[n - from]);
        continue;
      }
      store_f32(some, numbers[n - from]);
      for (int64_t at = 0; at < inputs; at++) put_number(row, at, dtype, some[at]);
    }
  }
}

INLINE void decode_words(const matrix *words, int64_t begin, int64_t end, char *out, int64_t out_step, int dtype,
                         const int is_turned) {
  int size = dtype == FLOAT32 ? 4 : 2;
  for (int64_t outer = begin - begin % 8; outer < end; outer += BESIDE) /* from the first of those in a word */
    for (int64_t first = 0; first < words->columns; first += NEAR)
      for (int64_t output = outer; output < end && output < outer + BESIDE; output += W) {
        int64_t from = output + W <= words->outputs ? output : words->outputs - W;
        int64_t next = output > begin ? output : begin, last = output + W < end ? output + W : end;
        int64_t to = first + NEAR < words->columns ? first + NEAR : words->columns;
        char *place = out + (next - begin) * out_step * size;
        decode_some(words, from, first, to, next, last, place, out_step, dtype, is_turned);
      }
}

#define DEFINE_WORDS(kind, is_turned)                                                                                  \
  static void decode_##kind(const matrix *words, int64_t begin, int64_t end, void *out, int64_t out_step, int dtype) { \
    decode_words(words, begin, end, out, out_step, dtype, is_turned);                                                  \
  }                                                                                                                    \
  static void multiply_##kind(const matrix *words, int64_t begin, int64_t end, const float *x, int64_t step,           \
                              int64_t count, float *out, int64_t out_step) {                                           \
    multiply_words(words, begin, end, x, step, count, out, out_step, is_turned);                                       \
  }

DEFINE_WORDS(inputs_in_words, 0)
DEFINE_WORDS(outputs_in_words, 1)
