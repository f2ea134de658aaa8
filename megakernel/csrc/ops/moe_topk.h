// The experts: softmax over the router's logits, and the most likely ones with their probabilities.
#pragma once

#include "../gemv.h"

namespace mk {

// This wave's copy of the router's scores: every wave has all of them, and looks for the places of some experts.
MK_DEVICE float* scores_of_wave() { return shared().scratch + wave() * shared().params.experts; }

// All consumers: from logits in each wave's scores, of which each lane has written those that it reads.
MK_CALL void choose_experts(Routing* routing, uint32_t tag) {
  constexpr int AT_ONCE = 8, SHARES = WAVE / AT_ONCE;  // experts of a wave at once, and lanes that count for each
  const Params& p = shared().params;
  float* scores = scores_of_wave();
  float largest = -INFINITY, sum = 0;
  MK_UNROLL(1)
  for (int i = lane(); i < p.experts; i += WAVE) largest = fmaxf(largest, scores[i]);
  largest = wave_max(largest);
  MK_UNROLL(1)
  for (int i = lane(); i < p.experts; i += WAVE) {
    scores[i] = expf(scores[i] - largest);
    sum += scores[i];
  }
  sum = wave_sum(sum);
  // by probability, not by logit: what rounds to the same probability is a tie, and goes to the lowest id
  MK_UNROLL(1)
  for (int i = lane(); i < p.experts; i += WAVE) scores[i] /= sum;
  wave_sync();
  if (!(sum >= 0)) {  // NaN logits: nothing compares
    MK_UNROLL(1)
    for (int slot = thread(); slot < p.topk; slot += CONSUMERS) post(routing + slot, 0, NAN, tag);
    return;
  }
  MK_UNROLL(1)
  for (int base = wave() * AT_ONCE; base < p.experts; base += CONSUMER_WAVES * AT_ONCE) {
    const int expert = base + lane() / SHARES;
    const float own = scores[expert < p.experts ? expert : 0];
    int rank = 0;  // how many come before
    MK_UNROLL(4)
    for (int j = lane() % SHARES; j < p.experts; j += SHARES)
      rank += scores[j] > own || (scores[j] == own && j < expert);
    for (int mask = 1; mask < SHARES; mask *= 2) rank += shuffle_xor(rank, mask);
    if (lane() % SHARES == 0 && expert < p.experts && rank < p.topk) post(routing + rank, expert, own * p.routed_scale, tag);
  }
}

MK_CALL void moe_topk(int slot, int iteration) {
  const Params& p = shared().params;
  const Args& args = shared().args[slot];
  Routing* routing = (Routing*)(p.work + args.routing);
  const TaggedFloat* logits = (const TaggedFloat*)(routing + p.topk);
  const uint32_t tag = tag_of(iteration);
  float* scores = scores_of_wave();
  MK_UNROLL(2)
  for (int i = lane(); i < p.experts; i += WAVE) scores[i] = take(logits + i, tag);
  consumer_sync();  // a wave may find no place for its experts: all have read before the token goes on
  choose_experts(routing, tag);
}

}  // namespace mk
