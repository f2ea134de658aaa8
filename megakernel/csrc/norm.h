// RMS norm (Zhang and Sennrich, 2019) as the reference rounds it: fp32, then bf16, then times the weight.
#pragma once

#include "tagged.h"

namespace mk {

// All consumers, once in a task: out[0 .. width) = norm(x) * weight, a multiple of 8, in shared memory. `out` is complete
// after the next consumer_sync. x is read once: where it comes from is far away, and so is the weight.
MK_CALL void norm(const Tagged* x, uint32_t tag, const bf16* weight, int width, float eps, bf16* out) {
  Shared& sh = shared();
  Vec16 values = {}, weights = {};  // this thread's first ones
  if (thread() < width / 8) {
    weights = load_vector(weight + 8 * thread());
    values = take_vector(x + 8 * thread(), tag);
  }
  float squares = 0;
  MK_UNROLL(1)
  for (int i = thread(); i < width / 8; i += CONSUMERS) {
    Vec16 own = values;
    if (i != thread()) store_vector(out + 8 * i, own = take_vector(x + 8 * i, tag));
    for (int j = 0; j < 4; ++j) {
      squares = fmaf(low_half(own.word[j]), low_half(own.word[j]), squares);
      squares = fmaf(high_half(own.word[j]), high_half(own.word[j]), squares);
    }
  }
  squares = wave_sum(squares);
  if (lane() == 0) sh.floats[wave()] = squares;
  consumer_sync();
  squares = 0;
  for (int i = 0; i < CONSUMER_WAVES; ++i) squares += sh.floats[i];
  const float scale = 1.0f / sqrtf(squares / width + eps);
  MK_UNROLL(1)
  for (int i = thread(); i < width / 8; i += CONSUMERS) {
    if (i != thread()) values = load_vector(out + 8 * i), weights = load_vector(weight + 8 * i);
    for (int j = 0; j < 4; ++j) {
      float low = low_half(weights.word[j]) * rounded(low_half(values.word[j]) * scale);
      float high = high_half(weights.word[j]) * rounded(high_half(values.word[j]) * scale);
      values.word[j] = (uint32_t)to_bf16(low) | (uint32_t)to_bf16(high) << 16;
    }
    store_vector(out + 8 * i, values);
  }
}

// A pair (x[2i], x[2i + 1]) rotated by an angle of which the cosine and the sine are given (RoFormer, 2021, eq. 34).
MK_DEVICE uint32_t rotated_pair(uint32_t pair, float cosine, float sine) {
  float even = low_half(pair), odd = high_half(pair);
  return (uint32_t)to_bf16(even * cosine - odd * sine) | (uint32_t)to_bf16(even * sine + odd * cosine) << 16;
}

// The element at `index` of x, rotated by the angle of this position.
MK_CALL bf16 rotated(const Tagged* x, uint32_t tag, int index, int position) {
  const Params& p = shared().params;
  const float* angle = (const float*)p.rotary + (int64_t)position * p.rope + (index & ~1);
  const Tagged* even = x + (index & ~1);
  const uint32_t low = load_relaxed(even), high = load_relaxed(even + 1);
  uint32_t pair = (uint32_t)taken(even, low, tag) | (uint32_t)taken(even + 1, high, tag) << 16;
  pair = rotated_pair(pair, angle[0], angle[1]);
  return (bf16)(index & 1 ? pair >> 16 : pair & 0xffffu);
}

// Eight elements that begin at `index` of such a vector, likewise.
MK_DEVICE Vec16 rotated_vector(Vec16 values, int index, int position) {
  const Params& p = shared().params;
  const float* angles = (const float*)p.rotary + (int64_t)position * p.rope + index;
  const Vec16 first = load_vector(angles), second = load_vector(angles + 4);
  for (int j = 0; j < 4; ++j) {
    const Vec16& own = j < 2 ? first : second;
    values.word[j] = rotated_pair(values.word[j], bits_to_float(own.word[j % 2 * 2]), bits_to_float(own.word[j % 2 * 2 + 1]));
  }
  return values;
}

}  // namespace mk
