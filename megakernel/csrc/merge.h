// Joins what the chunks of positions left of each head's attention: unscaled outputs, each with the largest score that
// it is relative to and the sum of its weights (Dao et al., "Flash-Decoding", 2023).
#pragma once

#include "shared.h"

namespace mk {

// Chunks that a thread has on their way at once, because they are far away; as many as there are registers for.
constexpr int MERGED_AT_ONCE = WAVE == 32 ? 8 : 1;

// All consumers: out[(head - first) * width + i] for the heads [first, end), with a width that is a multiple of 4. `out`
// is complete after a consumer_sync.
MK_CALL void merge(const float* partials, int chunks, int first, int end, int width, bf16* out) {
  const int each = width + PARTIAL_STATS, quads = width / 4;
  const int64_t pitch = (int64_t)shared().params.heads * each;  // of a chunk
  // a thread has four outputs; if there are more threads than that, neighbours share them, each with some of the chunks
  const int items = (end - first) * quads;
  int bits = 0;
  while (2 * items << bits <= CONSUMERS && 2 << bits <= WAVE && 1 << bits < chunks) ++bits;
  const int share = thread() & ((1 << bits) - 1);
  const int64_t step = pitch << bits;
  const int at_once = (chunks - share + (1 << bits) - 1) >> bits;  // chunks of this thread
  Vec16 parts[MERGED_AT_ONCE];
  // the first ones are on their way while the factors are worked out
  const int mine = thread() >> bits, head_of_mine = mine / quads;
  const float* from = partials + (first + head_of_mine) * each + (mine - head_of_mine * quads) * 4 + share * pitch;
  if (mine < items && at_once > 0)
    MK_UNROLL(8)
    for (int j = 0; j < MERGED_AT_ONCE; ++j) parts[j] = fresh((const Vec16*)(from + (j < at_once ? j * step : 0)));

  // [end - first][chunks]; of one head every wave works them out for itself if they are few, so that nobody waits
  const bool alone = end - first == 1 && chunks <= ALONE_CHUNKS;
  float* factors = shared().scratch + (alone ? wave() * chunks : 0);
  MK_UNROLL(1)
  for (int head = first + (alone ? 0 : wave()); head < end; head += CONSUMER_WAVES) {
    const float* stats = partials + head * each + width;
    float largest = -INFINITY, sum = 0;
    Vec16 own = {};
    MK_UNROLL(1)
    for (int chunk = lane(); chunk < chunks; chunk += WAVE) {
      own = fresh((const Vec16*)(stats + chunk * pitch));
      largest = fmaxf(largest, bits_to_float(own.word[0]));
    }
    largest = wave_max(largest);
    MK_UNROLL(1)
    for (int chunk = lane(); chunk < chunks; chunk += WAVE) {
      if (chunks > WAVE) own = fresh((const Vec16*)(stats + chunk * pitch));
      const float factor = expf(bits_to_float(own.word[0]) - largest);
      sum = fmaf(factor, bits_to_float(own.word[1]), sum);
      factors[(head - first) * chunks + chunk] = factor;
    }
    sum = wave_sum(sum);
    MK_UNROLL(1)
    for (int chunk = lane(); chunk < chunks; chunk += WAVE) factors[(head - first) * chunks + chunk] /= sum;
  }
  if (alone)
    wave_sync();
  else
    consumer_sync();

  MK_UNROLL(1)
  for (int base = 0; base < items; base += CONSUMERS >> bits) {
    const int item = base + mine, head = item / quads;
    float values[4] = {0, 0, 0, 0};
    if (item < items) {
      from = partials + (first + head) * each + (item - head * quads) * 4 + share * pitch;
      const float* own = factors + head * chunks + share;
      MK_UNROLL(1)
      for (int done = 0; done < at_once; done += MERGED_AT_ONCE) {
        if (base || done)
          MK_UNROLL(8)
          for (int j = 0; j < MERGED_AT_ONCE; ++j) parts[j] = fresh((const Vec16*)(from + (done + j < at_once ? done + j : done) * step));
        MK_UNROLL(8)
        for (int j = 0; j < MERGED_AT_ONCE; ++j) {
          if (done + j >= at_once) continue;
          const float factor = own[(done + j) << bits];
          for (int k = 0; k < 4; ++k) values[k] = fmaf(factor, bits_to_float(parts[j].word[k]), values[k]);
        }
      }
    }
    MK_UNROLL(1)
    for (int mask = 1; mask < 1 << bits; mask *= 2)
      for (int k = 0; k < 4; ++k) values[k] += shuffle_xor(values[k], mask);
    if (item < items && !share)
      *(uint64_t*)(out + 4 * item) = (uint64_t)to_bf16(values[0]) | (uint64_t)to_bf16(values[1]) << 16 |
                                     (uint64_t)to_bf16(values[2]) << 32 | (uint64_t)to_bf16(values[3]) << 48;
  }
}

}  // namespace mk
