// The norm of a state, where its readers don't compute it themselves.
#pragma once

#include "../gemv.h"

namespace mk {

MK_CALL void rms_norm(int slot) {
  const Params& p = shared().params;
  const Args& args = shared().args[slot];
  const bf16* x = (const bf16*)(p.work + args.input);
  norm(x, (const bf16*)(p.weights + args.norm), args.cols, p.eps, (bf16*)(p.work + args.out));
}

}  // namespace mk
