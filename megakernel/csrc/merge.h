// Joins what the chunks of positions left of each head's attention: unscaled outputs, each with the largest score that
// it is relative to and the sum of its weights (Dao et al., "Flash-Decoding", 2023).
#pragma once

#include "shared.h"

namespace mk {

// Chunks that a thread has on their way at once, because they are far away; as many as there are registers for.
constexpr int MERGED_AT_ONCE = WAVE == 32 ? 8 : 2;

struct Merge {
  const float* partials;
  int chunks, heads;  // heads of the model
  int first, width;   // of the heads that are merged
  int each;           // words of a head

  MK_DEVICE const float* head(int chunk, int head) const { return partials + ((int64_t)chunk * heads + head) * each; }

  // Loads up to MERGED_AT_ONCE of the chunks from `chunk` on in steps.
  MK_DEVICE void load(Vec16* parts, int item, int chunk, int step) const {
    int own = first + item / (width / 4), at = item % (width / 4) * 4;
    MK_UNROLL(8)
    for (int j = 0; j < MERGED_AT_ONCE; ++j) {
      int wanted = chunk + j * step;
      parts[j] = fresh((const Vec16*)(head(wanted < chunks ? wanted : chunk, own) + at));
    }
  }
};

// All consumers: out[(head - first) * width + i] for the heads [first, end). `out` is complete after a consumer_sync.
// `sums`: shared memory for four words of each thread, apart from `out`.
MK_CALL void merge(const float* partials, int chunks, int first, int end, int width, bf16* out, float* sums) {
  const Merge m = {partials, chunks, shared().params.heads, first, width, width + PARTIAL_STATS};
  float* factors = shared().scratch;  // [end - first][chunks]
  // a thread has four outputs; if there are more threads than that, several share them, each with some of the chunks
  const int items = (end - first) * (width / 4);
  int shares = 1;
  while (shares * 2 * items <= CONSUMERS && shares < chunks) shares *= 2;
  Vec16 parts[MERGED_AT_ONCE];
  if (thread() < items * shares) m.load(parts, thread() % items, thread() / items, shares);

  MK_UNROLL(1)
  for (int head = first + wave(); head < end; head += CONSUMER_WAVES) {
    Vec16 stats = {};
    if (lane() < chunks) stats = fresh((const Vec16*)(m.head(lane(), head) + width));
    float largest = lane() < chunks ? bits_to_float(stats.word[0]) : -INFINITY, sum = 0;
    MK_UNROLL(1)
    for (int chunk = lane() + WAVE; chunk < chunks; chunk += WAVE) largest = fmaxf(largest, fresh(m.head(chunk, head) + width));
    largest = wave_max(largest);
    MK_UNROLL(1)
    for (int chunk = lane(); chunk < chunks; chunk += WAVE) {
      if (chunk >= WAVE) stats = fresh((const Vec16*)(m.head(chunk, head) + width));
      float factor = expf(bits_to_float(stats.word[0]) - largest);
      sum = fmaf(factor, bits_to_float(stats.word[1]), sum);
      factors[(head - first) * chunks + chunk] = factor;
    }
    sum = wave_sum(sum);
    MK_UNROLL(1)
    for (int chunk = lane(); chunk < chunks; chunk += WAVE) factors[(head - first) * chunks + chunk] /= sum;
  }
  consumer_sync();
  MK_UNROLL(1)
  for (int i = thread(); i < items * shares; i += CONSUMERS) {
    const int item = i % items, share = i / items;
    const float* own = factors + item / (width / 4) * chunks;
    float value[4] = {0, 0, 0, 0};
    MK_UNROLL(1)
    for (int chunk = share; chunk < chunks; chunk += MERGED_AT_ONCE * shares) {
      if (i != thread() || chunk != share) m.load(parts, item, chunk, shares);
      MK_UNROLL(8)
      for (int j = 0; j < MERGED_AT_ONCE; ++j)
        if (chunk + j * shares < chunks)
          for (int k = 0; k < 4; ++k) value[k] = fmaf(own[chunk + j * shares], bits_to_float(parts[j].word[k]), value[k]);
    }
    if (shares > 1)
      store_vector(sums + 4 * i, Vec16{{float_to_bits(value[0]), float_to_bits(value[1]), float_to_bits(value[2]), float_to_bits(value[3])}});
    else
      for (int k = 0; k < 4; ++k) out[item * 4 + k] = to_bf16(value[k]);
  }
  if (shares == 1) return;
  consumer_sync();
  MK_UNROLL(1)
  for (int i = thread(); i < items * 4; i += CONSUMERS) {
    float sum = 0;
    MK_UNROLL(1)
    for (int share = 0; share < shares; ++share) sum += sums[share * items * 4 + i];
    out[i] = to_bf16(sum);
  }
}

}  // namespace mk
