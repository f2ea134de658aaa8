// out = residual + (the weighted sum of the chosen experts, in the order of their ids, + the shared experts).
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void moe_combine(Consumer& c, const Task&, const Args& args) {
  const Params& p = c.p;
  const Routing* routing = (const Routing*)(p.work + args.routing);
  int32_t* order = (int32_t*)c.sh.slots;  // slots by the number of their expert
  if (thread() == 0)
    for (int slot = 0; slot < p.topk; ++slot) {
      int expert = fresh(&routing[slot].expert), at = slot;
      for (; at > 0 && fresh(&routing[order[at - 1]].expert) > expert; --at) order[at] = order[at - 1];
      order[at] = slot;
    }
  consumer_sync();
  const bf16* shared = (const bf16*)(p.work + args.shared);
  const bf16* residual = (const bf16*)(p.work + args.residual);
  bf16* out = (bf16*)(p.work + args.out);
  for (int i = thread(); i < args.cols; i += CONSUMERS) {
    float sum = 0;
    for (int place = 0; place < p.topk; ++place) {
      int slot = order[place], expert = fresh(&routing[slot].expert);
      const bf16* part = (const bf16*)(p.work + args.input + (args.slots ? slot : expert) * args.input_bytes);
      sum = rounded(sum + rounded(to_float(fresh(&part[i])) * fresh(&routing[slot].weight)));
    }
    sum = rounded(sum + to_float(fresh(&shared[i])));
    out[i] = to_bf16(to_float(fresh(&residual[i])) + sum);
  }
}

}  // namespace mk
