// The norm of a state, where its readers don't compute it themselves.
#pragma once

#include "../gemv.h"

namespace mk {

MK_CALL void rms_norm(int slot, int iteration) {
  const Params& p = shared().params;
  const Args& args = shared().args[slot];
  const Tagged* x = (const Tagged*)(p.work + args.input);
  Tagged* out = (Tagged*)(p.work + args.out);
  const uint32_t tag = tag_of(iteration);
  norm(x, tag, (const bf16*)(p.weights + args.norm), args.cols, p.eps, shared().x);
  consumer_sync();
  MK_UNROLL(1)
  for (int i = thread(); i < args.cols; i += CONSUMERS) post(out + i, shared().x[i], tag);
}

}  // namespace mk
