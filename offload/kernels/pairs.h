/* Products of bfloat16 numbers, two and two, as processors with AVX512_BF16 have them; but for GGUF blocks.
 *
 * Always true:
 * - a weight is rounded to bfloat16 as the dense weight is, but that a subnormal one becomes zero
 * - a product is summed in one order, whatever the number of rows that are multiplied together or of threads
 */

#define ROWS 4     /* decoded rows that are multiplied at a time */
#define TILE 4096  /* numbers of each row that are decoded before */

#ifndef __clang__
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#endif

typedef __m512bh vp;

INLINE vp p_load(const void *from) { return (vp)_mm512_loadu_si512(from); }
INLINE vp p_of(const vf w[NV]) { return _mm512_cvtne2ps_pbh(w[1], w[0]); }

#define PAIRS_OF_NUMBERS(kind, nbytes)                                \
  INLINE vp pair_##kind(const uint8_t *bytes, const scale *which) {   \
    vf w[NV];                                                         \
    unpack_##kind(bytes, which, w);                                   \
    return p_of(w);                                                   \
  }
NUMBER_KINDS(PAIRS_OF_NUMBERS)

#define ROUND_NUMBERS(kind, nbytes)                                                                                    \
  INLINE vp last_pair_##kind(const stored_row *row, int64_t columns) {                                                 \
    float numbers[32];                                                                                                 \
    last_##kind(row, columns, numbers);                                                                                \
    return _mm512_cvtne2ps_pbh(f_load(numbers + 16), f_load(numbers));                                                 \
  }                                                                                                                    \
  static void round_##kind(const stored_row *row, int64_t begin, int64_t end, uint16_t *out) {                         \
    int64_t span = row->group < 32 ? 32 : row->group, at = begin, whole = end / 32 * 32;                               \
    while (at < whole) {                                                                                               \
      scale by = scale_of(row, group_at(row, at));                                                                     \
      for (int64_t next = (at / span + 1) * span; at < next && at < whole; at += 32)                                   \
        _mm512_storeu_si512(out + at - begin, (__m512i)pair_##kind(row->bytes + at / 32 * nbytes, &by));               \
    }                                                                                                                  \
    if (whole < end) _mm512_storeu_si512(out + whole - begin, (__m512i)last_pair_##kind(row, end));                    \
  }                                                                                                                    \
  static float dot_pairs_##kind(const stored_row *row, int64_t columns, const uint16_t *x) {                           \
    int64_t span = row->group < 32 ? 32 : row->group, at = 0, whole = columns / 32 * 32;                               \
    vf sum = f_zero();                                                                                                 \
    while (at < whole) {                                                                                               \
      scale by = scale_of(row, group_at(row, at));                                                                     \
      for (int64_t end = at + span < whole ? at + span : whole; at < end; at += 32)                                    \
        sum = _mm512_dpbf16_ps(sum, pair_##kind(row->bytes + at / 32 * nbytes, &by), p_load(x + at));                  \
    }                                                                                                                  \
    if (whole < columns) sum = _mm512_dpbf16_ps(sum, last_pair_##kind(row, columns), p_load(x + whole));               \
    return f_sum(sum);                                                                                                 \
  }

NUMBER_KINDS(ROUND_NUMBERS)

INLINE vp coded_pair(const stored_row *row, int64_t at) {
  vf w[NV];
  coded_at(row, at, w);
  return p_of(w);
}

static void round_coded(const stored_row *row, int64_t begin, int64_t end, uint16_t *out) {
  for (int64_t at = begin; at < end; at += 32) _mm512_storeu_si512(out + at - begin, (__m512i)coded_pair(row, at));
}

static float dot_pairs_coded(const stored_row *row, int64_t columns, const uint16_t *x) {
  vf sum = f_zero();
  for (int64_t at = 0; at < columns; at += 32) sum = _mm512_dpbf16_ps(sum, coded_pair(row, at), p_load(x + at));
  return f_sum(sum);
}

#define X_ROWS 4 /* rows of x that are multiplied at a time */

/* Halves, quarters and so on of two vectors are added, as `f_sum` adds those of one; the sums are beside each other. */
INLINE vf added_halves(vf a, vf b) {
  return f_add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
INLINE vf added_quarters(vf a, vf b) {
  return f_add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
INLINE vf added_twos(vf a, vf b) {
  __m512d first = _mm512_castps_pd(a), second = _mm512_castps_pd(b);
  return f_add(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)), _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
}

/* out[p][r] is the sum of the lanes of all[p][r]. */
INLINE void put_totals(vf all[ROWS][X_ROWS], float (*out)[MOST_ROWS]) {
  vf columns[X_ROWS];
  for (int r = 0; r < X_ROWS; r++)
    columns[r] = added_quarters(added_halves(all[0][r], all[1][r]), added_halves(all[2][r], all[3][r]));
  vf even = added_twos(columns[0], columns[1]), odd = added_twos(columns[2], columns[3]);
  vf totals = f_add(_mm512_shuffle_ps(even, odd, 0x88), _mm512_shuffle_ps(even, odd, 0xdd));
  _mm_storeu_ps(out[0], _mm512_castps512_ps128(totals));
  _mm_storeu_ps(out[1], _mm512_extractf32x4_ps(totals, 1));
  _mm_storeu_ps(out[2], _mm512_extractf32x4_ps(totals, 2));
  _mm_storeu_ps(out[3], _mm512_extractf32x4_ps(totals, 3));
}

/* Adds the products of ROWS decoded rows with some rows of x to sums, which begin with zero; at last, puts their totals. */
INLINE void add_pairs(vf (*sums)[MOST_ROWS], const uint16_t *const rows[ROWS], int64_t numbers, const uint16_t *x,
                      int64_t step, const int x_rows, int is_first, int is_last, float (*out)[MOST_ROWS]) {
  vf kept[ROWS][X_ROWS];
  for (int p = 0; p < ROWS; p++)
    for (int r = 0; r < X_ROWS; r++) kept[p][r] = is_first || r >= x_rows ? f_zero() : sums[p][r];
  for (int64_t at = 0; at < numbers; at += 32) {
    __m512i some[X_ROWS];
    for (int r = 0; r < x_rows; r++) {
      some[r] = _mm512_loadu_si512(x + r * step + at);
      KEEP(some[r]);
    }
    for (int p = 0; p < ROWS; p++) {
      vp w = p_load(rows[p] + at);
      for (int r = 0; r < x_rows; r++) kept[p][r] = _mm512_dpbf16_ps(kept[p][r], w, (vp)some[r]);
    }
  }
  if (is_last) put_totals(kept, out);
  for (int p = 0; p < ROWS; p++)
    for (int r = 0; r < x_rows && !is_last; r++) sums[p][r] = kept[p][r];
}

static void multiply_pairs(const pairs_of_kind *kind, const stored_row *rows, int64_t count, int64_t columns,
                           const uint16_t *x, int64_t step, int64_t x_rows, float (*out)[MOST_ROWS]) {
  uint16_t tile[AT_ONCE][TILE + ASIDE];
  const uint16_t *decoded[AT_ONCE];
  vf sums[AT_ONCE][MOST_ROWS];
  for (int64_t begin = 0; begin < columns; begin += TILE) {
    int64_t end = begin + TILE < columns ? begin + TILE : columns, numbers = padded(end - begin);
    int is_stored_so = kind->round == round_bfloat16 && numbers == end - begin;
    for (int64_t p = 0; p < count; p++) {
      decoded[p] = is_stored_so ? (const uint16_t *)(const void *)rows[p].bytes + begin : tile[p];
      if (!is_stored_so) kind->round(rows + p, begin, end, tile[p]);
    }
    for (int64_t p = count; p < AT_ONCE; p++) decoded[p] = decoded[0]; /* ROWS are multiplied at a time */
    for (int64_t r = 0; r < x_rows; r += X_ROWS)
      for (int64_t p = 0; p < count; p += ROWS) {
        vf(*to)[MOST_ROWS] = (vf(*)[MOST_ROWS]) & sums[p][r];
        float(*totals)[MOST_ROWS] = (float(*)[MOST_ROWS]) & out[p][r];
#define ADD_PAIRS(x_rows) \
  add_pairs(to, decoded + p, numbers, x + r * step + begin, step, x_rows, begin == 0, end == columns, totals)
        switch (x_rows - r) {
          case 1:
            ADD_PAIRS(1);
            break;
          case 2:
            ADD_PAIRS(2);
            break;
          case 3:
            ADD_PAIRS(3);
            break;
          default:
            ADD_PAIRS(4);
        }
      }
  }
}

#ifndef __clang__
#pragma GCC pop_options
#endif

#define NUMBER_PAIRS(kind, nbytes) {round_##kind, dot_pairs_##kind},
#define CODED_PAIRS(kind, numbers, nbytes) {round_coded, dot_pairs_coded},
static const pairs_of_kind PAIRS[] = {NUMBER_KINDS(NUMBER_PAIRS) CODED_KINDS(CODED_PAIRS)};
extern const multiply_limbs limbs_vnni[BLOCKS];
extern int prepare_limbs_vnni(const float *x, int64_t columns, int is_short, int is_alone, chunk *to);
const functions NAME(functions_of_pairs) = {ROWS_OF_KINDS, PAIRS,              multiply_pairs, WORDS,
                                            limbs_vnni,    prepare_limbs_vnni, TOGETHER,       turn_floats};
