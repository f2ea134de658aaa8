// Joins what the chunks of positions left of each head's attention: unscaled outputs, each with the largest score that
// it is relative to and the sum of its weights (Dao et al., "Flash-Decoding", 2023).
#pragma once

#include "shared.h"

namespace mk {

// All consumers: out[(head - first) * width + i] for the heads [first, end). `out` is complete after a consumer_sync.
MK_DEVICE void merge(Shared& sh, const float* partials, int chunks, int heads, int first, int end, int width, bf16* out) {
  int each = width + PARTIAL_STATS;
  float* factors = sh.scratch;  // [end - first][chunks]
  for (int head = first + wave(); head < end; head += CONSUMER_WAVES) {
    float largest = -INFINITY, sum = 0;
    for (int chunk = lane(); chunk < chunks; chunk += WAVE)
      largest = fmaxf(largest, fresh(&partials[((int64_t)chunk * heads + head) * each + width]));
    largest = wave_max(largest);
    for (int chunk = lane(); chunk < chunks; chunk += WAVE) {
      const float* stats = partials + ((int64_t)chunk * heads + head) * each + width;
      float factor = expf(fresh(&stats[0]) - largest);
      sum = fmaf(factor, fresh(&stats[1]), sum);
      factors[(head - first) * chunks + chunk] = factor;
    }
    sum = wave_sum(sum);
    for (int chunk = lane(); chunk < chunks; chunk += WAVE) factors[(head - first) * chunks + chunk] /= sum;
  }
  consumer_sync();
  // four values at a time, and many chunks on their way at once: they are far away
  for (int i = thread(); i < (end - first) * (width / 4); i += CONSUMERS) {
    int head = first + i / (width / 4), at = i % (width / 4) * 4;
    const float* own = factors + (head - first) * chunks;
    float value[4] = {0, 0, 0, 0};
    MK_UNROLL(8)
    for (int chunk = 0; chunk < chunks; ++chunk) {
      Vec16 part = fresh((const Vec16*)(partials + ((int64_t)chunk * heads + head) * each + at));
      for (int j = 0; j < 4; ++j) value[j] = fmaf(own[chunk], bits_to_float(part.word[j]), value[j]);
    }
    for (int j = 0; j < 4; ++j) out[(head - first) * width + at + j] = to_bf16(value[j]);
  }
}

}  // namespace mk
