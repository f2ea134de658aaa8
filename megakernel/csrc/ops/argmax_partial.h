// The best token of a share of the vocabulary: the largest logit, and what the sampling noise makes the best.
#pragma once

#include "../gemv.h"
#include "../noise.h"

namespace mk {

// T = 0 is greedy and needs none of it.
MK_DEVICE double divisor(float temperature) {
  return fmin(fmax((double)temperature, 1.1754943508222875e-38), 8.507059173023462e+37);  // 2^-126, 2^126
}

MK_CALL void argmax_partial(int slot, int iteration) {
  Shared& sh = shared();
  const Params& p = shared().params;
  const Task& task = shared().task[slot];
  const Args& args = shared().args[slot];
  const float* logits = (const float*)(p.work + args.input);
  const int begin = task.chunk[0], end = task.chunk[1];

  float largest = -INFINITY;
  int id = end, bad = 0;
  MK_UNROLL(1)
  for (int i = begin + thread(); i < end; i += CONSUMERS) {
    float x = fresh(&logits[i]);
    if (!(x < INFINITY)) bad = 1;
    if (x > largest) largest = x, id = i;
  }
  for (int mask = WAVE / 2; mask; mask /= 2) {
    float other = shuffle_xor(largest, mask);
    int other_id = shuffle_xor(id, mask);
    bad |= shuffle_xor(bad, mask);
    if (other > largest || (other == largest && other_id < id)) largest = other, id = other_id;
  }
  if (lane() == 0) {
    sh.floats[wave()] = bad ? NAN : largest;
    sh.ints[wave()] = id;
  }
  consumer_sync();
  largest = sh.floats[0], id = sh.ints[0];
  for (int i = 1; i < CONSUMER_WAVES; ++i) {
    float other = sh.floats[i];
    if (other > largest || other != other || (other == largest && sh.ints[i] < id)) largest = other, id = sh.ints[i];
    if (largest != largest) break;
  }
  consumer_sync();

  Partial* out = (Partial*)(p.work + args.out) + task.at;
  if (p.temperature == 0 || !(largest > -INFINITY)) {
    if (thread() == 0) *out = Partial{-INFINITY, largest, id < end ? id : begin, begin, 0};
    return;
  }

  // 32 threads for each group
  constexpr int PER_WAVE = WAVE / GROUP, TOGETHER = CONSUMERS / GROUP;
  const double temperature = divisor(p.temperature);
  const int groups = (end - begin + NOISE_BLOCK - 1) / NOISE_BLOCK * GROUPS_PER_BLOCK;
  const int first = begin / NOISE_BLOCK * GROUPS_PER_BLOCK, own = thread() / GROUP, place = thread() % GROUP;
  double best = -INFINITY;
  int best_group = first;
  MK_UNROLL(1)
  for (int base = wave() * PER_WAVE; base < groups; base += TOGETHER) {
    int group = first + base + lane() / GROUP;
    int token = member(group, place);
    double x = token < end ? (double)fresh(&logits[token]) : -INFINITY, most = x;
    for (int mask = GROUP / 2; mask; mask /= 2) most = fmax(most, shuffle_xor(most, mask));
    double sum = x > -INFINITY ? exp((x - most) / temperature) : 0;
    for (int mask = 1; mask < GROUP; mask *= 2) sum += shuffle_xor(sum, mask);
    if (most > -INFINITY && base + lane() / GROUP < groups) {
      Words words = group_words(p.seed, p.noise_position + iteration, group);
      double key = (most - (double)largest) / temperature + log(sum) + gumbel(words.word[0], words.word[1]);
      if (key > best) best = key, best_group = group;
    }
  }
  if (place == 0) {
    sh.doubles[own] = best;
    sh.ints[own] = best_group;
  }
  consumer_sync();
  for (int i = 0; i < TOGETHER; ++i)
    if (sh.doubles[i] > best || (sh.doubles[i] == best && sh.ints[i] < best_group)) best = sh.doubles[i], best_group = sh.ints[i];
  consumer_sync();
  if (thread() < GROUP) {
    int token = member(best_group, place);
    sh.doubles[place] = token < end ? (double)fresh(&logits[token]) : -INFINITY;
  }
  consumer_sync();
  if (thread() == 0) {
    double weights[GROUP], most = -INFINITY;
    for (int i = 0; i < GROUP; ++i) most = fmax(most, sh.doubles[i]);
    for (int i = 0; i < GROUP; ++i) weights[i] = exp((sh.doubles[i] - most) / temperature);
    Words words = group_words(p.seed, p.noise_position + iteration, best_group);
    *out = Partial{best, largest, id, member(best_group, descend(weights, words.word[2], words.word[3])), 0};
  }
}

}  // namespace mk
