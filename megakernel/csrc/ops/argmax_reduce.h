// The token: the best of the shares' best.
#pragma once

#include "argmax_partial.h"

namespace mk {

MK_CALL void argmax_reduce(int slot, int iteration) {
  const Params& p = shared().params;
  const Args& args = shared().args[slot];
  if (wave()) return;
  const Partial* partials = (const Partial*)(p.work + args.input);
  const bool greedy = p.temperature == 0;
  const double temperature = divisor(p.temperature);
  float largest = -INFINITY;
  int bad = 0;
  MK_UNROLL(1)
  for (int i = lane(); i < args.parts; i += WAVE) {
    float x = fresh(&partials[i].largest);
    if (x != x) bad = 1;
    largest = fmaxf(largest, x);
  }
  largest = wave_max(largest);
  double best = -INFINITY;
  int at = args.parts, token = 0;
  MK_UNROLL(1)
  for (int i = lane(); i < args.parts; i += WAVE) {
    float x = fresh(&partials[i].largest);
    double key = greedy ? (double)x : fresh(&partials[i].key) + ((double)x - (double)largest) / temperature;
    if (key > best) {
      best = key, at = i;
      token = fresh(greedy ? &partials[i].argmax : &partials[i].drawn);
    }
  }
  for (int mask = WAVE / 2; mask; mask /= 2) {
    double other = shuffle_xor(best, mask);
    int other_at = shuffle_xor(at, mask), other_token = shuffle_xor(token, mask);
    bad |= shuffle_xor(bad, mask);
    if (other > best || (other == best && other_at < at)) best = other, at = other_at, token = other_token;
  }
  if (lane() == 0) {
    bool valid = !bad && at < args.parts;
    *(int32_t*)(p.work + args.out) = valid ? token : 0;  // what the next iteration looks up is in the table
    ((int32_t*)p.tokens)[iteration] = valid ? token : -1;
    ((int64_t*)p.times)[iteration] = nanoseconds();
  }
}

}  // namespace mk
