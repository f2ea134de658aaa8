// The experts: softmax over the router's logits, and the most likely ones with their probabilities.
#pragma once

#include "../gemv.h"

namespace mk {

// One wave: from logits in `scratch`, of which each thread has written those that it reads. They are overwritten.
MK_CALL void choose_experts(Routing* routing) {
  const Params& p = shared().params;
  float* scores = shared().scratch;
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
    for (int slot = lane(); slot < p.topk; slot += WAVE) routing[slot] = Routing{0, NAN};
    return;
  }
  MK_UNROLL(1)
  for (int i = lane(); i < p.experts; i += WAVE) {
    int rank = 0;  // how many come before
    MK_UNROLL(8)
    for (int j = 0; j < p.experts; ++j) rank += scores[j] > scores[i] || (scores[j] == scores[i] && j < i);
    if (rank < p.topk) routing[rank] = Routing{i, scores[i] * p.routed_scale};
  }
}

MK_CALL void moe_topk(int slot) {
  Shared& sh = shared();
  const Params& p = shared().params;
  const Args& args = shared().args[slot];
  if (wave()) return;
  Routing* routing = (Routing*)(p.work + args.routing);
  const float* logits = (const float*)(routing + p.topk);
  MK_UNROLL(4)
  for (int i = lane(); i < p.experts; i += WAVE) sh.scratch[i] = fresh(&logits[i]);
  choose_experts(routing);
}

}  // namespace mk
