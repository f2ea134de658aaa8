// The router in one task: its logits, and the experts.
#pragma once

#include "moe_topk.h"

namespace mk {

MK_DEVICE void moe_gate_topk(const Args& args, const Stream& s) {
  Shared& sh = shared();
  const Params& p = shared().params;
  if (wave()) return;
  Routing* routing = (Routing*)(p.work + args.routing);
  float* logits = (float*)(routing + p.topk);
  MK_UNROLL(1)
  for (int i = lane(); i < p.experts; i += WAVE) logits[i] = sh.scratch[i] = row_sum(s, i);
  choose_experts(routing);
}

}  // namespace mk
