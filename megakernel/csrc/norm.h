// RMS norm (Zhang and Sennrich, 2019) as the reference rounds it: fp32, then bf16, then times the weight.
#pragma once

#include "shared.h"

namespace mk {

// All consumers: out[0 .. width) = norm(x) * weight, a multiple of 8. `out` is complete after the next consumer_sync.
// x is read once: where it comes from is far away.
MK_DEVICE void norm(Shared& sh, const bf16* x, const bf16* weight, int width, float eps, bf16* out) {
  float squares = 0;
  for (int i = thread(); i < width / 8; i += CONSUMERS) {
    Vec16 values = fresh((const Vec16*)x + i);
    ((Vec16*)out)[i] = values;
    for (int j = 0; j < 4; ++j) {
      squares = fmaf(low_half(values.word[j]), low_half(values.word[j]), squares);
      squares = fmaf(high_half(values.word[j]), high_half(values.word[j]), squares);
    }
  }
  float scale = 1.0f / sqrtf(consumer_sum(sh, squares) / width + eps);
  for (int i = thread(); i < width / 8; i += CONSUMERS) {
    Vec16 values = ((const Vec16*)out)[i], weights = ((const Vec16*)weight)[i];
    for (int j = 0; j < 4; ++j) {
      float low = low_half(weights.word[j]) * rounded(low_half(values.word[j]) * scale);
      float high = high_half(weights.word[j]) * rounded(high_half(values.word[j]) * scale);
      values.word[j] = (uint32_t)to_bf16(low) | (uint32_t)to_bf16(high) << 16;
    }
    ((Vec16*)out)[i] = values;
  }
}

// Of a pair (x[2i], x[2i + 1]) the one at `index`, rotated by the angle of this position (RoFormer, 2021, eq. 34).
MK_DEVICE bf16 rotated(const Params& p, const bf16* x, int index, int position) {
  const float* angle = (const float*)p.rotary + (int64_t)position * p.rope + (index & ~1);
  float even = to_float(fresh(&x[index & ~1])), odd = to_float(fresh(&x[index | 1]));
  return to_bf16(index & 1 ? even * angle[1] + odd * angle[0] : even * angle[0] - odd * angle[1]);
}

}  // namespace mk
