/* Numbers whose factors are stored elsewhere: integers, small floats, and halves of bytes that stand for 16 numbers.
 *
 * Always true:
 * - a number minus its zero point, times its factor, times the last factor: each step rounds to float32
 * - `unpack_KIND(bytes, scale, w)` gives 32 numbers
 *
 * Source of the small floats: OCP 8-bit Floating Point Specification (OFP8) 1.0.
 */

typedef struct {
  vt tables[2]; /* for the first and the last 16 of 32 numbers */
  vf factors[2], zeros[2], last;
  vf more[2];   /* 256 times the factors */
  int is_large; /* whether that would overflow, or there is more to do than to multiply */
  int is_one, has_zeros, has_last; /* is_one: all 32 numbers have one factor */
} scale;

INLINE int64_t group_at(const stored_row *row, int64_t at) { return at / (row->group < 32 ? 16 : row->group); }

INLINE scale scale_of(const stored_row *row, int64_t group) {
  scale made;
  made.is_one = row->group >= 32;
  int64_t groups[2] = {group, group + !made.is_one};
  made.has_zeros = row->zeros != 0;
  made.has_last = row->last != 1;
  made.last = f_set(row->last);
  made.is_large = made.has_zeros || made.has_last;
  for (int n = 0; n < 2; n++) {
    float factor = row->factors ? row->factors[groups[n]] : 1, zero = made.has_zeros ? row->zeros[groups[n]] : 0;
    made.factors[n] = f_set(factor);
    made.more[n] = f_set(factor * 256);
    made.is_large |= fabsf(factor) >= 0x1p119f;
    made.zeros[n] = f_set(zero);
    made.tables[n] = t_times(t_plus(t_load(row->table), -zero), factor);
  }
  return made;
}

/* Which of the two factors numbers n * W to n * W + W - 1 have. */
#define PART(n) ((n) * W / 16)

INLINE vf scaled(const scale *by, vf number, int n) {
  if (by->has_zeros) number = f_sub(number, by->zeros[PART(n)]);
  number = f_mul(number, by->factors[PART(n)]);
  return by->has_last ? f_mul(number, by->last) : number;
}

INLINE void unpack_halves(const uint8_t *bytes, const scale *by, vf w[NV], const int first, const int second) {
#if W == 1
  for (int n = 0; n < 32; n++) w[n] = t_pick(by->tables[PART(n)], bytes[n / 2] >> (n % 2 ? second : first));
#else
  for (int n = 0; n < NV; n += 2) {
    vi both = i_u8(bytes + n * W / 2);
    vf zipped[2], other[2];
    f_zip(t_pick(by->tables[PART(n)], i_shr(both, first)), t_pick(by->tables[PART(n)], i_shr(both, second)), zipped);
    w[n] = zipped[0];
    if (by->is_one || PART(n) == PART(n + 1)) {
      w[n + 1] = zipped[1];
    } else { /* a vector of both parts */
      f_zip(t_pick(by->tables[1], i_shr(both, first)), t_pick(by->tables[1], i_shr(both, second)), other);
      w[n + 1] = other[1];
    }
  }
#endif
}

INLINE void unpack_halves_low(const uint8_t *bytes, const scale *by, vf w[NV]) { unpack_halves(bytes, by, w, 0, 4); }

INLINE void unpack_halves_high(const uint8_t *bytes, const scale *by, vf w[NV]) { unpack_halves(bytes, by, w, 4, 0); }

INLINE void unpack_signed_bytes(const uint8_t *bytes, const scale *by, vf w[NV]) {
  for (int n = 0; n < NV; n++) w[n] = scaled(by, f_of(i_s8(bytes + n * W)), n);
}

INLINE void unpack_centred_bytes(const uint8_t *bytes, const scale *by, vf w[NV]) {
  for (int n = 0; n < NV; n++) w[n] = scaled(by, f_of(i_sub(i_u8(bytes + n * W), i_set(128))), n);
}

INLINE void unpack_e4m3(const uint8_t *bytes, const scale *by, vf w[NV]) {
  int all_finite = !has_nan_e4m3(bytes);
  for (int n = 0; n < NV; n++) {
    vf number = f_of_e4m3(bytes + n * W); /* divided by 256 */
    if (!all_finite) {
      vi magnitude = i_and(i_u8(bytes + n * W), i_set(0x7f));
      number = f_bits(i_or(i_bits(number), i_and(i_gt(magnitude, 0x7e), i_set(0x7fc00000))));
    }
    w[n] = by->is_large ? scaled(by, f_mul(number, f_set(256)), n) : f_mul(number, by->more[PART(n)]);
  }
}

INLINE void unpack_e5m2(const uint8_t *bytes, const scale *by, vf w[NV]) {
  for (int n = 0; n < NV; n++) w[n] = scaled(by, f_of_e5m2(bytes + n * W), n);
}

INLINE void unpack_bfloat16(const uint8_t *bytes, const scale *by, vf w[NV]) {
  (void)by;
  for (int n = 0; n < NV; n++) w[n] = f_bits(i_shl(i_u16(bytes + 2 * n * W), 16));
}

INLINE void unpack_float16(const uint8_t *bytes, const scale *by, vf w[NV]) {
  (void)by;
  for (int n = 0; n < NV; n++) w[n] = f_from_halves(bytes + 2 * n * W);
}

INLINE void unpack_float32(const uint8_t *bytes, const scale *by, vf w[NV]) {
  (void)by;
  for (int n = 0; n < NV; n++) w[n] = f_load((const float *)(const void *)(bytes + 4 * n * W));
}
