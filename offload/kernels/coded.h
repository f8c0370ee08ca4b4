/* Rows of blocks whose numbers are codes: what `coded.c` has taken apart, as vectors.
 *
 * Always true:
 * - all kinds share these functions: they are rare, and their codes cost more than their products
 */

INLINE void coded_at(const stored_row *row, int64_t at, vf w[NV]) {
  const coded_kind *kind = row->kind;
  coded found;
  kind->unpack(row->bytes + at / kind->numbers * kind->nbytes, (int)(at % kind->numbers) / 32, row->book, &found);
  for (int n = 0; n < NV; n++)
    w[n] = f_mul(f_set(found.factors[n * W / 16]), f_mul(f_of(i_s8(found.numbers + n * W)), f_set(found.unit)));
}

static void decode_coded(const stored_row *row, int64_t columns, void *out, int dtype) {
  vf w[NV];
  for (int64_t at = 0; at < columns; at += 32) {
    coded_at(row, at, w);
    for (int n = 0; n < NV; n++) store(out, at + n * W, dtype, w[n]);
  }
}

static float dot_coded(const stored_row *row, int64_t columns, const float *x) {
  vf w[NV], sums[SUMS];
  NO_SUMS(sums)
  for (int64_t at = 0; at < columns; at += 32) {
    coded_at(row, at, w);
    add_products(sums, w, x + at);
  }
  return total(sums);
}

static void multiply_coded(const stored_row rows[2], int64_t columns, const float *x, int64_t step, float *out,
                           int64_t out_step) {
  vf w[2][NV], sums[2][TOGETHER][SUMS];
  for (int p = 0; p < 2; p++)
    for (int r = 0; r < TOGETHER; r++) NO_SUMS(sums[p][r])
  for (int64_t at = 0; at < columns; at += 32) {
    for (int p = 0; p < 2; p++) coded_at(rows + p, at, w[p]);
    add_all_products(sums, w, x + at, step);
  }
  all_totals(sums, out, out_step);
}
