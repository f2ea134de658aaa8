// RMS norm (Zhang and Sennrich, 2019) as the reference rounds it: fp32, then bf16, then times the weight.
#pragma once

#include "shared.h"

namespace mk {

// All consumers: out[0 .. width) = norm(x) * weight. `out` is complete after the next consumer_sync.
MK_DEVICE void norm(Shared& sh, const bf16* x, const bf16* weight, int width, float eps, bf16* out) {
  float squares = 0;
  for (int i = thread(); i < width; i += CONSUMERS) {
    float value = to_float(fresh(&x[i]));
    squares = fmaf(value, value, squares);
  }
  float scale = 1.0f / sqrtf(consumer_sum(sh, squares) / width + eps);
  for (int i = thread(); i < width; i += CONSUMERS)
    out[i] = to_bf16(to_float(weight[i]) * rounded(to_float(fresh(&x[i])) * scale));
}

// Of a pair (x[2i], x[2i + 1]) the one at `index`, rotated by the angle of this position (RoFormer, 2021, eq. 34).
MK_DEVICE bf16 rotated(const Params& p, const bf16* x, int index, int position) {
  const float* angle = (const float*)p.rotary + (int64_t)position * p.rope + (index & ~1);
  float even = to_float(fresh(&x[index & ~1])), odd = to_float(fresh(&x[index | 1]));
  return to_bf16(index & 1 ? even * angle[1] + odd * angle[0] : even * angle[0] - odd * angle[1]);
}

}  // namespace mk
