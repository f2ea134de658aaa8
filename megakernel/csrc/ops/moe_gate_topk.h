// The router in one task: its logits, and the experts.
#pragma once

#include "moe_topk.h"

namespace mk {

MK_DEVICE void moe_gate_topk(const Args& args, const Stream& s, int iteration) {
  const Params& p = shared().params;
  Routing* routing = (Routing*)(p.work + args.routing);
  TaggedFloat* logits = (TaggedFloat*)(routing + p.topk);
  const uint32_t tag = tag_of(iteration);
  float* scores = scores_of_wave();
  MK_UNROLL(1)
  for (int i = lane(); i < p.experts; i += WAVE) {
    scores[i] = row_sum(s, i);
    if (!wave()) post(logits + i, scores[i], tag);
  }
  choose_experts(routing, tag);
}

}  // namespace mk
