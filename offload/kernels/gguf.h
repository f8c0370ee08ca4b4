/* The kinds of blocks in GGUF files: 32 numbers of a row at a time, as floats.
 *
 * Always true:
 * - each number is rounded as in the `gguf` package's `dequantize`: first the factor of its group, then the product,
 *   then the sum
 * - `unpack_KIND(block, group, w)` gives numbers 32 * group to 32 * group + 31 of a block
 *
 * Source of the layouts: llama.cpp, ggml/src/ggml-common.h and ggml-quants.c.
 */

static const float COUNTED[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const float CENTRED[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const float NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const float E2M1_TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Numbers n * W to n * W + W - 1 of 32 halves of bytes: 16 low ones, then 16 high ones. Only the low four bits count. */
INLINE vi halves_of_16(const uint8_t *bytes, int n) {
  vi both = i_u8(bytes + (n * W & 15));
  return n * W < 16 ? both : i_shr(both, 4);
}

INLINE void picked_32(const uint8_t *bytes, vt table, vf w[NV]) {
  for (int n = 0; n < NV; n++) w[n] = t_pick(table, halves_of_16(bytes, n));
}

INLINE void unpack_q4_0(const uint8_t *block, int group, vf w[NV]) {
  (void)group;
  picked_32(block + 2, t_times(t_load(CENTRED), half_at(block)), w);
}

INLINE void unpack_q4_1(const uint8_t *block, int group, vf w[NV]) {
  (void)group;
  picked_32(block + 4, t_plus(t_times(t_load(COUNTED), half_at(block)), half_at(block + 2)), w);
}

INLINE vi fifths(const uint8_t *bytes, uint32_t high, int n) {
  vi low = i_and(halves_of_16(bytes, n), i_set(15));
  return i_or(low, i_shl(i_bit(high, n * W), 4));
}

INLINE void unpack_q5_0(const uint8_t *block, int group, vf w[NV]) {
  (void)group;
  vf factor = f_set(half_at(block));
  uint32_t high = u32_at(block + 2);
  for (int n = 0; n < NV; n++) w[n] = f_mul(factor, f_of(i_sub(fifths(block + 6, high, n), i_set(16))));
}

INLINE void unpack_q5_1(const uint8_t *block, int group, vf w[NV]) {
  (void)group;
  vf factor = f_set(half_at(block)), least = f_set(half_at(block + 2));
  uint32_t high = u32_at(block + 4);
  for (int n = 0; n < NV; n++) w[n] = f_add(f_mul(factor, f_of(fifths(block + 8, high, n))), least);
}

INLINE void unpack_q8_0(const uint8_t *block, int group, vf w[NV]) {
  (void)group;
  vf factor = f_set(half_at(block));
  for (int n = 0; n < NV; n++) w[n] = f_mul(f_of(i_s8(block + 2 + n * W)), factor);
}

/* Two bits of each of 32 bytes. */
INLINE vi quarters(const uint8_t *bytes, int group, int n) {
  return i_and(i_shr(i_u8(bytes + 32 * (group / 4) + n * W), 2 * (group % 4)), i_set(3));
}

INLINE void unpack_q2_k(const uint8_t *block, int group, vf w[NV]) {
  float factor = half_at(block + 80), least = half_at(block + 82);
  for (int n = 0; n < NV; n++) {
    int scale = block[2 * group + n * W / 16];
    vf product = f_mul(f_set(factor * (float)(scale & 15)), f_of(quarters(block + 16, group, n)));
    w[n] = f_sub(product, f_set(least * (float)(scale >> 4)));
  }
}

INLINE void unpack_q3_k(const uint8_t *block, int group, vf w[NV]) {
  const uint8_t *scales = block + 96;
  float factor = half_at(block + 108);
  for (int n = 0; n < NV; n++) {
    int number = 2 * group + n * W / 16;
    int scale = (scales[number % 8] >> 4 * (number / 8) & 15) | (scales[8 + number % 4] >> 2 * (number / 4) & 3) << 4;
    vi high = i_and(i_shr(i_u8(block + n * W), group), i_set(1));
    vi whole = i_sub(i_add(quarters(block + 32, group, n), i_shl(high, 2)), i_set(4));
    w[n] = f_mul(f_set(factor * (float)(scale - 32)), f_of(whole));
  }
}

/* The factor and the offset of a group in Q4_K and Q5_K. */
INLINE void factor_and_offset(const uint8_t *block, int group, float *factor, float *offset) {
  const uint8_t *scales = block + 4;
  int scale, least;
  if (group < 4) {
    scale = scales[group] & 63;
    least = scales[group + 4] & 63;
  } else {
    scale = (scales[group + 4] & 15) | (scales[group - 4] >> 6) << 4;
    least = scales[group + 4] >> 4 | (scales[group] >> 6) << 4;
  }
  *factor = half_at(block) * (float)scale;
  *offset = half_at(block + 2) * (float)least;
}

INLINE void unpack_q4_k(const uint8_t *block, int group, vf w[NV]) {
  float factor, offset;
  factor_and_offset(block, group, &factor, &offset);
  vt table = t_plus(t_times(t_load(COUNTED), factor), -offset);
  for (int n = 0; n < NV; n++)
    w[n] = t_pick(table, i_shr(i_u8(block + 16 + 32 * (group / 2) + n * W), 4 * (group % 2)));
}

INLINE void unpack_q5_k(const uint8_t *block, int group, vf w[NV]) {
  float factor, offset;
  factor_and_offset(block, group, &factor, &offset);
  for (int n = 0; n < NV; n++) {
    vi low = i_and(i_shr(i_u8(block + 48 + 32 * (group / 2) + n * W), 4 * (group % 2)), i_set(15));
    vi high = i_and(i_shr(i_u8(block + 16 + n * W), group), i_set(1));
    w[n] = f_sub(f_mul(f_set(factor), f_of(i_or(low, i_shl(high, 4)))), f_set(offset));
  }
}

INLINE void unpack_q6_k(const uint8_t *block, int group, vf w[NV]) {
  const uint8_t *low = block + 64 * (group / 4) + 32 * (group % 2);
  float factor = half_at(block + 208);
  for (int n = 0; n < NV; n++) {
    vi fours = i_and(i_shr(i_u8(low + n * W), 4 * (group / 2 % 2)), i_set(15));
    vi whole = i_sub(i_or(fours, i_shl(quarters(block + 128, group, n), 4)), i_set(32));
    w[n] = f_mul(f_set(factor * (float)(int8_t)block[192 + 2 * group + n * W / 16]), f_of(whole));
  }
}

INLINE void unpack_iq4_nl(const uint8_t *block, int group, vf w[NV]) {
  (void)group;
  picked_32(block + 2, t_times(t_load(NONLINEAR), half_at(block)), w);
}

INLINE void unpack_iq4_xs(const uint8_t *block, int group, vf w[NV]) {
  int low = block[4 + group / 2] >> 4 * (group % 2) & 15, high = u16_at(block + 2) >> 2 * group & 3;
  float factor = half_at(block) * (float)((low | high << 4) - 32);
  picked_32(block + 8 + 16 * group, t_times(t_load(NONLINEAR), factor), w);
}

INLINE void unpack_tq2_0(const uint8_t *block, int group, vf w[NV]) {
  vf factor = f_set(half_at(block + 64));
  for (int n = 0; n < NV; n++) w[n] = f_mul(factor, f_of(i_sub(quarters(block, group, n), i_set(1))));
}

INLINE void unpack_mxfp4(const uint8_t *block, int group, vf w[NV]) {
  (void)group;
  uint32_t bits = *block < 2 ? 0x00200000u << *block : (uint32_t)(*block - 1) << 23;
  picked_32(block + 1, t_times(t_load(E2M1_TWICE), bits_to_float(bits)), w);
}
