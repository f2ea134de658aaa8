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
  // they are far away: the first ones of each lane are loaded at once, as whole records
  constexpr int AT_ONCE = 4, WORDS = sizeof(Partial) / 8;
  uint64_t words[AT_ONCE][WORDS];
  MK_UNROLL(4)
  for (int j = 0; j < AT_ONCE; ++j) {
    const int i = lane() + j * WAVE < args.parts ? lane() + j * WAVE : 0;
    for (int k = 0; k < WORDS; ++k) words[j][k] = fresh((const uint64_t*)(partials + i) + k);
  }
  const auto partial = [&](int j) {
    Partial found;
    uint64_t own[WORDS];
    for (int k = 0; k < WORDS; ++k) own[k] = j < AT_ONCE ? words[j][k] : fresh((const uint64_t*)(partials + lane() + j * WAVE) + k);
    memcpy(&found, own, sizeof found);
    return found;
  };
  float largest = -INFINITY;
  int bad = 0;
  MK_UNROLL(4)
  for (int j = 0; lane() + j * WAVE < args.parts; ++j) {
    const float x = partial(j).largest;
    if (x != x) bad = 1;
    largest = fmaxf(largest, x);
  }
  largest = wave_max(largest);
  double best = -INFINITY;
  int at = args.parts, token = 0;
  MK_UNROLL(4)
  for (int j = 0; lane() + j * WAVE < args.parts; ++j) {
    const Partial own = partial(j);
    const double key = greedy ? (double)own.largest : own.key + ((double)own.largest - (double)largest) / temperature;
    if (key > best) best = key, at = lane() + j * WAVE, token = greedy ? own.argmax : own.drawn;
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
