// The router: softmax over the experts, and the most likely ones with their probabilities.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void moe_gate_topk(Consumer& c, const Task&, const Args& args, const Stream& s) {
  const Params& p = c.p;
  Routing* routing = (Routing*)(p.work + args.routing);
  float* logits = (float*)(routing + p.topk);
  float* scores = c.sh.scratch;
  for (int i = thread(); i < p.experts; i += CONSUMERS) logits[i] = scores[i] = row_sum(c.sh, s, i);
  consumer_sync();
  if (wave()) return;
  float largest = -INFINITY, sum = 0;
  for (int i = lane(); i < p.experts; i += WAVE) largest = fmaxf(largest, scores[i]);
  largest = wave_max(largest);
  for (int i = lane(); i < p.experts; i += WAVE) sum += expf(scores[i] - largest);
  sum = wave_sum(sum);
  // by probability, not by logit: what rounds to the same probability is a tie, and goes to the lowest id
  for (int i = lane(); i < p.experts; i += WAVE) scores[i] = expf(scores[i] - largest) / sum;
  for (int slot = 0; slot < p.topk; ++slot) {
    float best = -1;
    int id = p.experts;
    for (int i = lane(); i < p.experts; i += WAVE)
      if (scores[i] > best) best = scores[i], id = i;
    for (int mask = WAVE / 2; mask; mask /= 2) {
      float other = shuffle_xor(best, mask);
      int other_id = shuffle_xor(id, mask);
      if (other > best || (other == best && other_id < id)) best = other, id = other_id;
    }
    if (id == p.experts) id = 0, best = NAN;  // NaN logits: nothing compares
    if (lane() == 0) {
      routing[slot].expert = id;
      routing[slot].weight = best * p.routed_scale;
    }
    if (id % WAVE == lane()) scores[id] = -2;
    wave_sync();
  }
}

}  // namespace mk
